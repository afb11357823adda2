"""The policy for dirt, character by character, and its fast paths."""

import random
import unicodedata

import pytest

from spanbert_jax.corpus.cleaning import (
    Dirt,
    clean_line,
    clean_lines,
    clean_record,
    decode,
)
from spanbert_jax.errors import InputError

_SPACES = {0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x1F, 0x85, 0x2028, 0x2029}
_NAMED = {
    0x0D: ("carriage_returns", " "),
    0xFEFF: ("byte_order_marks", ""),
    0xFFFD: ("replacement_characters", ""),
}


def policy(code):
    """What a character becomes and where it is counted, from the table in words."""
    if code in _NAMED:
        return _NAMED[code]
    if code in _SPACES:
        return "separators", " "
    if 0xD800 <= code <= 0xDFFF:
        return "lone_surrogates", ""
    if unicodedata.category(chr(code)) == "Cc" and chr(code) != "\t":
        return "control_characters", ""
    return None, chr(code)


def test_every_character_becomes_what_the_policy_says():
    for code in [*range(0x3100), *range(0xD700, 0x10020)]:
        if code == 0x0A:
            continue
        text = f"a{chr(code)}b"
        field, instead = policy(code)
        expected = Dirt(**({field: 1} if field else {}))
        dirt = Dirt()
        assert clean_line(text, "none", dirt) == f"a{instead}b", hex(code)
        assert dirt == expected, hex(code)
        dirt = Dirt()
        record = f"{text}\n\n{chr(code)}"
        assert clean_record(record, "none", dirt)[0] == f"a{instead}b", hex(code)
        assert dirt == expected + expected, hex(code)
        if not 0xD800 <= code <= 0xDFFF:
            lines, dirts = clean_lines(f"x\n{text}\n".encode(), "strict", "none", "", 0)
            assert lines == ["x", f"a{instead}b"], hex(code)
            assert dirts == ({1: expected} if field else {}), hex(code)


def random_raw(rng):
    """Bytes of lines, clean or dirty, of several scripts, broken or not."""
    parts = [
        *("word", " ", "\t", "ü", "中文", "e\u0301", "\u00a0", "\U0001f600"),
        *("\r", "\x00", "\x1d", "\u2028", "\ufeff", "\ufffd", "\x9f"),
    ]
    encoded = [part.encode() for part in parts]
    broken = [b"\xff", b"\xe4\xb8", b"\xed\xa0\x80", b"\xc3", b"\x80"]
    ends = [b"\n", b"\r\n", b"\n\n"]
    some = rng.sample(encoded + broken, rng.randrange(1, 8)) + ends
    return b"".join(rng.choice(some) for _ in range(rng.randrange(1, 40)))


@pytest.mark.parametrize("unicode", ["none", "nfc", "nfkc"])
def test_many_lines_at_once_are_cleaned_like_each_alone(unicode):
    rng = random.Random(5)
    for _ in range(2000):
        raw = random_raw(rng)
        expected, found = [], {}
        for line in raw.removesuffix(b"\n").split(b"\n"):
            is_last = len(expected) == raw.removesuffix(b"\n").count(b"\n")
            if not is_last or raw.endswith(b"\n"):
                line = line.removesuffix(b"\r")
            dirt = Dirt()
            text = decode(line, "replace", dirt, "")
            text = clean_line(text, unicode, dirt)
            if dirt != Dirt():
                found[len(expected)] = dirt
            expected.append(text)
        assert clean_lines(raw, "replace", unicode, "", 0) == (expected, found)


def test_a_record_is_cleaned_like_its_lines():
    rng = random.Random(6)
    for _ in range(2000):
        raw = random_raw(rng)
        dirt, expected_dirt = Dirt(), Dirt()
        text = decode(raw, "replace", Dirt(), "")
        lines = text.replace("\r\n", "\n").split("\n")
        expected = [clean_line(line, "nfc", expected_dirt) for line in lines]
        assert clean_record(text, "nfc", dirt) == [line for line in expected if line]
        assert dirt == expected_dirt


def test_what_is_not_utf8_is_left_out_and_counted():
    dirt = Dirt()
    assert decode(b"caf\xe9s \xff \xef\xbf\xbd", "replace", dirt, "") == "cafs  "
    assert dirt == Dirt(replaced_characters=2, replacement_characters=1)
    lines, dirts = clean_lines(b"na\xefve\nfine\n\xff\n", "replace", "none", "", 0)
    assert lines == ["nave", "fine", ""]
    one = Dirt(replaced_characters=1)
    assert dirts == {0: one, 2: one}


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_strict_names_the_byte(end):
    raw = "grün".encode() + end + b"caf\xe9" + end
    place = 100 + raw.index(b"\xe9")
    with pytest.raises(
        InputError, match=rf"a\.txt: byte {place} \(0xe9\) is not UTF-8"
    ):
        clean_lines(raw, "strict", "none", "a.txt", 100)


def test_normal_forms_come_after_cleaning():
    text = "e\x00\u0301 ﬁ\u00a0"
    assert clean_line(text, "none", Dirt()) == "e\u0301 ﬁ"
    assert clean_line(text, "nfc", Dirt()) == "é ﬁ"
    assert clean_line(text, "nfkc", Dirt()) == "é fi"
    lines, _ = clean_lines("e\u0301\n\u0301a\n".encode(), "strict", "nfc", "", 0)
    assert lines == ["é", "\u0301a"]


@pytest.mark.parametrize(
    "text", ["", " \t\u3000\u00a0", "\x00\ufeff", "\r\r", "\ufffd"]
)
def test_a_line_of_which_nothing_is_left_is_blank(text):
    assert clean_line(text, "none", Dirt()) == ""


def test_dirt_adds_up_field_by_field():
    first, second = Dirt(separators=2, cut_lines=1), Dirt(separators=3, null_texts=4)
    assert first + second == Dirt(separators=5, cut_lines=1, null_texts=4)
    assert first == Dirt(separators=2, cut_lines=1)
    first += second
    assert first == Dirt(separators=5, cut_lines=1, null_texts=4)
