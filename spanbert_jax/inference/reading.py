"""Texts as a model reads them: tokens, masks, and where they stand in the text."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spanbert_jax.corpus.tokenizers import Encoded, Specials, Tokenizer
from spanbert_jax.errors import InputError
from spanbert_jax.inference.cleaned import Cleaned, clean

# What is quoted of a text in a message.
_QUOTED_CHARACTERS = 60


class Tokens(NamedTuple):
    """The tokens of a text, [CLS] and [SEP] among them.

    Attributes:
        ids: int32 [T].
        begin: int64 [T], each token's first character in the text; [CLS] has an empty
            range at the text's begin, [SEP] one at its end.
        end: int64 [T], one beyond its last character.
    """

    ids: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class _Part(NamedTuple):
    """What stands in a text before, between or behind masks.

    Attributes:
        place: of the first character behind the mask, or of the text's first.
        cleaned: its text, without the space next to a mask.
        is_inside: whether a mask touches the first word.
    """

    place: int
    cleaned: Cleaned
    is_inside: bool


def read(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Tokenises texts in which masks may stand, each as a block by itself.

    A mask is written as the vocabulary spells it, and has the space before it: what is
    around it is tokenised as if a word stood there, as in training. The other special
    tokens are text like any other. Text is cleaned as that of a corpus is.

    Args:
        tokenizer: of the model.
        texts: any strings.

    Returns:
        The tokens of each text.
    """
    mask = tokenizer.specials.mask
    parts = [list(_split(text, tokenizer)) for text in texts]
    encoded = iter(_encode(tokenizer, [part for some in parts for part in some]))
    found = []
    for text, some in zip(texts, parts, strict=True):
        tokens = [_special(tokenizer.cls_id, 0, 0)]
        for number, part in enumerate(some):
            if number:
                begin = part.place - len(mask)
                tokens.append(_special(tokenizer.mask_id, begin, part.place))
            ids, begins, ends = next(encoded)
            origins = part.cleaned.begin[begins], part.cleaned.end[ends - 1]
            tokens.append(Tokens(ids, *origins))
        tokens.append(_special(tokenizer.sep_id, len(text), len(text)))
        found.append(Tokens(*map(np.concatenate, zip(*tokens, strict=True))))
    return found


def _split(text: str, tokenizer: Tokenizer) -> Iterator[_Part]:
    mask, place = tokenizer.specials.mask, 0
    texts = text.split(mask)
    for number, part in enumerate(texts):
        cleaned = clean(part, tokenizer.normalisation.unicode).shifted(place)
        is_apart = cleaned.text[:1].isspace()
        # A line begins as if a space preceded it: this one.
        begin = int(number > 0 and is_apart)
        end = len(cleaned.text)
        if number < len(texts) - 1 and cleaned.text[begin:][-1:].isspace():
            end -= 1
        yield _Part(place, cleaned.cut(begin, end), number > 0 and not is_apart)
        place += len(part) + len(mask)


def _encode(tokenizer: Tokenizer, parts: Sequence[_Part]) -> list[Encoded]:
    def encode(one: Tokenizer, is_inside: bool) -> Iterator[Encoded]:
        of_it = [part.cleaned.text for part in parts if part.is_inside == is_inside]
        return iter(one.encode_with_offsets(of_it))

    apart, inside = encode(tokenizer, False), encode(tokenizer.inside, True)
    return [next(inside if part.is_inside else apart) for part in parts]


def _special(index: int, begin: int, end: int) -> Tokens:
    return Tokens(np.array([index], np.int32), np.array([begin]), np.array([end]))


def check_length(tokens: Tokens, text: str, most: int) -> None:
    """Checks that a text has no more tokens than the model has positions.

    Raises:
        InputError: it has.
    """
    count = len(tokens.ids)
    if count > most:
        raise InputError(
            f"the text {quoted(text)} has {count:,} tokens with [CLS] and [SEP], but"
            f" the model has {most:,} positions (model.max_positions)"
        )


def check_masks(tokenizer: Tokenizer, text: str) -> None:
    """Checks that a text has something to fill, and nothing that only looks like it.

    Raises:
        InputError: it has no mask, or has BERT's where the vocabulary has another.
    """
    mask, others = tokenizer.specials.mask, Specials().mask
    if others in text and others not in mask:
        raise InputError(
            f"the text {quoted(text)} has {others}, but the vocabulary of this model"
            f" spells it {mask}"
        )
    if mask not in text:
        raise InputError(
            f"there is no {mask} in the text {quoted(text)}: it stands for each token"
            " that is to be predicted"
        )


def runs_of(ids: np.ndarray, mask_id: int) -> list[tuple[int, int]]:
    """The maximal runs of adjacent masks.

    Args:
        ids: int32 [T].
        mask_id: of the mask.

    Returns:
        Half-open ranges of places, in rising order.
    """
    is_mask = np.concatenate([[False], ids == mask_id, [False]])
    edges = np.flatnonzero(is_mask[1:] != is_mask[:-1])
    return list(map(tuple, edges.reshape(-1, 2).tolist()))


def unknown_texts(tokens: Tokens, text: str, unk_id: int) -> tuple[str, ...]:
    """What of a text the vocabulary cannot spell, each once, in order.

    Words for WordPiece, characters for SentencePiece.
    """
    places = np.flatnonzero(tokens.ids == unk_id)
    found = [text[tokens.begin[i] : tokens.end[i]] for i in places]
    return tuple(dict.fromkeys(found))


def places_of(tokens: Tokens, text: str, begin: int, end: int) -> tuple[int, int]:
    """The tokens of a range of characters: all that have a character in it.

    Args:
        tokens: of the text.
        text: the text.
        begin: the first character.
        end: one beyond the last.

    Returns:
        A half-open range of places, at least one, [CLS] and [SEP] never among them.

    Raises:
        InputError: the range is empty, beyond the text, or holds no token.
    """
    if not 0 <= begin < end <= len(text):
        raise InputError(
            f"the span from {begin} to {end} must hold a character and lie within the"
            f" {len(text):,} of the text {quoted(text)}"
        )
    first = int(np.searchsorted(tokens.end[1:-1], begin, side="right")) + 1
    beyond = int(np.searchsorted(tokens.begin[1:-1], end, side="left")) + 1
    if first >= beyond:
        raise InputError(
            f"the span from {begin} to {end}, {text[begin:end]!r}, holds no token of"
            f" the text {quoted(text)}"
        )
    return first, beyond


def quoted(text: str) -> str:
    """A text, or its begin, between quotation marks, for a message."""
    if len(text) <= _QUOTED_CHARACTERS:
        return repr(text)
    return f"{text[:_QUOTED_CHARACTERS]!r}..."
