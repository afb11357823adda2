"""Documents out of pieces of files, however these are dressed and cut."""

import bz2
import gzip
import itertools
import json
import lzma
import random

import fsspec
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from cuts import random_data, read_plainly
from records import build_tfds
from spanbert_jax.corpus.cleaning import Dirt
from spanbert_jax.corpus.files import File
from spanbert_jax.corpus.lines import CELL_BYTES
from spanbert_jax.corpus.readers import read_documents, read_json, read_text
from spanbert_jax.corpus.sources import (
    Piece,
    Reading,
    cut_into_parts,
    find_sources,
)
from spanbert_jax.errors import InputError

# What protobuf says of how TFDS calls it.
_TFDS_WARNINGS = pytest.mark.filterwarnings("ignore:label:DeprecationWarning")


def read(pattern, part_size=1 << 30, **options):
    """All documents that a pattern names, and what was dirty, piece by piece."""
    reading, dirt = Reading(**options), Dirt()
    sources = find_sources([str(pattern)], reading)
    documents = []
    for piece in itertools.chain(*cut_into_parts(sources, part_size, reading)):
        documents += read_documents(sources[piece.source], piece, reading, dirt)
    return documents, dirt


def write(path, content):
    path.write_bytes(content)
    return path


# Text: documents and pieces.


def test_blank_lines_end_documents(tmp_path):
    content = b"\n\none\ntwo\n   \nword\n\n \t \nthree\nlast line"
    path = write(tmp_path / "a.txt", content)
    assert read(path) == ([["one", "two"], ["word"], ["three", "last line"]], Dirt())


@pytest.mark.parametrize("content", [b"", b"\n\n", b" \n\t\r\n\n", "\u3000\n".encode()])
def test_files_without_text_have_no_document(tmp_path, content):
    assert read(write(tmp_path / "a.txt", content)) == ([], Dirt())


def cut_at_random(rng, size):
    edges = sorted(rng.randrange(size + 1) for _ in range(rng.randrange(6)))
    return list(itertools.pairwise([0, *edges, size]))


@pytest.mark.parametrize("cell", [8, 30, 1000])
def test_any_cut_gives_the_documents_and_the_dirt_of_the_whole(tmp_path, cell):
    rng = random.Random(cell)
    path, reading = tmp_path / "a.txt", Reading()
    for _ in range(400):
        data = random_data(rng, 300)
        write(path, data)
        (source,) = find_sources([str(path)], reading)
        expected, expected_dirt = read_plainly(data, cell)
        dirt = Dirt()
        for start, stop in cut_at_random(rng, len(data)):
            with File(str(path)) as file:
                piece = Piece(0, start, stop, stop - start)
                found = list(read_text(source, file, piece, reading, dirt, cell))
            owned = [lines for begin, lines in expected if start <= begin < stop]
            assert found == owned
        assert dirt == expected_dirt


def test_no_document_shorter_than_a_cell_is_cut_and_none_is_longer_than_three(tmp_path):
    rng = random.Random(4)
    cell, path, reading = 64, tmp_path / "a.txt", Reading()
    for _ in range(300):
        lines = [b"x" * rng.randrange(1, 20) for _ in range(rng.randrange(200))]
        blank = rng.random() / 4
        data = b"\n".join(b"" if rng.random() < blank else line for line in lines)
        write(path, data)
        (source,) = find_sources([str(path)], reading)
        piece, dirt = Piece(0, 0, len(data), len(data)), Dirt()
        with File(str(path)) as file:
            documents = list(read_text(source, file, piece, reading, dirt, cell))
        assert max((sum(map(len, found)) for found in documents), default=0) < 3 * cell
        whole = [text.strip(b"\n") for text in data.split(b"\n\n")]
        assert len(documents) - dirt.cut_documents == sum(map(bool, whole))
        if all(len(text) < cell for text in whole):
            assert dirt.cut_documents == 0
        if any(len(text) >= 3 * cell for text in whole):
            assert dirt.cut_documents > 0


def test_packed_files_are_cut_like_plain_ones_but_read_as_one_piece(tmp_path):
    data = random_data(random.Random(8), 4000) + b"x\n\n" + b"y" * 100
    write(tmp_path / "a.txt", data)
    expected = read(tmp_path / "a.txt", 500)
    for suffix, pack in PACKERS.items():
        path = write(tmp_path / f"a.txt{suffix}", pack(data))
        assert read(path, 500) == expected


# What the same documents look like in other dress.

TEXTS = [
    "one  line\nand a second “one”",
    "中文。\n\u3000naïve café\n",
    "a word",
    "tab\there\n" + "w" * 10_000,
]
DOCUMENTS = [[line.strip() for line in text.split("\n") if line] for text in TEXTS]
PLAIN = "\n\n".join(TEXTS).encode()


def zstd_frames(data):
    """Two frames with a skippable one between, and sizes that are not told."""
    packer = zstandard.ZstdCompressor(write_content_size=False)
    middle = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    cut = len(data) // 2
    return packer.compress(data[:cut]) + middle + packer.compress(data[cut:])


PACKERS = {
    ".gz": lambda data: gzip.compress(data[:7]) + gzip.compress(data[7:]),
    ".bz2": lambda data: bz2.compress(data[:7]) + bz2.compress(data[7:]),
    ".xz": lambda data: lzma.compress(data[:7]) + lzma.compress(data[7:]),
    ".zst": zstd_frames,
}


def with_nuls(data):
    """A NUL after each word."""
    return data.replace(b" ", b"\x00 ")


def spelt_out(text):
    return json.dumps({"n": 1, "text": text}) + "\n"


DRESSES = {
    "plain.txt": PLAIN,
    "crlf.txt": PLAIN.replace(b"\n", b"\r\n"),
    "blank_lines.txt": b"\n \n" + PLAIN.replace(b"\n\n", b"\n\t\n\n \r\n") + b"\n\n",
    "marks.txt": b"\xef\xbb\xbf" + PLAIN.replace(b"\n\n", b"\n\n\xef\xbb\xbf"),
    "nuls.txt": with_nuls(PLAIN),
    "broken.txt": PLAIN.replace(b"w", b"\xe4\xb8w"),
    **{f"packed.txt{suffix}": pack(PLAIN) for suffix, pack in PACKERS.items()},
    "escapes.jsonl": "".join(map(spelt_out, TEXTS)).encode(),
    "raw.jsonl": b"\xef\xbb\xbf\n"
    + "\r\n".join(
        json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS
    ).encode(),
    "controls.jsonl": "\n".join(
        json.dumps({"text": text.replace("\n", "\r\n\x00").replace(" ", "\x01 ")})
        for text in TEXTS
    )
    .replace("\\u0001", "\x01")
    .encode(),
    "halves.jsonl": "\n".join(spelt_out(text + "\ud83d") for text in TEXTS).encode(),
    "packed.jsonl.zst": zstd_frames("".join(map(spelt_out, TEXTS)).encode()),
}


@pytest.mark.parametrize("name", DRESSES)
@pytest.mark.parametrize("part_size", [99, 1 << 20])
def test_the_same_documents_in_any_dress(tmp_path, name, part_size):
    path = write(tmp_path / name, DRESSES[name])
    format_ = "jsonl" if "jsonl" in name else "text"
    assert read(path, part_size, format=format_)[0] == DOCUMENTS


@pytest.mark.parametrize(
    "kind",
    [
        *(pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()),
        *(pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view()),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("part_size", [1, 1 << 20])
def test_the_same_documents_from_parquet(tmp_path, kind, part_size):
    texts = [text.encode() for text in TEXTS]
    column = pyarrow.array(texts, pyarrow.binary())
    if not pyarrow.types.is_dictionary(kind):
        column = column.cast(kind)
    else:
        column = column.cast(pyarrow.string()).dictionary_encode()
    table = pyarrow.table({"id": list(range(len(texts))), "text": column})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    documents, dirt = read(tmp_path / "a.parquet", part_size, format="parquet")
    assert (documents, dirt) == (DOCUMENTS, Dirt())


@_TFDS_WARNINGS
@pytest.mark.parametrize("part_size", [60, 1 << 20])
def test_the_same_documents_from_tfds(tmp_path, part_size):
    build_tfds(tmp_path, TEXTS)
    found = read("tfds:toy_texts", part_size, data_dir=str(tmp_path))
    assert found == (DOCUMENTS, Dirt())


def test_the_same_documents_over_a_url():
    with fsspec.open("memory://dress/a.txt", "wb") as file:
        file.write(PLAIN)
    assert read("memory://dress/*.txt", 50) == (DOCUMENTS, Dirt())


# Records.


def test_records_without_a_text_are_counted(tmp_path):
    texts = [None, " \n\x00", "one\n\n two ", "", None]
    content = "\n\n".join(json.dumps({"body": text}) for text in texts)
    path = write(tmp_path / "a.jsonl", content.encode())
    expected = Dirt(null_texts=2, empty_records=2, control_characters=1)
    found = read(path, format="jsonl", text_field="body")
    assert found == ([["one", "two"]], expected)
    table = pyarrow.table({"body": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    found = read(tmp_path / "a.parquet", 1, format="parquet", text_field="body")
    assert found == ([["one", "two"]], expected)
    nulls = pyarrow.table({"body": pyarrow.nulls(3)})
    parquet.write_table(nulls, tmp_path / "b.parquet")
    found = read(tmp_path / "b.parquet", format="parquet", text_field="body")
    assert found == ([], Dirt(null_texts=3))


def test_any_cut_of_json_lines_gives_the_same_texts(tmp_path):
    rng = random.Random(9)
    path, reading = tmp_path / "a.jsonl", Reading(format="jsonl")
    for _ in range(300):
        texts = [rng.choice(["ü", "x" * 30, "\ud800", ""]) for _ in range(8)]
        records = [json.dumps({"text": text}) for text in texts]
        data = rng.choice(["\n", "\r\n", "\n\n", "\n\ufeff"]).join(records).encode()
        write(path, data)
        (source,) = find_sources([str(path)], reading)
        found, dirt = [], Dirt()
        for start, stop in cut_at_random(rng, len(data)):
            with File(str(path)) as file:
                piece = Piece(0, start, stop, stop - start)
                found += read_json(source, file, piece, reading, dirt)
        assert found == texts
        assert dirt == Dirt(byte_order_marks=data.count(b"\xef\xbb\xbf"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not JSON"),
        ("[" * 200_000, "not JSON"),
        ('["text"]', "not a JSON object but list"),
        ('{"title": "a"}', "no field --text_field=text; there are title"),
        ('{"text": 5}', "holds int, not a text"),
    ],
)
def test_faulty_json_is_refused_with_file_and_place(tmp_path, line, message):
    first = '{"text": "fine"}\n'
    path = write(tmp_path / "a.jsonl", (first + line).encode())
    with pytest.raises(InputError, match=message) as error:
        read(path, format="jsonl")
    assert f"{path}, line 2" in str(error.value)
    with pytest.raises(InputError, match=message) as error:
        read(path, len(first), format="jsonl")
    assert f"{path}, the line at byte {len(first)}" in str(error.value)


def test_a_record_has_a_largest_size(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' * 2)
    reading = Reading(format="jsonl")
    (source,) = find_sources([str(path)], reading)
    for largest in (16, 17):
        with File(str(path)) as file:
            texts = read_json(
                source, file, Piece(0, 0, 34, 34), reading, Dirt(), largest
            )
            if largest == 17:
                assert list(texts) == ["fine", "fine"]
            else:
                with pytest.raises(InputError, match="line 1: longer than 16 bytes"):
                    list(texts)


def test_parquet_without_the_column_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(InputError, match="=text; there are id, body"):
        read(path, format="parquet")
    with pytest.raises(InputError, match="--text_field=id holds int64, not a text"):
        read(path, format="parquet", text_field="id")
    write(path, b"no Parquet at all")
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet"):
        read(path, format="parquet", text_field="body")


def test_strings_of_parquet_need_not_be_utf8(tmp_path):
    broken = pyarrow.array([b"caf\xe9", b"fine"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    documents, dirt = read(tmp_path / "a.parquet", format="parquet")
    assert documents == [["caf"], ["fine"]]
    assert dirt == Dirt(replaced_characters=1, replaced_documents=1)
    with pytest.raises(InputError, match=r"a\.parquet, row 0 .*byte 3 \(0xe9\)"):
        read(tmp_path / "a.parquet", format="parquet", invalid="strict")


@_TFDS_WARNINGS
def test_tfds_is_read_in_ranges_and_its_field_must_be_text(tmp_path):
    texts = [f"text {number}" for number in range(37)]
    build_tfds(tmp_path, texts)
    options = {"data_dir": str(tmp_path), "format": "tfds"}
    documents, _ = read("toy_texts:1.0.0", 100, **options)
    assert documents == [[text] for text in texts]
    with pytest.raises(InputError, match="no feature --text_field=body; there are"):
        read("toy_texts", text_field="body", **options)
    with pytest.raises(InputError, match=r"--text_field=number holds .* not a text"):
        read("toy_texts", text_field="number", **options)


# Dirt, and files that are not what they are taken for.


def test_documents_with_broken_bytes_are_counted_once(tmp_path):
    content = b"\xff\n\na\xff\xfe\nb\xff\n\nfine\n\n\xe9t\xe9"
    path = write(tmp_path / "a.txt", content)
    for part_size in (1, 3, 100):
        documents, dirt = read(path, part_size)
        assert documents == [["a", "b"], ["fine"], ["t"]]
        assert dirt == Dirt(replaced_characters=6, replaced_documents=2)
    with pytest.raises(InputError, match=r"a\.txt: byte 0 \(0xff\) is not UTF-8"):
        read(path, invalid="strict")


def test_strict_names_the_place_in_the_unpacked_file(tmp_path):
    filler = b"fine\n\n" * 100_000
    path = write(tmp_path / "a.txt.gz", gzip.compress(filler + b"a\xff"))
    with pytest.raises(InputError, match=rf"byte {len(filler) + 1} \(0xff\)"):
        read(path, invalid="strict")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text".encode("utf-16"), "is UTF-16; convert it to UTF-8"),
        (b"\xfe\xff" + "text".encode("utf-16-be"), "is UTF-16"),
        ("text".encode("utf-32"), "is UTF-32"),
        (b"\x00\x00\xfe\xff" + "text".encode("utf-32-be"), "is UTF-32"),
        (b"PAR1....PAR1", "is a Parquet file; use --format=parquet"),
        (b"x" * 257 + b"ustar\x00", "is a tar archive"),
        (gzip.compress(b"text", mtime=0), r"its name must end in \.gz"),
        (zstandard.compress(b"text"), r"its name must end in \.zst"),
        (bz2.compress(b"text"), r"its name must end in \.bz2"),
        (lzma.compress(b"text"), r"its name must end in \.xz"),
        (b"PK\x03\x04....", "is a ZIP archive"),
    ],
)
@pytest.mark.parametrize("format_", ["text", "jsonl"])
def test_files_that_are_no_text_are_refused(tmp_path, content, message, format_):
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(InputError, match=message):
        read(path, format=format_)
    # Not but its first bytes make a file what it is.
    path = write(tmp_path / "b.txt.zst", zstandard.compress(content))
    with pytest.raises(InputError, match=message):
        read(path, format=format_)


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_packed_file_that_breaks_off_is_refused(tmp_path, suffix):
    packed = PACKERS[suffix](random.Random(3).randbytes(1000).hex().encode())
    path = write(tmp_path / f"a.txt{suffix}", packed[:-6])
    with pytest.raises(InputError, match=rf"cannot read .*a\.txt{suffix}"):
        read(path)
    write(path, b"nothing packed")
    with pytest.raises(InputError, match=rf"cannot read .*a\.txt{suffix}"):
        read(path)


def test_a_file_that_is_gone_is_one_sentence(tmp_path):
    path = write(tmp_path / "a.txt", b"text")
    (source,) = find_sources([str(path)], Reading())
    path.unlink()
    with pytest.raises(InputError, match="cannot read"):
        list(read_documents(source, Piece(0, 0, 4, 4), Reading(), Dirt()))


# Size.


def test_a_word_and_a_line_of_great_length_stay_whole(tmp_path):
    word, line = b"w" * 10_000, b"some words " * 4_600_000
    path = write(tmp_path / "a.txt", b"a\n" + word + b"\n" + line + b"\nz\n\nlast")
    first = ["a", word.decode(), line.decode().strip(), "z"]
    for part_size in (20_000_000, 1 << 30):
        assert read(path, part_size) == ([first, ["last"]], Dirt())


@pytest.mark.slow
def test_a_file_of_one_line_is_read_in_bounded_parts(tmp_path):
    path = write(tmp_path / "a.txt", b"some words " * 28_000_000)
    documents, dirt = read(path, 40_000_000)
    lines = [line for document in documents for line in document]
    assert " ".join(lines).count("some words") == 28_000_000
    assert max(map(len, lines)) < 2 * CELL_BYTES
    assert max(sum(map(len, document)) for document in documents) < 3 * CELL_BYTES
    assert len(lines) == 5
    assert len(documents) > 2
    assert dirt == Dirt(cut_lines=4, cut_documents=len(documents) - 1)


# The embedded text.


def test_embedded_text():
    documents, dirt = read("", format="embedded", unicode="nfc")
    assert len(documents) >= 70
    assert dirt == Dirt()
    lines = [line for document in documents for line in document]
    assert sum(map(len, lines)) > 300_000
    assert all(line == line.strip() and "\n" not in line and line for line in lines)
    assert not any(line.startswith(("***", "+--")) for line in lines)
    # Wrapped lines are joined: paragraphs are longer than any line of a terminal.
    assert sum(len(line) > 80 for line in lines) > 1000
