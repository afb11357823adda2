"""Vocabularies: what is refused, what is learned, and no special id from text."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spanbert_jax.corpus.tokenizers import (
    Specials,
    load_wordpiece,
    train_wordpiece,
)
from spanbert_jax.errors import InputError

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "wordpiece"
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cat", "sat", "##s", "##ter", "[", "]", "MA", "##SK", "MASK", "é", "."]


def write_vocabulary(path: Path, tokens: list[str], end: str = "\n") -> Path:
    path.write_bytes("".join(token + end for token in tokens).encode())
    return path


@pytest.fixture
def tokenizer(tmp_path):
    tokens = ["[PAD]", "[unused1]", *SPECIALS[1:], *WORDS]
    return load_wordpiece(write_vocabulary(tmp_path / "v.txt", tokens))


def spell(tokenizer, line):
    return [tokenizer.tokens[i] for i in tokenizer.encode([line])[0]]


def random_lines(count, seed=0):
    generator = random.Random(seed)
    words = [
        "".join(generator.choices("abcdefghijklmnoöp", k=generator.randint(1, 9)))
        for _ in range(150)
    ]
    return [" ".join(generator.choices(words, k=20)) + "." for _ in range(count)]


def test_known_vocabulary(tokenizer):
    assert tokenizer.special_ids == (0, 2, 3, 4, 5)
    assert tokenizer.vocab_size == 18
    continued = [i for i, start in enumerate(tokenizer.starts_word) if not start]
    assert [tokenizer.tokens[i] for i in continued] == ["##s", "##ter", "##SK"]
    assert tokenizer.replacement_ids.dtype == np.int32
    np.testing.assert_array_equal(tokenizer.replacement_ids, np.arange(6, 18))


def test_encode_keeps_case_accents_and_the_order_of_lines(tokenizer):
    lines = ["the cats sat.", "", "  \t ", "The é", "the cats sat."]
    spelt = [[tokenizer.tokens[i] for i in ids] for ids in tokenizer.encode(lines)]
    sentence = ["the", "cat", "##s", "sat", "."]
    assert spelt == [sentence, [], [], ["[UNK]", "é"], sentence]


@pytest.mark.parametrize("literal", [*SPECIALS, "[unused1]", "[MA\0SK]", "x[MASK]"])
def test_special_tokens_never_come_from_text(tokenizer, literal):
    ids = tokenizer.encode([f"the {literal} cat"])[0]
    allowed = {*tokenizer.replacement_ids.tolist(), tokenizer.unk_id}
    assert set(ids) <= allowed
    assert tokenizer.tokens[ids[1]] in ("[", "[UNK]")


def test_a_special_spelt_like_a_word_never_comes_from_text(tmp_path):
    path = write_vocabulary(tmp_path / "v.txt", [*SPECIALS[:4], "MASK", "the"])
    tokenizer = load_wordpiece(path, Specials(mask="MASK"))
    assert spell(tokenizer, "the MASK") == ["the", "[UNK]"]


def test_unknown_and_overlong_words_and_lone_surrogates(tokenizer):
    assert spell(tokenizer, "the zebra") == ["the", "[UNK]"]
    assert spell(tokenizer, "cat" + "s" * 97) == ["cat", *["##s"] * 97]
    assert spell(tokenizer, "cat" + "s" * 98) == ["[UNK]"]
    assert spell(tokenizer, "the \ud800 cat") == ["the", "[UNK]", "cat"]


def test_chunks_at_hand_do_not_change_the_ids(tokenizer, monkeypatch):
    lines = [f"the {'cat' * (i % 7)}s . {i}" for i in range(3000)]
    expected = tokenizer.encode(lines)
    monkeypatch.setattr("spanbert_jax.corpus.tokenizers._KNOWN_CHARACTERS", 10)
    assert tokenizer.encode(lines) == expected
    assert [tokenizer.encode([line])[0] for line in lines] == expected
    whole = tokenizer._encoder.encode_batch(lines)
    assert [encoding.ids for encoding in whole] == expected


def test_saved_vocabulary_is_the_same(tokenizer, tmp_path):
    loaded = load_wordpiece(tokenizer.save(tmp_path))
    assert loaded == tokenizer
    assert loaded.sha256 == tokenizer.sha256


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    tokens = [*SPECIALS, "the", "\u2028"]
    plain = load_wordpiece(write_vocabulary(tmp_path / "a", tokens))
    windows = write_vocabulary(tmp_path / "b", tokens, "\r\n")
    windows.write_bytes(b"\xef\xbb\xbf" + windows.read_bytes())
    assert load_wordpiece(windows) == plain
    assert plain.tokens == tuple(tokens)


@pytest.mark.parametrize("missing", SPECIALS)
def test_missing_special_token_is_named(tmp_path, missing):
    tokens = [token for token in [*SPECIALS, "the"] if token != missing]
    path = write_vocabulary(tmp_path / "v.txt", tokens)
    with pytest.raises(InputError) as error:
        load_wordpiece(path)
    assert missing in str(error.value)
    assert f"--vocab={path}" in str(error.value)
    assert f"--{missing[1:-1].lower()}_token" in str(error.value)
    with pytest.raises(InputError) as error:
        load_wordpiece(path, setting="data.corpus")
    assert str(error.value) == f"data.corpus={path} has no token {missing!r}"


def test_other_spellings_are_accepted_when_configured(tmp_path):
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "the"]
    path = write_vocabulary(tmp_path / "v.txt", tokens)
    specials = Specials("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    tokenizer = load_wordpiece(path, specials)
    assert tokenizer.special_ids == (1, 3, 0, 2, 4)
    assert tokenizer.specials == specials
    assert not set(tokenizer.encode(["<mask> <s>"])[0]) - {tokenizer.unk_id}
    with pytest.raises(InputError, match="spelt alike"):
        load_wordpiece(path, Specials("<pad>", "<unk>", "<s>", "<s>", "<mask>"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([*SPECIALS, "a", "", "b"], "line 7 is blank"),
        ([*SPECIALS, "a", "b", "a"], "line 8 repeats 'a' of line 6"),
        (SPECIALS, "no token besides"),
    ],
)
def test_faulty_vocabularies_are_refused(tmp_path, tokens, message):
    with pytest.raises(InputError, match=message):
        load_wordpiece(write_vocabulary(tmp_path / "v.txt", tokens))


def test_unreadable_vocabularies_are_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        load_wordpiece(tmp_path / "none.txt")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match="not UTF-8"):
        load_wordpiece(tmp_path / "latin")


def test_learned_vocabulary_is_that_of_any_other_process():
    lines = random_lines(300)
    code = (
        "import test_tokenizers as t\n"
        "print(t.train_wordpiece(t.random_lines(300), 300).sha256)"
    )
    shas = {train_wordpiece(lines, 300).sha256}
    shas.add(train_wordpiece(iter(reversed(lines)), 300).sha256)
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        )
        shas.add(done.stdout.strip())
    assert len(shas) == 1


def test_learned_vocabulary_spells_its_text():
    lines = random_lines(300) + ["Ünïcode Straße 中文 [MASK]"] * 10
    tokenizer = train_wordpiece(lines, 400)
    assert tokenizer.vocab_size == 400
    assert tokenizer.tokens[:5] == tuple(SPECIALS)
    assert len(set(tokenizer.tokens)) == 400
    for line, ids in zip(lines, tokenizer.encode(lines), strict=True):
        assert tokenizer.unk_id not in ids
        spelt = "".join(tokenizer.tokens[i].removeprefix("##") for i in ids)
        assert spelt == line.replace(" ", "")
    pieces = sum(map(len, tokenizer.encode(lines)))
    assert pieces < sum(len(line.replace(" ", "")) for line in lines) / 2


def test_small_text_gives_a_small_vocabulary():
    tokenizer = train_wordpiece(["to be or not to be"], 1000)
    assert 5 < tokenizer.vocab_size < 40
    assert "be" in tokenizer.tokens


def test_rare_characters_do_not_fill_the_vocabulary():
    rare = "".join(chr(0x0530 + i) for i in range(38))
    lines = ["abc abd " * 200_000, rare]
    tokenizer = train_wordpiece(lines, 200)
    assert not set(rare) & {token.removeprefix("##") for token in tokenizer.tokens}
    assert set(tokenizer.encode([rare])[0]) == {tokenizer.unk_id}


def test_too_small_a_vocabulary_is_refused_with_the_numbers():
    with pytest.raises(InputError, match=r"--vocab_size=20 has room for \d+ of .* 18 "):
        train_wordpiece(random_lines(100), 20)
    with pytest.raises(InputError, match="no word"):
        train_wordpiece(["", "\0"], 100)


@pytest.mark.skipif(not SHARED.exists(), reason=f"BERT's vocabulary is not in {SHARED}")
def test_ids_of_bert():
    tokenizer = load_wordpiece(SHARED / "vocab.txt")
    golden = json.loads((SHARED / "golden_cased.json").read_text())
    assert tokenizer.encode([entry["text"] for entry in golden]) == [
        entry["ids"] for entry in golden
    ]
    unused = sum(token.startswith("[unused") for token in tokenizer.tokens)
    assert unused == 101
    assert len(tokenizer.replacement_ids) == 28996 - 5 - unused
