"""Texts with masks in them: their tokens, and where these stand in the text."""

import dataclasses
import itertools
import random
import re

import numpy as np
import pytest

from spanbert_jax.corpus.cleaning import Dirt, clean_line
from spanbert_jax.corpus.tokenizers import Normalisation, Specials, Tokenizer
from spanbert_jax.corpus.wordpiece import load_wordpiece
from spanbert_jax.errors import InputError
from spanbert_jax.inference import reading
from spanbert_jax.interop.tokenizer import fast_tokenizer
from vocabularies import (
    KINDS,
    SPECIALS,
    learn,
    random_lines,
    tricky_lines,
    write_vocabulary,
)

FOLDS = [Normalisation(), Normalisation(lowercase=True, strip_accents=True)]


@pytest.fixture(
    scope="module",
    params=itertools.product(KINDS, FOLDS),
    ids=lambda param: f"{param[0]}-{FOLDS.index(param[1])}",
)
def tokenizer(request) -> Tokenizer:
    return learn(*request.param)


def read(tokenizer: Tokenizer, text: str) -> reading.Tokens:
    [tokens] = reading.read(tokenizer, [text])
    return tokens


def spell(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.tokens[i] for i in read(tokenizer, text).ids]


def make_texts(count: int) -> list[str]:
    """Words with marks between them, some without a space."""
    generator = random.Random(3)
    words = [*" ".join(random_lines(20)).split(), "中", "中文字", "é", "naïve", "Åd"]
    ends = [" ", " ", " ", ", ", ". ", "! ", "  ", "-", "\t", " («", "'"]
    return [
        "".join(
            generator.choice(words) + generator.choice(ends)
            for _ in range(generator.randint(1, 12))
        )
        for _ in range(count)
    ]


def with_masks(
    tokenizer: Tokenizer, text: str, generator: random.Random
) -> tuple[str, list[tuple[int, int, int]]]:
    """A text with some words masked, and its tokens: ids, begins and ends.

    They are the tokens of the text without masks, but one mask for those of a word.
    Words that share a token with their neighbours stay.
    """
    mask = tokenizer.specials.mask
    [encoded] = tokenizer.encode_with_offsets([text])
    rows = list(zip(*map(np.ndarray.tolist, encoded), strict=True))
    written, place, tokens = "", 0, []
    for word in re.finditer(r"\w+", text):
        begin, end = word.span()
        inside = [row for row in rows if row[1] < end and row[2] > begin]
        whole = all(begin <= row[1] and row[2] <= end for row in inside)
        if inside and whole and generator.random() < 0.5:
            moved = len(written) - place
            tokens += [
                (index, first + moved, beyond + moved)
                for index, first, beyond in rows
                if place <= first < begin
            ]
            written += text[place:begin] + mask
            tokens.append((tokenizer.mask_id, len(written) - len(mask), len(written)))
            place = end
    moved = len(written) - place
    tokens += [
        (index, first + moved, beyond + moved)
        for index, first, beyond in rows
        if first >= place
    ]
    return written + text[place:], tokens


def assert_masks_disturb_nothing(tokenizer: Tokenizer, texts: list[str]) -> None:
    generator = random.Random(5)
    pairs = [with_masks(tokenizer, text, generator) for text in texts]
    masked = [text for text, _ in pairs]
    assert sum(tokenizer.specials.mask in text for text in masked) > 150
    found = reading.read(tokenizer, masked)
    for tokens, (text, expected) in zip(found, pairs, strict=True):
        inner = zip(*(values.tolist()[1:-1] for values in tokens), strict=True)
        assert list(inner) == expected, text
        assert tokens.ids[[0, -1]].tolist() == [tokenizer.cls_id, tokenizer.sep_id]
        ends = [tokens.begin[[0, -1]].tolist(), tokens.end[[0, -1]].tolist()]
        assert ends == [[0, len(text)]] * 2


def test_around_masks_tokens_are_those_of_the_whole_text(tokenizer):
    assert_masks_disturb_nothing(tokenizer, make_texts(200))


def test_a_mask_has_one_space_of_a_model_that_keeps_them():
    tokenizer = learn("unigram")
    # Appended to a model, this is its normalizer_spec.remove_extra_whitespaces = false.
    tokenizer = dataclasses.replace(tokenizer, model=tokenizer.model + b"\x1a\x02 \0")
    assert len(tokenizer.encode([" a "])[0]) > len(tokenizer.encode(["a"])[0])
    texts = [text.replace("  ", " ") for text in make_texts(200)]
    assert_masks_disturb_nothing(tokenizer, texts)
    assert spell(tokenizer, "[MASK] [MASK]  [MASK]")[1:-1] == ["[MASK]"] * 3


def test_exported_tokenizers_read_masks_alike(tokenizer):
    generator = random.Random(6)
    texts = [with_masks(tokenizer, text, generator)[0] for text in make_texts(200)]
    texts += ["[MASK]", " [MASK][MASK]  [MASK] ,a", "a[MASK]b [MASK].", "\t[MASK]\t"]
    exported = fast_tokenizer(tokenizer).encode_batch(texts)
    for text, tokens, other in zip(
        texts, reading.read(tokenizer, texts), exported, strict=True
    ):
        assert tokens.ids.tolist() == other.ids, text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("[MASK], [MASK]", ","),
        (" [MASK] , [MASK] ", "▁,"),
        ("a[MASK][MASK]  [MASK]\n", "▁a"),
        ("[MASK]a a", "a▁a"),
    ],
)
def test_only_a_space_behind_a_mask_gives_one(kind, text, others):
    words = [word for word in spell(learn(kind), text)[1:-1] if word != "[MASK]"]
    assert "".join(words) == others


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_cleaned_as_those_of_a_corpus_are(kind):
    tokenizer = learn(kind, Normalisation(unicode="nfc"))
    lines = [line for line in tricky_lines(300) if "[MASK]" not in line]
    lines += ["nai\u0308ve", "a\fb", "a\x85b \ud800", "A\u030a\u0327"]
    clean = [clean_line(line, "nfc", Dirt()) for line in lines]
    found = [tokens.ids[1:-1].tolist() for tokens in reading.read(tokenizer, lines)]
    assert found == tokenizer.encode(clean)
    tokens = read(tokenizer, "x nai\u0308ve")
    assert tokens.end[-2] == 8


def test_special_tokens_but_the_mask_are_text(tokenizer):
    ids = read(tokenizer, "a [SEP] b [MASK] [CLS] [PAD]").ids
    special = [i for i in ids.tolist() if i in set(tokenizer.special_ids)]
    others = [i for i in special if i != tokenizer.unk_id]
    assert others == [tokenizer.cls_id, tokenizer.mask_id, tokenizer.sep_id]


def test_no_text_at_all(tokenizer):
    tokens = read(tokenizer, "")
    assert tokens.ids.tolist() == [tokenizer.cls_id, tokenizer.sep_id]
    assert reading.read(tokenizer, []) == []


def test_runs():
    generator = np.random.default_rng(0)
    for _ in range(100):
        ids = generator.integers(0, 2, generator.integers(0, 12))
        runs = reading.runs_of(ids, 1)
        inside = [place for begin, end in runs for place in range(begin, end)]
        assert inside == np.flatnonzero(ids).tolist()
        # They are maximal: between two of them is a gap.
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(runs))


def test_places_are_the_tokens_with_a_character_in_the_span(tokenizer):
    generator = random.Random(11)
    for text in make_texts(60):
        tokens = read(tokenizer, text)
        begin, end = sorted(generator.sample(range(len(text) + 1), 2))
        expected = [
            place
            for place in range(1, len(tokens.ids) - 1)
            if tokens.begin[place] < end and tokens.end[place] > begin
        ]
        if expected:
            first, beyond = reading.places_of(tokens, text, begin, end)
            assert list(range(first, beyond)) == expected
        else:
            with pytest.raises(InputError, match=f"from {begin} to {end}, .* no token"):
                reading.places_of(tokens, text, begin, end)


@pytest.mark.parametrize("span", [(0, 0), (2, 1), (-1, 2), (3, 7), (6, 6)])
def test_a_span_that_is_none(tokenizer, span):
    fault = rf"from {span[0]} to {span[1]} must .* the 6 of the text 'ab, cd'"
    with pytest.raises(InputError, match=fault):
        reading.places_of(read(tokenizer, "ab, cd"), "ab, cd", *span)


def test_unknown_words(tmp_path):
    path = write_vocabulary(tmp_path / "vocab.txt", [*SPECIALS, "a", "##b"])
    tokenizer = load_wordpiece(path)
    text = "ab żółw a,żółw [MASK] ⅞"
    found = reading.unknown_texts(read(tokenizer, text), text, tokenizer.unk_id)
    assert found == ("żółw", ",", "⅞")


def test_another_spelling_counts(tmp_path):
    specials = Specials(mask="<mask>")
    tokens = [*SPECIALS[:4], "<mask>", "[", "]", "MA", "##S", "##K"]
    path = write_vocabulary(tmp_path / "vocab.txt", tokens)
    tokenizer = load_wordpiece(path, specials)
    reading.check_masks(tokenizer, "a <mask>")
    assert spell(tokenizer, "<mask>[MASK]")[1:3] == ["<mask>", "["]
    with pytest.raises(InputError, match=r"has \[MASK\], but .* spells it <mask>"):
        reading.check_masks(tokenizer, "a [MASK] <mask>")
    with pytest.raises(InputError, match="there is no <mask> in the text 'a'"):
        reading.check_masks(tokenizer, "a")


def test_messages_quote_the_begin_of_a_long_text(tokenizer):
    text = "a " * 500
    tokens = read(tokenizer, text)
    reading.check_length(tokens, text, 502)
    with pytest.raises(InputError) as error:
        reading.check_length(tokens, text, 501)
    assert "has 502 tokens with [CLS] and [SEP], but" in str(error.value)
    assert "501 positions" in str(error.value)
    assert len(str(error.value)) < 200
