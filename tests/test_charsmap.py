"""The normal form of SentencePiece against the library's own."""

import functools
import random
import unicodedata

import pytest
import sentencepiece as library
from tokenizers.normalizers import Normalizer, Sequence

from spanbert_jax.interop.charsmap import charsmap_normalizers
from spanbert_jax.interop.sentencepiece_model import read_model
from vocabularies import tricky_lines

# No characters in text; used in between.
PRIVATE = "\ufff0\ufff1"
CHARACTERS = [
    chr(code)
    for code in range(0x32000)
    if not 0xD800 <= code < 0xE000 and chr(code) not in PRIVATE
]
MARKS = [c for c in CHARACTERS if unicodedata.category(c).startswith("M")]
RULES = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "white space", "other")


def make_rule(name: str) -> library.SentencePieceNormalizer:
    off = dict.fromkeys(
        ("add_dummy_prefix", "escape_whitespaces", "remove_extra_whitespaces"), False
    )
    if name == "white space":
        # What is learned for text in NFC.
        whole = library.SentencePieceNormalizer(rule_name="nmt_nfkc", **off)
        pairs = [(text, to) for text, to in whole.Decompile() if to in ("", " ")]
        return library.SentencePieceNormalizer(norm_map=pairs, **off)
    if name == "other":
        pairs = [("...", "…"), ("ae", "æ"), ("a", "A"), ("e\u0301", "ê"), ("é", "")]
        return library.SentencePieceNormalizer(norm_map=pairs, **off)
    return library.SentencePieceNormalizer(rule_name=name, **off)


@functools.cache
def make(name: str) -> tuple[library.SentencePieceNormalizer, Normalizer, list[str]]:
    """The library's, ours, and what has a rule."""
    theirs = make_rule(name)
    model = read_model(theirs.serialized_model_proto())
    ours = Sequence(list(charsmap_normalizers(model.charsmap, model.normal_form)))
    return theirs, ours, sorted(text for text, _ in theirs.Decompile())


def random_texts(keys: list[str], count: int) -> list[str]:
    """Texts of what has a rule, of marks, and of any characters; decomposed or not."""
    generator = random.Random(3)
    short = [text for text in keys if len(text) < 3]
    texts = []
    for _ in range(count):
        pools = generator.choices((CHARACTERS, MARKS, keys, short, "aeo .\n"), k=12)
        text = "".join(map(generator.choice, pools))
        form = generator.choice((None, "NFC", "NFD", "NFKD"))
        texts.append(unicodedata.normalize(form, text) if form else text)
    return ["", *texts]


@pytest.mark.parametrize("name", RULES)
def test_a_text_becomes_what_the_library_makes_of_it(name):
    theirs, ours, keys = make(name)
    texts = random_texts(keys, 2000) + tricky_lines(500)
    expected = theirs.Normalize(texts)
    for text, normal in zip(texts, expected, strict=True):
        assert ours.normalize_str(text) == normal, ascii(text)
    changed = sum(text != normal for text, normal in zip(texts, expected, strict=True))
    assert changed > len(texts) // 2


@pytest.mark.parametrize(
    "text",
    [
        # Whole and half decomposed, as Windows has Vietnamese.
        unicodedata.normalize("NFD", "Tiếng Việt, đường phố"),
        "Tiê\u0301ng Viê\u0323t",
        unicodedata.normalize("NFD", "ᾧ ἄνθρωπος, Ἀθῆναι"),
        unicodedata.normalize("NFD", "한국어 대한민국"),
        "가\u11a8 \u1100\u1161\u11a8",
        "ｶﾞｷﾞ ﾊﾟｿｺﾝ ＡＢＣ～",
        # Marks as they are typed, which is not the order of any normal form.
        "מִצְוָּה \u05e9\u05bc\u05c1",
        "\u0645\u0651\u064e \u0627\u064e\u0653",
        "क़ ड़ हिन्दी কো \u0995\u09c7\u09be தொ",
        "e\u0301\u0327 a\u0327\u0301 m\u0327",
        "ﬁ\u0301 ½\u0302 \u00a0\u0301 ²\u200d x\u200c",
        "👩🏽‍🚀 ‼️ 1️⃣ ™️",
        "\u0301a",
        "\r\n\r",
    ],
)
def test_texts_of_many_scripts(text):
    theirs, ours, _ = make("nmt_nfkc")
    assert ours.normalize_str(text) == theirs.Normalize(text)


@pytest.mark.parametrize("name", RULES)
def test_what_is_put_between_characters_is_gone_wherever_it_stood(name):
    theirs, ours, _ = make(name)
    for text in ("", "a", "\u0301", "e\u0301 ﬁ\u0302"):
        for private in PRIVATE:
            for mixed in (private + text, text + private * 2, f" {private}{text}x"):
                # What a rule has no use for is kept.
                kept = ours.normalize_str(private)
                expected = theirs.Normalize(mixed.replace(private, kept))
                assert ours.normalize_str(mixed) == expected
    assert ours.normalize_str(PRIVATE[1]) == ""


def test_no_rule_no_step():
    assert charsmap_normalizers(b"", b"") == ()
