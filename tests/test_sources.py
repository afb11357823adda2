"""Documents out of files, odd ones included."""

import gzip
import json

import pytest

from spanbert_jax.corpus.sources import (
    Replaced,
    find_sources,
    read_documents,
)
from spanbert_jax.errors import InputError


def read(path, file_format="text", text_field="text", replaced=None):
    (source,) = find_sources([str(path)], file_format)
    return list(read_documents(source, text_field, replaced or Replaced()))


def test_blank_lines_end_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\n\n\nword\n  \t \nthree\nlast line")
    assert read(path) == [["one", "two"], ["word"], ["three", "last line"]]


@pytest.mark.parametrize("content", [b"", b"\n\n", b" \n\t\r\n\n", b"\xef\xbb\xbf"])
def test_files_without_text_have_no_document(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert read(path) == []


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n")
    assert read(path) == [["one", "two"], ["three"]]


@pytest.mark.parametrize("separator", "\u2028\u2029\x0b\x0c\x85\x1c\r")
def test_only_a_line_feed_ends_a_line(tmp_path, separator):
    path = tmp_path / "a.txt"
    path.write_text(f"a{separator}{separator}b\nc", encoding="utf-8", newline="")
    assert read(path) == [[f"a{separator}{separator}b", "c"]]


def test_bytes_that_are_not_utf8_are_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 \xff\n\nfine \xef\xbf\xbd\n\nna\xefve")
    replaced = Replaced()
    documents = read(path, replaced=replaced)
    assert documents == [["caf\ufffd \ufffd"], ["fine \ufffd"], ["na\ufffdve"]]
    assert replaced == Replaced(characters=3, documents=2)


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [
        {"body": "one\ntwo\n\n three \u2028 \n", "id": 1},
        {"body": " \n "},
        {"body": "lone \ud800 and pair \U0001f600"},
    ]
    path.write_text("\n\n".join(map(json.dumps, records)))
    replaced = Replaced()
    assert read(path, "jsonl", "body", replaced) == [
        ["one", "two", "three"],
        ["lone \ufffd and pair \U0001f600"],
    ]
    assert replaced == Replaced(characters=1, documents=1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not JSON"),
        ('["text"]', "not a JSON object but list"),
        ('{"title": "a"}', "no field --text_field=text; there are title"),
        ('{"text": null}', "holds NoneType"),
    ],
)
def test_faulty_json_is_refused_with_file_and_line(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=message) as error:
        read(path, "jsonl")
    assert f"{path}, line 2" in str(error.value)


def test_gzip(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n\ntwo"))
    assert read(path) == [["one"], ["two"]]
    path.write_bytes(gzip.compress(b"one\n\ntwo")[:-6])
    with pytest.raises(InputError, match="cannot read"):
        read(path)


def test_patterns_are_expanded_in_order_and_each_file_once(tmp_path):
    for name in ("b.txt", "a.txt", "c[1].txt", "d.md"):
        (tmp_path / name).write_text("x")
    (tmp_path / "sub.txt").mkdir()
    (tmp_path / "sub.txt" / "e.txt").write_text("xyz")

    def names(*patterns):
        sources = find_sources([str(tmp_path / p) for p in patterns], "text")
        return [source.name for source in sources]

    assert names("*.txt") == ["a.txt", "b.txt", "c[1].txt"]
    assert names("b.txt", "*.txt", "d.md") == ["a.txt", "b.txt", "c[1].txt", "d.md"]
    assert names(f"b.txt,{tmp_path}/c[1].txt") == ["b.txt", "c[1].txt"]
    assert names("**/e.txt") == ["e.txt"]
    with pytest.raises(InputError, match=r"none\*.txt matches no file"):
        names("a.txt", "none*.txt")
    with pytest.raises(InputError, match="is a directory"):
        names("sub.txt")
    with pytest.raises(InputError, match="--input is missing"):
        find_sources([" , "], "text")


def test_embedded_text():
    (source,) = find_sources([], "embedded")
    documents = list(read_documents(source, "", Replaced()))
    assert len(documents) >= 70
    lines = [line for document in documents for line in document]
    assert sum(map(len, lines)) > 300_000
    assert all(line == line.strip() and "\n" not in line and line for line in lines)
    assert not any(line.startswith(("***", "+--")) for line in lines)
    # Wrapped lines are joined: paragraphs are longer than any line of a terminal.
    assert sum(len(line) > 80 for line in lines) > 1000
    assert documents == list(read_documents(source, "", Replaced()))
