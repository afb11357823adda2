"""The normal form of a SentencePiece model, by the normalisers of `tokenizers`."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from sentencepiece import SentencePieceNormalizer
from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer, Precompiled, Replace

# Two code points that stand for nothing, and that join with nothing beside them.
_APART = "\ufff0"
_ALONE = "\ufff1"
# What a cluster may go on with: marks, all that may be one in newer tables of Unicode,
# and some letters of Thai, Lao and Japanese.
_DEPENDENT = r"[^\p{L}\p{N}\p{P}\p{Z}]"
_SPACING = r"\x{e33}\x{eb3}\x{ff9e}\x{ff9f}"
# The characters of U+FFFF and below.
_PLANE = (*range(0xD800), *range(0xE000, 0x10000))


# It takes a second, and most models have the same rules.
@functools.cache
def charsmap_normalizers(charsmap: bytes, normal_form: bytes) -> tuple[Normalizer, ...]:
    """Returns what, one after the other, does what the model's rules do to a text.

    The library goes through the text and replaces the longest that it has a rule for.
    `Precompiled` looks at one cluster of characters, such as a letter with its accents,
    after the other: in a short one it applies one rule and drops the rest, in a long
    one it takes the characters one by one. So it is given single characters only. The
    rules for several are left to others: nearly all of these compose a letter and its
    marks. So does NFC, but it composes more and reorders marks: where no rule has two
    characters side by side, something is put between them. What other rules there are
    for several characters must neither overlap nor make what has a rule itself.

    Args:
        charsmap: the rules as the model holds them.
        normal_form: the message that they stand in.
    """
    if not charsmap:
        return ()
    normalizer = SentencePieceNormalizer(normalizer_spec=normal_form)
    rules = dict(normalizer.Decompile())
    joint = {text: to for text, to in rules.items() if len(text) > 1}
    composed = _composed(joint, rules)
    others = defaultdict(list)
    for text in joint.keys() - composed:
        others[joint[text]].append(text)
    replace = [Replace(_either(texts), to) for to, texts in sorted(others.items())]
    # Not at the very start. What is put there has no place in the text, and NFC fails.
    alone = Replace(Regex(rf"(?!\A)(?={_DEPENDENT}|[{_SPACING}])"), _ALONE)
    single = [alone, Precompiled(charsmap), Replace(_ALONE, "")]
    if not composed:
        return (*replace, *single)
    apart = Replace(_between(composed), _APART)
    return (*replace, apart, *single, NFC(), Replace(_APART, ""))


def _composed(joint: Mapping[str, str], rules: Mapping[str, str]) -> set[str]:
    """Those of the rules for several characters that NFC can take over."""
    compose = NFC().normalize_str
    changed = (c for c in map(chr, _PLANE) if compose(c) != c)
    if not all(c in rules for c in changed):
        return set()
    return {
        text
        for text, to in joint.items()
        if compose("".join(rules.get(c, c) for c in text)) == to
    }


def _either(texts: Iterable[str]) -> Regex:
    """The longest of some texts."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return Regex("|".join(map(_escape, longest_first)))


def _between(texts: Iterable[str]) -> Regex:
    """The places between two characters that no text has side by side.

    Only those before what may be a mark, or is not the first of a text.
    """
    before = defaultdict(set)
    for text in texts:
        for first, second in pairwise(text):
            before[second].add(first)
    alike = defaultdict(set)
    for second, firsts in before.items():
        alike[frozenset(firsts)].add(second)
    cases = [
        f"(?<![{_ranges(firsts)}])[{_ranges(seconds)}]"
        for firsts, seconds in sorted(alike.items(), key=lambda item: min(item[1]))
    ]
    seconds = _ranges(before)
    apart = "|".join([f"[^{seconds}]", *cases])
    return Regex(rf"(?!\A)(?={_DEPENDENT}|[{seconds}])(?={apart})")


def _ranges(characters: Iterable[str]) -> str:
    """Characters as they stand in a pattern, between brackets."""
    codes = set(map(ord, characters))
    begins = sorted(code for code in codes if code - 1 not in codes)
    ends = sorted(code for code in codes if code + 1 not in codes)
    return "".join(
        f"{_escape(chr(begin))}-{_escape(chr(end))}"
        for begin, end in zip(begins, ends, strict=True)
    )


def _escape(text: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)
