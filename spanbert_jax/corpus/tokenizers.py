"""Text to ids and back: a cased WordPiece tokenizer, loaded or learned."""

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Encoder
from tokenizers import models, normalizers, pre_tokenizers, trainers

from spanbert_jax.errors import InputError

VOCABULARY_FILE = "vocab.txt"
NORMALISATION = {"lowercase": False, "strip_accents": False, "unicode": "none"}

# Beside this flag stand --mask_token and the other four.
_VOCAB_FLAG = "--vocab"
# A word of more characters is one [UNK], as in BERT.
_LONGEST_WORD = 100
# Lines per call of the encoder: more gain no speed and cost memory.
_LINES_PER_CALL = 1000
# Text whose ids are kept at hand: half a million words, or 150 MB at the worst.
_KNOWN_CHARACTERS = 4_000_000
# A learned vocabulary spells out the commonest characters, up to this share of the
# text; the rest is mostly stray symbols of other scripts.
_CHARACTER_COVERAGE = 0.9999
_LEAST_COVERAGE = 0.99
_LEAST_PAIR_COUNT = 2
# Bits of `Tokenizer.word_edges`: the token begins a word; what follows it begins one.
STARTS, ENDS = 1, 2
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")


@dataclass(frozen=True)
class Specials:
    """How the vocabulary spells its special tokens; BERT's way by default."""

    pad: str = "[PAD]"
    unk: str = "[UNK]"
    cls: str = "[CLS]"
    sep: str = "[SEP]"
    mask: str = "[MASK]"


class _Chunks(dict[str, list[int]]):
    """Text between spaces, its ids, and how many characters that is in all."""

    characters = 0


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary and what the rest of the package must know about it.

    Attributes:
        kind: "wordpiece".
        tokens: the vocabulary, by id.
        pad_id, unk_id, cls_id, sep_id, mask_id: ids of the special tokens.
    """

    kind: str
    tokens: tuple[str, ...]
    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int

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

    @functools.cached_property
    def starts_word(self) -> np.ndarray:
        """Bool [V]: whether a token begins a word; "##" pieces continue one."""
        return np.array([not token.startswith("##") for token in self.tokens])

    @functools.cached_property
    def word_edges(self) -> np.ndarray:
        """uint8 [V], bits `STARTS` and `ENDS`; no WordPiece token has the latter."""
        return np.where(self.starts_word, STARTS, 0).astype(np.uint8)

    @functools.cached_property
    def replacement_ids(self) -> np.ndarray:
        """int32 [W]: the ids that may stand in for a masked token, in rising order.

        Neither special nor "[unused1]" and its like.
        """
        ids = [i for i, token in enumerate(self.tokens) if not _UNUSED.fullmatch(token)]
        return np.setdiff1d(ids, self.special_ids).astype(np.int32)

    @functools.cached_property
    def sha256(self) -> str:
        """Digest of the vocabulary file that `save` writes."""
        return hashlib.sha256(self._file_bytes()).hexdigest()

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Tokenises lines, each for itself.

        A special token that stands in the text is text like any other: "[MASK]" gives
        the ids of a bracket, a word and a bracket. A word that the vocabulary cannot
        spell, or one of more than 100 characters, gives the unknown id, once.

        Args:
            lines: any strings; a lone surrogate counts as a question mark.

        Returns:
            Per line its ids, without [CLS] and [SEP]; empty for a line without a token.
        """
        ids: list[list[int]] = []
        for start in range(0, len(lines), _LINES_PER_CALL):
            batch = lines[start : start + _LINES_PER_CALL]
            chunks = [line.split(" ") for line in batch]
            self._learn_chunks(chain.from_iterable(chunks))
            known = self._known.__getitem__
            ids.extend(list(chain.from_iterable(map(known, line))) for line in chunks)
        return ids

    def save(self, directory: Path) -> Path:
        """Writes the vocabulary, one token a line, and returns the file's path."""
        path = directory / VOCABULARY_FILE
        path.write_bytes(self._file_bytes())
        return path

    def _learn_chunks(self, chunks: Iterable[str]) -> None:
        """Encodes what is not yet known of the text between spaces.

        No step of the encoder looks across a space, and most chunks are old
        acquaintances: to look them up is many times as fast.
        """
        if self._known.characters > _KNOWN_CHARACTERS:
            self._known.clear()
            self._known.characters = 0
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in self._known]
        try:
            encodings = self._encoder.encode_batch_fast(new)
        except TypeError:
            clean = [chunk.encode("utf-8", "replace").decode() for chunk in new]
            encodings = self._encoder.encode_batch_fast(clean)
        for chunk, encoding in zip(new, encodings, strict=True):
            self._known[chunk] = encoding.ids
        self._known.characters += sum(map(len, new))

    @functools.cached_property
    def _known(self) -> "_Chunks":
        return _Chunks()

    def _file_bytes(self) -> bytes:
        return ("\n".join(self.tokens) + "\n").encode()

    @functools.cached_property
    def _encoder(self) -> Encoder:
        # A key with a space in it can match no word, so that no text, whatever the
        # spelling of the special tokens, is ever encoded as one of them.
        hidden = {i: f" {i}" for i in self.special_ids}
        vocabulary = {hidden.get(i, token): i for i, token in enumerate(self.tokens)}
        encoder = Encoder(
            models.WordPiece(
                vocabulary,
                unk_token=hidden[self.unk_id],
                max_input_chars_per_word=_LONGEST_WORD,
            )
        )
        encoder.normalizer = _normalizer()
        encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return encoder


def load_wordpiece(
    vocab_file: Path, specials: Specials | None = None, setting: str = _VOCAB_FLAG
) -> Tokenizer:
    """Reads a WordPiece vocabulary: UTF-8, one token a line, the first is id 0.

    Args:
        vocab_file: the file; Windows line ends and a byte order mark are accepted.
        specials: how it spells its special tokens; None means BERT's way.
        setting: the flag or config key that named the file, for error messages.

    Raises:
        InputError: the file is unreadable, a line is blank or a repetition, or a
            special token is missing.
    """
    try:
        text = vocab_file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{setting}={vocab_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{setting}={vocab_file} is not UTF-8: {error}") from error
    # Not splitlines: vocabularies hold U+2028 and its like as tokens.
    tokens = [line.removesuffix("\r") for line in text.split("\n")]
    if tokens[-1] == "":
        tokens.pop()
    first_line: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if not token:
            raise InputError(f"{setting}={vocab_file}: line {number} is blank")
        if token in first_line:
            raise InputError(
                f"{setting}={vocab_file}: line {number} repeats {token!r} of line"
                f" {first_line[token]}"
            )
        first_line[token] = number
    where = f"{setting}={vocab_file}"
    return _tokenizer(tokens, specials or Specials(), where, setting == _VOCAB_FLAG)


def train_wordpiece(
    lines: Iterable[str], vocab_size: int, specials: Specials | None = None
) -> Tokenizer:
    """Learns a cased WordPiece vocabulary: a function of the lines' words only.

    The order is: special tokens, characters, characters inside a word, merges. The
    commonest characters are spelt out, up to 99.99 % of the text, or fewer where there
    is no room.

    Args:
        lines: the text, read once.
        vocab_size: the number of tokens wanted; a small text gives fewer.
        specials: spellings of the special tokens; None means BERT's way.

    Raises:
        InputError: there is no word in the text, or `vocab_size` has no room for the
            characters of 99 % of it.
    """
    specials = specials or Specials()
    words = _count_words(lines)
    if not words:
        raise InputError("--vocab_size: the training documents hold no word to learn")
    alphabet = _choose_alphabet(words, vocab_size - len(astuple(specials)), vocab_size)
    spelt = set(alphabet)
    words = {word: n for word, n in words.items() if spelt.issuperset(word)}
    inner = sorted({character for word in words for character in word[1:]})
    # The stock trainer numbers "##c" pieces in hash order, and ties between merges go
    # by number: two runs differ. Fixing all single characters beforehand as "special"
    # tokens fixes their ids; only the list of tokens is kept.
    fixed = [*astuple(specials), *alphabet, *("##" + character for character in inner)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=_LEAST_PAIR_COUNT,
        special_tokens=fixed,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner = Encoder(models.WordPiece(unk_token=specials.unk))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator(_repeat(words), trainer)
    ids = learner.get_vocab()
    return _tokenizer(sorted(ids, key=ids.__getitem__), specials, "--vocab_size")


def _normalizer() -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=NORMALISATION["strip_accents"],
        lowercase=NORMALISATION["lowercase"],
    )


def _tokenizer(
    tokens: Sequence[str], specials: Specials, where: str, has_flags: bool = False
) -> Tokenizer:
    """Finds the special tokens in a list without repetitions.

    `has_flags`: whether there are flags to spell them, for the error message.
    """
    spellings = astuple(specials)
    if len(set(spellings)) < len(spellings):
        raise InputError(f"two special tokens are spelt alike: {', '.join(spellings)}")
    index = {token: i for i, token in enumerate(tokens)}
    for role, spelling in vars(specials).items():
        if spelling not in index:
            hint = f"; if it spells it in another way, say so with --{role}_token"
            raise InputError(
                f"{where} has no token {spelling!r}{hint if has_flags else ''}"
            )
    tokenizer = Tokenizer(
        "wordpiece", tuple(tokens), *(index[spelling] for spelling in spellings)
    )
    if not tokenizer.replacement_ids.size:
        raise InputError(f"{where} has no token besides the special ones")
    return tokenizer


def _count_words(lines: Iterable[str]) -> dict[str, int]:
    """Counts words as the encoder sees them."""
    # The normaliser works character by character, so text may be cut at spaces first:
    # each different chunk is then normalised once.
    chunks: Counter[str] = Counter()
    for line in lines:
        chunks.update(line.split(" "))
    normalizer, splitter = _normalizer(), pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(chunk)):
            if len(word) <= _LONGEST_WORD:
                words[word] += count
    return dict(sorted(words.items()))


def _choose_alphabet(words: dict[str, int], room: int, vocab_size: int) -> list[str]:
    """Picks the characters to spell out, sorted; `room`: entries not yet spoken for."""
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    for word, count in words.items():
        inside.update(word[1:])
        for character in word:
            counts[character] += count
    total = sum(counts.values())
    chosen: list[str] = []
    covered = entries = 0
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item)):
        cost = 2 if character in inside else 1
        if covered >= _CHARACTER_COVERAGE * total or entries + cost > room:
            break
        chosen.append(character)
        covered += count
        entries += cost
    if covered < _LEAST_COVERAGE * total:
        raise InputError(
            f"--vocab_size={vocab_size} has room for {len(chosen)} of the text's"
            f" {len(counts)} characters, {covered / total:.1%} of the text; it takes"
            f" about {2 * len(counts) + vocab_size - room} to spell them all"
        )
    return sorted(chosen)


def _repeat(words: dict[str, int]) -> Iterator[str]:
    """Writes each word out as often as it was counted: the trainer takes text only."""
    for word, count in words.items():
        while count > 0:
            part = min(count, 1000)
            yield " ".join([word] * part)
            count -= part
