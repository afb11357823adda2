"""What holds for tokenizers of every kind."""

import hashlib
import unicodedata

import numpy as np
import pytest

from spanbert_jax.corpus import tokenizers
from spanbert_jax.corpus.sentencepiece import train_sentencepiece
from spanbert_jax.corpus.tokenizers import (
    Normalisation,
    Specials,
    Tokenizer,
    load_saved,
    load_tokenizer,
)
from spanbert_jax.corpus.wordpiece import train_wordpiece
from spanbert_jax.errors import InputError
from vocabularies import (
    KINDS,
    ODD,
    SPECIALS,
    learn,
    random_lines,
    tricky_lines,
    write_vocabulary,
)

SEVERAL = "ﬁ½Ⅳⅳ"
FOLDS = [
    Normalisation(lowercase=lowercase, strip_accents=strip)
    for lowercase in (False, True)
    for strip in (False, True)
]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    return learn(request.param)


def fold(text: str, normalisation: Normalisation) -> str:
    """The fold once more, with Python's tables."""
    if normalisation.strip_accents:
        text = "".join(
            c
            for c in unicodedata.normalize("NFD", text)
            if unicodedata.category(c) != "Mn"
        )
    # Character by character: a final sigma is like any other.
    return "".join(c.lower() for c in text) if normalisation.lowercase else text


def visible(text: str) -> str:
    """A text of any tokenizer without what they do away with."""
    text = unicodedata.normalize("NFKC", text)
    return "".join(c for c in text if not c.isspace() and c not in ODD[1:])


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path)
    assert path == tmp_path / tokenizer.file_name
    assert hashlib.sha256(path.read_bytes()).hexdigest() == tokenizer.sha256
    for loaded in (load_tokenizer(path), load_saved(tmp_path)):
        assert loaded == tokenizer
        assert type(loaded) is type(tokenizer)
        assert loaded.sha256 == tokenizer.sha256
        assert loaded.encode(["abc, xyz"]) == tokenizer.encode(["abc, xyz"])
    folding = Normalisation(lowercase=True)
    assert load_saved(tmp_path, None, folding).normalisation == folding


def test_lines_are_encoded_each_for_itself(tokenizer):
    lines = [*tricky_lines(300), "", "   "]
    ids = tokenizer.encode(lines)
    assert ids == [tokenizer.encode([line])[0] for line in lines]
    assert ids[-2:] == [[], []]
    assert tokenizer.encode([]) == tokenizer.encode_with_offsets([]) == []
    assert max(map(max, filter(None, ids))) < tokenizer.vocab_size


@pytest.mark.parametrize("spellings", [SPECIALS, ["<p>", "??", "<s>", "-s-", "<mask>"]])
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_never_come_from_text(kind, spellings):
    lines = [f"x{a} {b} y." for a in spellings for b in spellings] + random_lines(50)
    specials = Specials(*spellings)
    tokenizer = (
        train_wordpiece(lines, 400, specials)
        if kind == "wordpiece"
        else train_sentencepiece(lines, 400, kind, specials)
    )
    assert tokenizer.specials == specials
    found = {i for ids in tokenizer.encode([*lines, *spellings]) for i in ids}
    assert not found & set(tokenizer.special_ids) - {tokenizer.unk_id}
    for spelling, ids in zip(spellings, tokenizer.encode(spellings), strict=True):
        assert "".join(tokenizer.spell(i)[0] for i in ids) == spelling


def test_replacements_are_what_text_is_made_of(tokenizer):
    ids = tokenizer.replacement_ids
    assert ids.dtype == np.int32
    assert np.all(np.diff(ids) > 0)
    assert not set(ids.tolist()) & set(tokenizer.special_ids)
    barred = set(range(tokenizer.vocab_size)) - set(ids.tolist())
    extra = {tokenizer.tokens[i] for i in barred - set(tokenizer.special_ids)}
    bytes_ = {f"<0x{i:02X}>" for i in range(256)}
    assert extra == (set() if tokenizer.kind == "wordpiece" else bytes_)


def test_a_lone_surrogate_is_a_question_mark(tokenizer):
    lines = ["ab \ud800 cd", "\udfff", "\ud83d\ude00x"]
    marks = ["ab ? cd", "?", "??x"]
    assert tokenizer.encode(lines) == tokenizer.encode(marks)
    for found, expected in zip(
        tokenizer.encode_with_offsets(lines),
        tokenizer.encode_with_offsets(marks),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("normalisation", FOLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_stand_where_they_come_from(kind, normalisation):
    tokenizer = learn(kind, normalisation)
    lines = tricky_lines(500)
    encoded = tokenizer.encode_with_offsets(lines)
    assert [line.ids.tolist() for line in encoded] == tokenizer.encode(lines)
    for text, (ids, begin, end) in zip(lines, encoded, strict=True):
        assert ids.dtype == np.int32
        assert begin.dtype == end.dtype == np.int64
        assert np.all(np.diff(begin) >= 0)
        assert np.all(np.diff(end) >= 0)
        assert np.all((begin >= 0) & (begin < end) & (end <= len(text)))
        for i, b, e in zip(ids.tolist(), begin, end, strict=True):
            assert text[b:e] == text[b:e].strip()
            # A character that became several may be shared with the next token.
            behind = fold(text[e:], normalisation)[:1]
            shown = tokenizer.spell(i)[0]
            origin = fold(text[b:e] + behind * (behind in SEVERAL), normalisation)
            if tokenizer.tokens[i].startswith("<0x"):
                origin = unicodedata.normalize("NFKC", origin)
                codes = origin.encode("utf-8", "replace")
                assert int(tokenizer.tokens[i][3:5], 16) in codes
            elif i != tokenizer.unk_id:
                assert visible(shown) in visible(origin)
        # Nothing that is to be seen is left out.
        covered = {
            place for b, e in zip(begin, end, strict=True) for place in range(b, e)
        }
        missing = "".join(c for i, c in enumerate(text) if i not in covered)
        assert not visible(fold(missing, Normalisation(strip_accents=True)))


@pytest.mark.parametrize("normalisation", FOLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_case_and_accents_are_folded_before_all_else(kind, normalisation):
    tokenizer = learn(kind, normalisation)
    lines = tricky_lines(300)
    folded = [fold(line, normalisation) for line in lines]
    assert tokenizer.encode(lines) == tokenizer.encode(folded)
    assert tokenizer.normalisation == normalisation


@pytest.mark.parametrize("limit", [3, 8, 31])
def test_long_lines_are_cut_at_spaces_and_batches_anywhere(
    tokenizer, monkeypatch, limit
):
    lines = [*random_lines(20), "  ab   cd  ", "ab " * 40]
    expected = tokenizer.encode_with_offsets(lines)
    monkeypatch.setattr(tokenizers, "_PART_CHARACTERS", max(limit, 11))
    monkeypatch.setattr(tokenizers, "_PARTS_PER_CALL", limit)
    monkeypatch.setattr(tokenizers, "_CHARACTERS_PER_CALL", 3 * limit)
    found = tokenizer.encode_with_offsets(lines)
    assert tokenizer.encode(lines) == [line.ids.tolist() for line in expected]
    for line, whole in zip(found, expected, strict=True):
        np.testing.assert_array_equal(line, whole)


def test_a_long_line_without_spaces_is_cut_anywhere(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizers, "_PART_CHARACTERS", 7)
    line = "中文字" * 50 + "abc" * 50
    ids, begin, end = tokenizer.encode_with_offsets([line])[0]
    assert tokenizer.encode([line])[0] == ids.tolist()
    assert begin[0] == 0
    assert end[-1] == len(line)
    assert np.all(begin[1:] <= end[:-1])
    shown = "".join(tokenizer.spell(i)[0] for i in ids.tolist())
    assert shown == line


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
def test_parts_of_a_line_are_all_of_it_but_the_spaces_of_the_cuts(limit):
    for line in [*tricky_lines(200), "a" * 20, " " * 20]:
        parts = list(tokenizers.cut(line, limit))
        place = 0
        for begin, text in parts:
            assert line[place:begin] in ("", " ")
            assert line[begin : begin + len(text)] == text
            assert len(text) <= limit
            place = begin + len(text)
        assert place == len(line)
        # A cut is at a space if there was one to cut at.
        for begin, text in parts[:-1]:
            if line[begin + len(text)] != " ":
                assert " " not in text
                assert len(text) == limit


def test_running_text_is_the_text(tokenizer):
    lines = random_lines(50)
    for line, ids in zip(lines, tokenizer.encode(lines), strict=True):
        shown = "".join(
            " " * spaced + text for text, spaced in map(tokenizer.spell, ids)
        )
        # BERT's words stand apart, punctuation too.
        if tokenizer.kind == "wordpiece":
            line = line.replace(".", " .")
        assert shown == " " + line


@pytest.mark.parametrize("missing", list(vars(Specials())))
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_special_token_is_named(tmp_path, kind, missing):
    # The vocabulary has all five, one of them under a name that nobody asks for.
    spellings = vars(Specials()) | {missing: "<other>"}
    if kind == "wordpiece":
        path = write_vocabulary(tmp_path / "v.txt", [*spellings.values(), "the"])
    else:
        specials = Specials(**spellings)
        path = train_sentencepiece(["the cat"], 400, kind, specials).save(tmp_path)
    token = vars(Specials())[missing]
    with pytest.raises(InputError) as error:
        load_tokenizer(path)
    assert str(error.value) == (
        f"--vocab={path} has no token {token!r}; if it spells it in another way, say"
        f" so with --{missing}_token"
    )
    with pytest.raises(InputError) as error:
        load_tokenizer(path, setting="data.corpus")
    assert str(error.value) == f"data.corpus={path} has no token {token!r}"
    given = Specials(**{missing: "<other>"})
    assert load_tokenizer(path, given).specials == given


@pytest.mark.parametrize("kind", KINDS)
def test_other_spellings_are_accepted_when_configured(tmp_path, kind):
    specials = Specials("<pad>", "<unk>", "<s>", "</s>", "<mask>")
    if kind == "wordpiece":
        tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "the"]
        path = write_vocabulary(tmp_path / "v.txt", tokens)
        expected = (1, 3, 0, 2, 4)
    else:
        path = train_sentencepiece(["the"], 400, kind, specials).save(tmp_path)
        expected = (0, 1, 2, 3, 4)
    tokenizer = load_tokenizer(path, specials)
    assert tokenizer.special_ids == expected
    assert tokenizer.specials == specials
    allowed = {*tokenizer.replacement_ids.tolist(), tokenizer.unk_id}
    allowed |= {i for i, t in enumerate(tokenizer.tokens) if t.startswith("<0x")}
    assert set(tokenizer.encode(["<mask> <s>"])[0]) <= allowed
    with pytest.raises(InputError, match="spelt alike: <pad>, <unk>, <s>, <s>"):
        load_tokenizer(path, Specials("<pad>", "<unk>", "<s>", "<s>", "<mask>"))
    with pytest.raises(InputError, match="--mask_token is empty"):
        load_tokenizer(path, Specials(mask=""))


def test_files_that_cannot_be_read_are_named(tmp_path):
    for name in ("none.txt", "none.model"):
        path = tmp_path / name
        with pytest.raises(InputError, match=f"--vocab={path}: No such file"):
            load_tokenizer(path)
        path.mkdir()
        with pytest.raises(InputError, match=f"--vocab={path}: Is a directory"):
            load_tokenizer(path)


def test_a_file_of_the_other_kind_is_named(tmp_path):
    model = train_sentencepiece(["the cat"], 400, "unigram").save(tmp_path)
    model.rename(tmp_path / "model.txt")
    with pytest.raises(InputError, match=r"model\.txt is not UTF-8.*end in \.model"):
        load_tokenizer(tmp_path / "model.txt")
    write_vocabulary(tmp_path / "vocab.model", [*SPECIALS, "the"])
    with pytest.raises(InputError, match=r"vocab\.model is no SentencePiece model"):
        load_tokenizer(tmp_path / "vocab.model")
