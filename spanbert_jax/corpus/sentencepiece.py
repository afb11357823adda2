"""SentencePiece: a unigram or BPE model, loaded or learned."""

import functools
import io
import random
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sentencepiece as library

from spanbert_jax.corpus.tokenizers import (
    ENDS,
    MODEL_FILE,
    STARTS,
    VOCAB_FLAG,
    Normalisation,
    Specials,
    Tokenizer,
    check_replacements,
    check_spellings,
    cut,
    find_specials,
    read_file,
    without_surrogates,
)
from spanbert_jax.errors import InputError

ModelType = Literal["unigram", "bpe"]

# What the library puts in a space's place.
_SPACE = "▁"
# The blocks that BERT's tokenizer calls CJK: no kana, no hangul.
_CJK = (
    range(0x3400, 0x4DC0),
    range(0x4E00, 0xA000),
    range(0xF900, 0xFB00),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2CEB0),
    range(0x2F800, 0x2FA20),
)
# UTF-8 of U+4000 to U+9FFF begins with these.
_CJK_LEADS = range(0xE4, 0xEA)
_BYTES = 256
# The library's default. What is left out is spelt in bytes, or unknown.
_CHARACTER_COVERAGE = 0.9995
# Longer words are cut to learn from: a piece has 16 characters at most, and the trainer
# ends the process at a word of 65,536.
_LONGEST_WORD = 200
_WORDS_PER_LINE = 50
# A word is learned from so many times, and then as often as all others together.
_LEAST_COUNT = 20
# Bytes of a character in UTF-8, at most.
_LONGEST_CODE = 4
# Behind a model, normalizer_spec.add_dummy_prefix = false: protocol buffers merge what
# is appended into what is there.
_NO_FIRST_SPACE = b"\x1a\x02\x18\x00"
# Of the library's messages, those below an error.
_QUIET = 2


@dataclass(frozen=True)
class SentencePiece(Tokenizer):
    """A tokenizer of the sentencepiece library; its model has a normal form of its own.

    The fold of case and accents comes before that. A space and the word behind it are
    spelt together, by pieces such as "▁the"; a line begins as if a space preceded it.

    Attributes:
        model: the content of the .model file.
    """

    kind = "sentencepiece"
    file_name = MODEL_FILE

    model: bytes = field(repr=False)

    @functools.cached_property
    def word_edges(self) -> np.ndarray:
        """uint8 [V]: `STARTS` and `ENDS`, so that words are BERT's.

        A piece inside of which a word of BERT begins, such as "'s", is not cut. Nor
        does a character in bytes know what it is: those from U+4000 to U+9FFF begin a
        word, as CJK, all others continue one, and no word is known to begin behind
        them. A "▁" before a piece that begins a word by itself is a word of its own.
        """
        model = self._processor
        edges = np.zeros(self.vocab_size, np.uint8)
        for i, token in enumerate(self.tokens):
            if model.IsByte(i):
                edges[i] = _byte_edges(int(token[3:5], 16))
            elif not (model.IsControl(i) or model.IsUnknown(i) or model.IsUnused(i)):
                edges[i] = _piece_edges(token)
        return edges

    @functools.cached_property
    def inside(self) -> "SentencePiece":
        """The same without the space that a line begins with."""
        return replace(self, model=self.model + _NO_FIRST_SPACE)

    def spell(self, index: int) -> tuple[str, bool]:
        """Returns how a token looks in running text, and if a space precedes it."""
        token = self.tokens[index]
        return token.lstrip(_SPACE).replace(_SPACE, " "), token.startswith(_SPACE)

    @functools.cached_property
    def _not_text(self) -> Sequence[int]:
        # A single byte is no text. A bare "▁" is: it stands in texts like other pieces.
        model = self._processor
        return [
            i
            for i in range(self.vocab_size)
            if model.IsByte(i) or model.IsControl(i) or model.IsUnused(i)
        ]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        folded = [self._fold(text) for text in texts]
        return [
            self._hide(ids) for ids in self._processor.Encode(folded, num_threads=1)
        ]

    def _align(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        folded = [self._fold(text) for text in texts]
        mappings = self._processor.Encode(
            folded, num_threads=1, return_type="offset_mapping"
        )
        aligned = []
        for text, seen, mapping in zip(texts, folded, mappings, strict=True):
            places = self._fold.places(text)
            ranges = [
                (places[begin], places[end - 1] + 1)
                for begin, end in _visible(seen, mapping["offsets"])
            ]
            aligned.append((self._hide(mapping["ids"]), ranges))
        return aligned

    def _hide(self, ids: list[int]) -> list[int]:
        """Puts the unknown id for special tokens that the model finds in text."""
        hidden = self._textual_specials
        return [self.unk_id if i in hidden else i for i in ids] if hidden else ids

    @functools.cached_property
    def _textual_specials(self) -> frozenset[int]:
        """Special tokens that the model holds for text: only control pieces are not."""
        own = set(self.special_ids) - {self.unk_id}
        return frozenset(i for i in own if not self._processor.IsControl(i))

    @functools.cached_property
    def _fold(self) -> "_Fold":
        return _Fold(self.normalisation)

    @functools.cached_property
    def _processor(self) -> library.SentencePieceProcessor:
        processor = library.SentencePieceProcessor()
        processor.LoadFromSerializedProto(self.model)
        return processor

    def _file_bytes(self) -> bytes:
        return self.model


def load_sentencepiece(
    model_file: Path,
    specials: Specials | None = None,
    normalisation: Normalisation | None = None,
    setting: str = VOCAB_FLAG,
) -> SentencePiece:
    """Reads a SentencePiece model.

    Args:
        model_file: the .model file.
        specials: how it spells its special tokens; None means BERT's way.
        normalisation: what it expects to be done to the text before; None means
            nothing.
        setting: the flag or config key that named the file, for error messages.

    Raises:
        InputError: the file is unreadable or no such model, a special token is
            missing, its unknown token is spelt in another way, or it does not tell
            where the first word of a line begins.
    """
    where = f"{setting}={model_file}"
    model = read_file(model_file, setting)
    if not model:
        raise InputError(f"{where} is empty")
    processor = library.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise InputError(
            f"{where} is no SentencePiece model, or it is cut short (the name of a"
            " WordPiece vocabulary must not end in .model)"
        ) from error
    if _SPACE not in "".join(processor.Encode("a", out_type=str)):
        raise InputError(
            f"{where} does not mark the beginning of a line's first word (it was learnt"
            " with add_dummy_prefix=false): lines would run into each other"
        )
    return _tokenizer(model, specials or Specials(), normalisation, where)


def train_sentencepiece(
    lines: Iterable[str],
    vocab_size: int,
    model_type: ModelType,
    specials: Specials | None = None,
    normalisation: Normalisation | None = None,
    byte_fallback: bool = True,
) -> SentencePiece:
    """Learns a SentencePiece model: a function of the lines' words only.

    Ids 0 to 4 are padding, unknown, [CLS], [SEP] and [MASK]; then come the 256 bytes.
    The model's own rule is the library's nmt_nfkc, which makes white space a space,
    drops control characters and composes compatibility characters; for text that is
    read in NFC it leaves the last of these out.

    Args:
        lines: the text, read once; the library holds all of it in memory, and takes
            some 25 times its size for a unigram model.
        vocab_size: the number of tokens wanted; a small text gives fewer.
        model_type: "unigram" or "bpe".
        specials: spellings of the special tokens; None means BERT's way.
        normalisation: what is done to this text and to that to be encoded; None means
            nothing.
        byte_fallback: whether rare characters are spelt in bytes. Without it they are
            unknown.

    Raises:
        InputError: there is no word in the text, `vocab_size` has no room for its
            characters, or a special token is spelt like a piece of it.
    """
    specials, normalisation = specials or Specials(), normalisation or Normalisation()
    check_spellings(specials)
    # For the whole process: the library has no other way to keep its progress quiet.
    library.set_min_log_level(_QUIET)
    fold, rule = _Fold(normalisation), _rule(normalisation)
    words = _count_words(lines, fold, rule)
    if not words:
        raise InputError("--vocab_size: the training documents hold no word to learn")
    # A text that spells a special token must have pieces to be spelt with: in a
    # tokenizer of Hugging Face, the special one is what is left otherwise.
    required = "".join(sorted(set(fold("".join(astuple(specials))))))
    least = len(astuple(specials)) + _BYTES * byte_fallback + len(required) + 1
    if vocab_size < least:
        raise _too_small(vocab_size, f"at least {least}")
    settings = {
        "model_type": model_type,
        "vocab_size": vocab_size,
        "required_chars": required,
        "byte_fallback": byte_fallback,
        "normalizer": rule,
        "pad_piece": specials.pad,
        "unk_piece": specials.unk,
        "bos_piece": specials.cls,
        "eos_piece": specials.sep,
        # Unlike a user-defined symbol, never found in text.
        "control_symbols": [specials.mask],
    }
    # The BPE trainer ends the process if a required character is not in the text.
    model = _learn(chain(_shuffle(words), [" ".join(required)]), settings)
    return _tokenizer(model, specials, normalisation, "--vocab_size")


def _learn(texts: Iterable[str], settings: dict[str, Any]) -> bytes:
    """Returns the model that the library learns."""
    model = io.BytesIO()
    try:
        library.SentencePieceTrainer.Train(
            sentence_iterator=iter(texts),
            model_writer=model,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            character_coverage=_CHARACTER_COVERAGE,
            max_sentence_length=_LONGEST_CODE * _WORDS_PER_LINE * (_LONGEST_WORD + 1),
            # A text with fewer pieces gives a smaller vocabulary, not an error.
            hard_vocab_limit=False,
            # Each number of threads gives another vocabulary.
            num_threads=1,
            minloglevel=_QUIET,
            **settings,
        )
    except RuntimeError as error:
        message = str(error)
        if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
            raise _too_small(settings["vocab_size"], found[1]) from error
        if found := re.search(r"\] (.*) is already defined", message):
            raise InputError(
                f"the special token {found[1]!r} is spelt like a piece of the text;"
                f" spell it like no text, such as '[{found[1]}]'"
            ) from error
        raise
    return model.getvalue()


def _too_small(vocab_size: int, needed: str) -> InputError:
    return InputError(
        f"--vocab_size={vocab_size} is too small: the special tokens, the bytes and the"
        f" characters of the text take {needed}"
    )


def _tokenizer(
    model: bytes, specials: Specials, normalisation: Normalisation | None, where: str
) -> SentencePiece:
    processor = library.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    # The library answers a missing piece with the unknown id: look for ourselves.
    tokens = tuple(map(processor.IdToPiece, range(processor.GetPieceSize())))
    tokenizer = SentencePiece(
        tokens,
        *find_specials(tokens, specials, where),
        normalisation or Normalisation(),
        model,
    )
    if tokenizer.unk_id != processor.unk_id():
        raise InputError(
            f"{where}: {specials.unk!r} is not its unknown token, which is"
            f" {tokens[processor.unk_id()]!r}"
        )
    check_replacements(tokenizer, where)
    return tokenizer


def _count_words(
    lines: Iterable[str], fold: "_Fold", rule: library.SentencePieceNormalizer
) -> Counter[str]:
    """Counts what white space parts, as the model will see it, in sorted order."""
    chunks: Counter[str] = Counter()
    for line in lines:
        chunks.update(line.split())
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        text = rule.Normalize(fold(without_surrogates(chunk)))
        for normal in filter(None, text.split(_SPACE)):
            for _, word in cut(normal, _LONGEST_WORD):
                words[word] += count
    return Counter(dict(sorted(words.items())))


def _shuffle(words: Counter[str]) -> Iterator[str]:
    """Yields lines of the words, each as often as it was counted, in no order.

    The trainer looks at words only, so that the vocabulary is that of the text. But it
    takes time by the square of a passage that comes twice: hours for two copies of a
    document of a million characters. A word that is most of the text comes less often.
    """
    total = words.total()
    text = [
        word
        for word, count in words.items()
        for _ in range(min(count, _LEAST_COUNT + total - count))
    ]
    random.Random(0).shuffle(text)
    for start in range(0, len(text), _WORDS_PER_LINE):
        yield " ".join(text[start : start + _WORDS_PER_LINE])


def _rule(normalisation: Normalisation) -> library.SentencePieceNormalizer:
    """The normal form that is kept in a learned model."""
    whole = library.SentencePieceNormalizer(
        rule_name="nmt_nfkc",
        add_dummy_prefix=True,
        escape_whitespaces=True,
        remove_extra_whitespaces=True,
    )
    if normalisation.unicode != "nfc":
        return whole
    return library.SentencePieceNormalizer(
        norm_map=[(text, to) for text, to in whole.Decompile() if to in ("", " ")],
        add_dummy_prefix=True,
        escape_whitespaces=True,
        remove_extra_whitespaces=True,
    )


class _Fold:
    """The fold of case and accents, which knows each character's origin.

    Character by character it is what the normaliser of BERT makes of the whole, but
    for the order of marks that are no accents.
    """

    def __init__(self, normalisation: Normalisation) -> None:
        self._idle = not (normalisation.lowercase or normalisation.strip_accents)
        normalizer = normalisation.normalizer(clean=False)
        self._folded = functools.cache(normalizer.normalize_str)

    def __call__(self, text: str) -> str:
        """Folds a text without lone surrogates."""
        return text if self._idle else "".join(map(self._folded, text))

    def places(self, text: str) -> Sequence[int]:
        """Returns, for each character of the folded text, its origin's place."""
        if self._idle:
            return range(len(text))
        return [i for i, c in enumerate(text) for _ in self._folded(c)]


def _visible(
    text: str, offsets: Iterable[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    """Returns ranges of a text, none empty, without white space at their ends.

    Args:
        text: what the library saw.
        offsets: as the library has them. Of several tokens that one character became,
            the last has the character and the others have nothing.
    """
    ranges = [_strip(text, begin, end) for begin, end in offsets]
    # Some models let spaces stand at the end, or in a text of nothing else.
    following = next(filter(None, reversed(ranges)), (0, len(text)))
    filled = []
    for found in reversed(ranges):
        following = found or following
        filled.append(following)
    return reversed(filled)


def _strip(text: str, begin: int, end: int) -> tuple[int, int] | None:
    """Returns the range without white space at its ends, if there is anything else."""
    seen = text[begin:end]
    end = begin + len(seen.rstrip())
    begin += len(seen) - len(seen.lstrip())
    return (begin, end) if begin < end else None


def _piece_edges(piece: str) -> int:
    text = piece.lstrip(_SPACE)
    starts = piece.startswith(_SPACE) or _stands_alone(piece[0])
    # Some models spell a space together with the word before it.
    ends = bool(text) and (
        text[-1] == _SPACE or text[-1].isspace() or _stands_alone(text[-1])
    )
    return STARTS * starts | ENDS * ends


def _byte_edges(value: int) -> int:
    if value < 0x80:
        return _piece_edges(chr(value))
    return STARTS if value in _CJK_LEADS else 0


def _stands_alone(character: str) -> bool:
    """Whether a character is a word by itself to BERT: punctuation or CJK."""
    return (
        character in string.punctuation
        or unicodedata.category(character).startswith("P")
        or any(ord(character) in block for block in _CJK)
    )
