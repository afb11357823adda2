"""WordPiece: files that are refused, what is learned, BERT's ids."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from spanbert_jax.corpus import wordpiece
from spanbert_jax.corpus.tokenizers import STARTS, Normalisation, Specials
from spanbert_jax.corpus.wordpiece import load_wordpiece, train_wordpiece
from spanbert_jax.errors import InputError
from vocabularies import SPECIALS, random_lines, run_python, spell, write_vocabulary

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "wordpiece"
WORDS = ["the", "cat", "sat", "##s", "##ter", "[", "]", "MA", "##SK", "MASK", "é", "."]


@pytest.fixture
def tokenizer(tmp_path):
    tokens = ["[PAD]", "[unused1]", *SPECIALS[1:], *WORDS]
    return load_wordpiece(write_vocabulary(tmp_path / "v.txt", tokens))


def test_known_vocabulary(tokenizer):
    assert tokenizer.special_ids == (0, 2, 3, 4, 5)
    assert tokenizer.vocab_size == 18
    assert tokenizer.word_edges.dtype == np.uint8
    assert set(tokenizer.word_edges.tolist()) == {0, STARTS}
    continued = [i for i, edges in enumerate(tokenizer.word_edges) if not edges]
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
    monkeypatch.setattr("spanbert_jax.corpus.wordpiece._KNOWN_CHARACTERS", 10)
    assert tokenizer.encode(lines) == expected
    assert [tokenizer.encode([line])[0] for line in lines] == expected
    whole = tokenizer._encoder.encode_batch(lines)
    assert [encoding.ids for encoding in whole] == expected


def test_windows_line_ends_and_byte_order_mark(tmp_path):
    tokens = [*SPECIALS, "the", "\u2028"]
    plain = load_wordpiece(write_vocabulary(tmp_path / "a", tokens))
    windows = write_vocabulary(tmp_path / "b", tokens, "\r\n")
    windows.write_bytes(b"\xef\xbb\xbf" + windows.read_bytes())
    assert load_wordpiece(windows) == plain
    assert plain.tokens == tuple(tokens)


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
        "import vocabularies as v\n"
        "print(v.train_wordpiece(v.random_lines(300), 300).sha256)"
    )
    shas = {train_wordpiece(lines, 300).sha256}
    shas.add(train_wordpiece(iter(reversed(lines)), 300).sha256)
    for _ in range(2):
        shas.add(run_python(code).stdout.strip())
    assert len(shas) == 1


def test_learned_vocabulary_spells_its_text():
    lines = random_lines(300) + ["Ünïcode Straße 中文 [MASK]"] * 10
    tokenizer = train_wordpiece(lines, 400)
    assert tokenizer.vocab_size == 400
    assert tokenizer.tokens[:5] == tuple(SPECIALS)
    assert len(set(tokenizer.tokens)) == 400
    for line, ids in zip(lines, tokenizer.encode(lines), strict=True):
        assert tokenizer.unk_id not in ids
        spelt = "".join(tokenizer.spell(i)[0] for i in ids)
        assert spelt == line.replace(" ", "")
    pieces = sum(map(len, tokenizer.encode(lines)))
    assert pieces < sum(len(line.replace(" ", "")) for line in lines) / 2


def test_a_learned_vocabulary_is_of_the_text_as_it_will_be_encoded():
    lines = ["Crème BRÛLÉE crème"] * 50
    folded = train_wordpiece(["creme brulee creme"] * 50, 60)
    normalisation = Normalisation(lowercase=True, strip_accents=True)
    tokenizer = train_wordpiece(lines, 60, normalisation=normalisation)
    assert tokenizer.tokens == folded.tokens
    assert tokenizer.encode(lines) == folded.encode(["creme brulee creme"] * 50)


def test_small_text_gives_a_small_vocabulary():
    tokenizer = train_wordpiece(["to be or not to be", "\ud800"], 1000)
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


def test_threads_share_a_tokenizer_whose_memory_is_short(monkeypatch):
    monkeypatch.setattr(wordpiece, "_KNOWN_CHARACTERS", 200)
    lines = random_lines(400)
    tokenizer = train_wordpiece(lines, 300)
    expected = tokenizer.encode(lines)
    with ThreadPoolExecutor(8) as pool:
        parts = [lines[begin::8] for begin in range(8)] * 5
        found = list(pool.map(tokenizer.encode, parts))
    assert found == [expected[begin::8] for begin in range(8)] * 5
