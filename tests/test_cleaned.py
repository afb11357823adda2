"""Cleaned texts: what they become, and where their characters come from."""

import random
import unicodedata

import numpy as np
import pytest

from spanbert_jax.corpus.cleaning import Dirt, clean_line
from spanbert_jax.inference.cleaned import clean

FORMS = ("none", "nfc", "nfkc")
# Letters with marks of several classes, in several orders; jamo; marks without a class
# that become two with one; characters that become several, or join the one before.
PIECES = [
    *("a", "e", "o", "é", "ö", "q", " ", ".", "\u0301", "\u0327", "\u0323", "\u0308"),
    *("한", "\u1112", "\u1161", "\u11ab", "ｶ", "ﾞ", "\u3099", "か", "ﬁ", "½", "①", "Å"),
    *("\u0344", "\u0f73", "\u0f71", "\u0f74", "\u0d47", "\u0d3e", "\ufb2c", "﷽"),
    *("\0", "\ufeff", "\ufffd", "\x0c", "\x85", "\u2028", "\r", "\ud800", "\x1b", "\t"),
]


def make_texts(count: int) -> list[str]:
    generator = random.Random(1)
    return [
        "".join(generator.choices(PIECES, k=generator.randint(0, 12)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_a_text_becomes_what_a_line_of_a_corpus_does(form):
    for text in make_texts(3000):
        assert clean(text, form).text.strip() == clean_line(text, form, Dirt()), text


@pytest.mark.parametrize("form", FORMS)
def test_each_part_comes_from_its_origin(form):
    for text in make_texts(1000):
        cleaned = clean(text, form)
        assert len(cleaned.begin) == len(cleaned.end) == len(cleaned.text)
        ranges = list(zip(cleaned.begin.tolist(), cleaned.end.tolist(), strict=True))
        assert ranges == sorted(ranges)
        for begin, end in set(ranges):
            mine = (cleaned.begin == begin) & (cleaned.end == end)
            became = "".join(np.array(list(cleaned.text), object)[mine])
            assert clean(text[begin:end], form).text == became
        # What nothing comes from is dirt.
        left_out = set(range(len(text))).difference(*(range(*one) for one in ranges))
        assert all(clean(text[place], form).text == "" for place in left_out)


def test_origins_are_as_narrow_as_they_can_be():
    cleaned = clean("e\u0301\0t\u00e9 \u1112\u1161\u11abx\n", "nfc")
    assert cleaned.text == "été 한x "
    assert cleaned.begin.tolist() == [0, 3, 4, 5, 6, 9, 10]
    assert cleaned.end.tolist() == [2, 4, 5, 6, 9, 10, 11]
    cleaned = clean("a½", "nfkc")
    assert (cleaned.text, cleaned.begin.tolist()) == ("a1⁄2", [0, 1, 1, 1])


def test_clean_text_stays():
    text = unicodedata.normalize("NFC", "Ça va, naïve 한국 ½\t.")
    cleaned = clean(text, "nfc")
    assert cleaned.text == text
    assert cleaned.begin.tolist() == list(range(len(text)))
    assert (cleaned.end - cleaned.begin == 1).all()


def test_parts_keep_the_places_of_the_whole():
    cleaned = clean("a\0b\0c", "none")
    part = cleaned.cut(1, 3).shifted(10)
    assert (part.text, part.begin.tolist(), part.end.tolist()) == (
        "bc",
        [12, 14],
        [13, 15],
    )
