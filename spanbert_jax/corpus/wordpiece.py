"""WordPiece: a vocabulary as BERT has it, loaded or learned."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Encoder
from tokenizers import models, pre_tokenizers, trainers

from spanbert_jax.corpus.tokenizers import (
    STARTS,
    VOCAB_FLAG,
    VOCABULARY_FILE,
    Normalisation,
    Specials,
    Tokenizer,
    check_replacements,
    check_spellings,
    find_specials,
    read_file,
    without_surrogates,
)
from spanbert_jax.errors import InputError

# A word of more characters is one [UNK], as in BERT.
_LONGEST_WORD = 100
# Text whose ids are kept at hand: half a million words, or 150 MB at the worst.
_KNOWN_CHARACTERS = 4_000_000
# A learned vocabulary spells out the commonest characters, up to this share of the
# text; the rest is mostly stray symbols of other scripts.
_CHARACTER_COVERAGE = 0.9999
_LEAST_COVERAGE = 0.99
_LEAST_PAIR_COUNT = 2
_INSIDE = "##"


class _Chunks(dict[str, list[int]]):
    """Text between spaces, its ids, and how many characters that is in all."""

    characters = 0


@dataclass(frozen=True)
class WordPiece(Tokenizer):
    """BERT's tokenizer: words first, then the longest pieces from the left.

    A word that the vocabulary cannot spell, or one of more than 100 characters, gives
    the unknown id, once.
    """

    kind = "wordpiece"
    file_name = VOCABULARY_FILE

    @functools.cached_property
    def word_edges(self) -> np.ndarray:
        """uint8 [V]: `STARTS`, but for the "##" pieces; BERT's words are all parted."""
        starts = [not token.startswith(_INSIDE) for token in self.tokens]
        return np.where(starts, STARTS, 0).astype(np.uint8)

    @property
    def inside(self) -> "WordPiece":
        """Itself: a word is spelt the same wherever it stands."""
        return self

    def spell(self, index: int) -> tuple[str, bool]:
        """Returns how a token looks in running text, and if a space precedes it."""
        token = self.tokens[index]
        return token.removeprefix(_INSIDE), not token.startswith(_INSIDE)

    @property
    def _not_text(self) -> Sequence[int]:
        return ()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        chunks = [text.split(" ") for text in texts]
        known = self._learn_chunks(chain.from_iterable(chunks)).__getitem__
        return [list(chain.from_iterable(map(known, text))) for text in chunks]

    def _align(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encodings = self._encoder.encode_batch(texts)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def _learn_chunks(self, chunks: Iterable[str]) -> "_Chunks":
        """Encodes what is not yet known of the text between spaces.

        No step of the encoder looks across a space, and most chunks are old
        acquaintances: to look them up is many times as fast.
        """
        known = self._known
        if known.characters > _KNOWN_CHARACTERS:
            # A new one: another thread may be reading from the old.
            known = self.__dict__["_known"] = _Chunks()
        new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in known]
        encodings = self._encoder.encode_batch_fast(new)
        for chunk, encoding in zip(new, encodings, strict=True):
            known[chunk] = encoding.ids
        known.characters += sum(map(len, new))
        return known

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
        encoder.normalizer = self.normalisation.normalizer(clean=True)
        encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return encoder


def parse_lines(content: bytes) -> list[str]:
    """The tokens of a vocabulary file: UTF-8, one a line.

    Args:
        content: of the file; Windows line ends and a byte order mark are accepted.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    # Not splitlines: vocabularies hold U+2028 and its like as tokens.
    lines = content.decode("utf-8-sig").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def load_wordpiece(
    vocab_file: Path,
    specials: Specials | None = None,
    normalisation: Normalisation | None = None,
    setting: str = VOCAB_FLAG,
) -> WordPiece:
    """Reads a WordPiece vocabulary: UTF-8, one token a line, the first is id 0.

    Args:
        vocab_file: the file; Windows line ends and a byte order mark are accepted.
        specials: how it spells its special tokens; None means BERT's way.
        normalisation: what it expects to be done to the text; None means nothing.
        setting: the flag or config key that named the file, for error messages.

    Raises:
        InputError: the file is unreadable, a line is blank or a repetition, or a
            special token is missing.
    """
    where = f"{setting}={vocab_file}"
    try:
        tokens = parse_lines(read_file(vocab_file, setting))
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8, one token a line (the name of a SentencePiece model"
            f" must end in .model): {error}"
        ) from error
    first_line: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if not token:
            raise InputError(f"{where}: line {number} is blank")
        if token in first_line:
            raise InputError(
                f"{where}: line {number} repeats {token!r} of line {first_line[token]}"
            )
        first_line[token] = number
    return _tokenizer(tokens, specials or Specials(), normalisation, where)


def train_wordpiece(
    lines: Iterable[str],
    vocab_size: int,
    specials: Specials | None = None,
    normalisation: Normalisation | None = None,
) -> WordPiece:
    """Learns a WordPiece vocabulary: a function of the lines' words only.

    The order is: special tokens, characters, characters inside a word, merges. The
    commonest characters are spelt out, up to 99.99 % of the text, or fewer where there
    is no room.

    Args:
        lines: the text, read once.
        vocab_size: the number of tokens wanted; a small text gives fewer.
        specials: spellings of the special tokens; None means BERT's way.
        normalisation: what is done to this text and to that to be encoded; None means
            nothing.

    Raises:
        InputError: there is no word in the text, or `vocab_size` has no room for the
            characters of 99 % of it.
    """
    specials, normalisation = specials or Specials(), normalisation or Normalisation()
    check_spellings(specials)
    words = _count_words(lines, normalisation)
    if not words:
        raise InputError("--vocab_size: the training documents hold no word to learn")
    alphabet = _choose_alphabet(words, vocab_size - len(astuple(specials)), vocab_size)
    spelt = set(alphabet)
    words = {word: n for word, n in words.items() if spelt.issuperset(word)}
    inner = sorted({character for word in words for character in word[1:]})
    # The stock trainer numbers "##c" pieces in hash order, and ties between merges go
    # by number: two runs differ. Fixing all single characters beforehand as "special"
    # tokens fixes their ids; only the list of tokens is kept.
    fixed = [
        *astuple(specials),
        *alphabet,
        *(_INSIDE + character for character in inner),
    ]
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
    tokens = sorted(ids, key=ids.__getitem__)
    return _tokenizer(tokens, specials, normalisation, "--vocab_size")


def _tokenizer(
    tokens: Sequence[str],
    specials: Specials,
    normalisation: Normalisation | None,
    where: str,
) -> WordPiece:
    tokenizer = WordPiece(
        tuple(tokens),
        *find_specials(tokens, specials, where),
        normalisation or Normalisation(),
    )
    check_replacements(tokenizer, where)
    return tokenizer


def _count_words(lines: Iterable[str], normalisation: Normalisation) -> dict[str, int]:
    """Counts words as the encoder sees them."""
    # The normaliser works character by character, so text may be cut at spaces first:
    # each different chunk is then normalised once.
    chunks: Counter[str] = Counter()
    for line in lines:
        chunks.update(line.split(" "))
    normalizer = normalisation.normalizer(clean=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        text = normalizer.normalize_str(without_surrogates(chunk))
        for word, _ in splitter.pre_tokenize_str(text):
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
