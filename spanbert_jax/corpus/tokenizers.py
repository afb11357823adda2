"""Text to ids: what a WordPiece and a SentencePiece tokenizer have in common."""

import abc
import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from tokenizers import normalizers

from spanbert_jax.errors import InputError

VOCABULARY_FILE = "vocab.txt"
MODEL_FILE = "tokenizer.model"
# Beside this flag stand --mask_token and the other four.
VOCAB_FLAG = "--vocab"

# Bits of `Tokenizer.word_edges`.
STARTS = 1
ENDS = 2

# A longer line goes to the libraries in parts, each call within bounded memory.
_PART_CHARACTERS = 100_000
# More per call gain no speed and cost memory.
_PARTS_PER_CALL = 1000
_CHARACTERS_PER_CALL = 1_000_000
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")


@dataclass(frozen=True)
class Specials:
    """How the vocabulary spells its special tokens; BERT's way by default."""

    pad: str = "[PAD]"
    unk: str = "[UNK]"
    cls: str = "[CLS]"
    sep: str = "[SEP]"
    mask: str = "[MASK]"


@dataclass(frozen=True)
class Normalisation:
    """What is done to text before it is tokenised; by default nothing.

    Attributes:
        lowercase: the tokenizer makes every character lower case.
        strip_accents: the tokenizer takes combining marks off their letters.
        unicode: the normal form that the text is read in; here for the record only,
            and for the rule of a SentencePiece model that is learned from such text.
    """

    lowercase: bool = False
    strip_accents: bool = False
    unicode: Literal["none", "nfc", "nfkc"] = "none"

    def normalizer(self, clean: bool) -> normalizers.Normalizer:
        """Returns the normaliser of BERT that folds case and accents.

        Args:
            clean: whether it also drops control characters, makes every white space a
                space and sets CJK ideographs apart, as WordPiece needs it.
        """
        return normalizers.BertNormalizer(
            clean_text=clean,
            handle_chinese_chars=clean,
            strip_accents=self.strip_accents,
            lowercase=self.lowercase,
        )


class Encoded(NamedTuple):
    """A line's tokens and where they stand in it.

    Attributes:
        ids: int32 [T].
        begin: int64 [T], each token's first character in the line as it was given.
        end: int64 [T], one beyond its last character.
    """

    ids: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class Part(NamedTuple):
    """Part of a line: the line's number, the first character's place, the text."""

    line: int
    place: int
    text: str


@dataclass(frozen=True)
class Tokenizer(abc.ABC):
    """A vocabulary and what the rest of the package must know about it.

    Attributes:
        kind: "wordpiece" or "sentencepiece".
        file_name: what `save` calls the file.
        tokens: the vocabulary, by id.
        pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
        normalisation: what is done to the text first.
    """

    kind: ClassVar[str]
    file_name: ClassVar[str]

    tokens: tuple[str, ...]
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    normalisation: Normalisation

    @property
    def vocab_size(self) -> int:
        """The number of tokens V; ids run from 0 to V - 1."""
        return len(self.tokens)

    @property
    def specials(self) -> Specials:
        """The spellings of the special tokens."""
        return Specials(*(self.tokens[i] for i in self.special_ids))

    @property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of padding, unknown, [CLS], [SEP] and [MASK], in this order."""
        return (self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id)

    @property
    @abc.abstractmethod
    def word_edges(self) -> np.ndarray:
        """uint8 [V]: where words begin, as bits `STARTS` and `ENDS`.

        In a sequence, token i begins a word if its own `STARTS` is set or, for i > 0,
        the `ENDS` of token i - 1. Words are BERT's: white space parts them, and a
        punctuation mark or a CJK ideograph is one by itself.
        """

    @functools.cached_property
    def replacement_ids(self) -> np.ndarray:
        """int32 [W]: the ids that may stand in for a masked token, in rising order.

        Neither special nor "[unused1]" and its like, nor what no text can hold.
        """
        ids = [i for i, token in enumerate(self.tokens) if not _UNUSED.fullmatch(token)]
        barred = [*self.special_ids, *self._not_text]
        return np.setdiff1d(ids, barred).astype(np.int32)

    @functools.cached_property
    def sha256(self) -> str:
        """Digest of the file that `save` writes."""
        return hashlib.sha256(self._file_bytes()).hexdigest()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Tokenises lines, each for itself.

        A special token that stands in the text is text like any other: "[MASK]" gives
        the ids of a bracket, of letters and of a bracket.

        Args:
            lines: any strings; a lone surrogate counts as a question mark. A line of
                more than 100,000 characters is cut at a space or, where there is none
                in so many characters, anywhere: no memory is needed beyond the ids.

        Returns:
            Per line its ids, without [CLS] and [SEP]; empty for a line without a token.
        """
        ids: list[list[int]] = [[] for _ in lines]
        for batch in _batches(lines):
            encoded = self._encode([part.text for part in batch])
            for part, part_ids in zip(batch, encoded, strict=True):
                ids[part.line] += part_ids
        return ids

    def encode_with_offsets(self, lines: Sequence[str]) -> list[Encoded]:
        """Tokenises lines and says which characters each token comes from.

        Args:
            lines: as for `encode`.

        Returns:
            Per line the ids that `encode` gives, and their half-open ranges of
            characters in the line. Ranges are not empty and hold no white space at
            their ends; their begins and their ends never fall. Tokens that one
            character became share its range; of one that became parts of two tokens,
            the second has it. A token for a space alone has the range of the next.
        """
        found: list[list[Encoded]] = [[] for _ in lines]
        for batch in _batches(lines):
            aligned = self._align([part.text for part in batch])
            for part, (ids, ranges) in zip(batch, aligned, strict=True):
                begin, end = np.array(ranges, np.int64).reshape(-1, 2).T + part.place
                found[part.line].append(Encoded(np.array(ids, np.int32), begin, end))
        nothing = Encoded(np.zeros(0, np.int32), *np.zeros((2, 0), np.int64))
        return [
            Encoded(*map(np.concatenate, zip(*(parts or [nothing]), strict=True)))
            for parts in found
        ]

    @property
    @abc.abstractmethod
    def inside(self) -> "Tokenizer":
        """The same for text inside a line that no space precedes, as behind a mask."""

    @abc.abstractmethod
    def spell(self, index: int) -> tuple[str, bool]:
        """Returns how a token looks in running text, and if a space precedes it."""

    def save(self, directory: Path) -> Path:
        """Writes the vocabulary's file and returns its path."""
        path = directory / self.file_name
        path.write_bytes(self._file_bytes())
        return path

    @property
    @abc.abstractmethod
    def _not_text(self) -> Sequence[int]:
        """Ids that are no replacement, besides the special ones."""

    @abc.abstractmethod
    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenises texts without lone surrogates, each of a bounded length."""

    @abc.abstractmethod
    def _align(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The same, with each token's range in the text."""

    @abc.abstractmethod
    def _file_bytes(self) -> bytes:
        """The content of the file that `save` writes."""


def load_tokenizer(
    path: Path,
    specials: Specials | None = None,
    normalisation: Normalisation | None = None,
    setting: str = VOCAB_FLAG,
) -> Tokenizer:
    """Reads a SentencePiece model, if the name ends in .model, or a WordPiece file.

    Args:
        path: the file.
        specials: how it spells its special tokens; None means BERT's way.
        normalisation: what it expects to be done to the text; None means nothing.
        setting: the flag or config key that named the file, for error messages.

    Raises:
        InputError: the file is unreadable or broken, or a special token is missing.
    """
    # Here, since both build upon this module.
    from spanbert_jax.corpus.sentencepiece import load_sentencepiece
    from spanbert_jax.corpus.wordpiece import load_wordpiece

    is_model = path.suffix.lower() == Path(MODEL_FILE).suffix
    load = load_sentencepiece if is_model else load_wordpiece
    return load(path, specials, normalisation, setting)


def load_saved(
    directory: Path,
    specials: Specials | None = None,
    normalisation: Normalisation | None = None,
    setting: str = VOCAB_FLAG,
) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote to a directory, of either kind.

    Args:
        directory: what was given to `save`.
        specials: as the saved tokenizer had them.
        normalisation: as the saved tokenizer had it.
        setting: as for `load_tokenizer`.

    Raises:
        InputError: as `load_tokenizer`.
    """
    path = directory / MODEL_FILE
    if not path.exists():
        path = directory / VOCABULARY_FILE
    return load_tokenizer(path, specials, normalisation, setting)


def read_file(path: Path, setting: str) -> bytes:
    """Returns a file's content.

    Raises:
        InputError: it cannot be read; the message names the setting.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{setting}={path}: {error.strerror}") from error


def find_specials(
    tokens: Sequence[str], specials: Specials, where: str
) -> tuple[int, int, int, int, int]:
    """Returns the ids of the special tokens in a list without repetitions.

    Args:
        tokens: the vocabulary, by id.
        specials: how it spells them.
        where: the setting and the file that the vocabulary is from, for the message;
            beside a flag there are others to spell the special tokens.

    Raises:
        InputError: one is missing, or two are spelt alike.
    """
    check_spellings(specials)
    index = {token: i for i, token in enumerate(tokens)}
    for role, spelling in vars(specials).items():
        if spelling not in index:
            hint = f"; if it spells it in another way, say so with --{role}_token"
            raise InputError(
                f"{where} has no token {spelling!r}"
                f"{hint if where.startswith(VOCAB_FLAG + '=') else ''}"
            )
    pad, unk, cls, sep, mask = (index[spelling] for spelling in astuple(specials))
    return pad, unk, cls, sep, mask


def check_replacements(tokenizer: Tokenizer, where: str) -> None:
    """Checks that there is a token to train on.

    Raises:
        InputError: there are special tokens only; `where` is as in `find_specials`.
    """
    if not tokenizer.replacement_ids.size:
        raise InputError(f"{where} has no token besides the special ones")


def check_spellings(specials: Specials) -> None:
    """Checks that special tokens can be told apart.

    Raises:
        InputError: two are spelt alike, or one is empty.
    """
    spellings = astuple(specials)
    if len(set(spellings)) < len(spellings):
        raise InputError(f"two special tokens are spelt alike: {', '.join(spellings)}")
    for role, spelling in vars(specials).items():
        if not spelling:
            raise InputError(f"--{role}_token is empty; it spells a special token")


def cut(line: str, characters: int) -> Iterator[tuple[int, str]]:
    """Cuts a line into parts, at spaces as long as there are any.

    Args:
        line: the line.
        characters: of a part, at most.

    Yields:
        Each part's place in the line and its text. The spaces that it is cut at are in
        no part, all other characters are in one.
    """
    place = 0
    while len(line) - place > characters:
        space = line.rfind(" ", place, place + characters + 1)
        end = place + characters if space < 0 else space
        yield place, line[place:end]
        place = end if space < 0 else space + 1
    yield place, line[place:]


def without_surrogates(text: str) -> str:
    """Puts a question mark in each lone surrogate's place: no library takes one."""
    return text.encode("utf-8", "replace").decode()


def _batches(lines: Sequence[str]) -> Iterator[list[Part]]:
    """Yields what goes to a library in one call, in the lines' order."""
    batch: list[Part] = []
    characters = 0
    for number, line in enumerate(lines):
        for place, text in cut(line, _PART_CHARACTERS):
            batch.append(Part(number, place, without_surrogates(text)))
            characters += len(text)
            if len(batch) == _PARTS_PER_CALL or characters >= _CHARACTERS_PER_CALL:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
