"""Synthetic text for the tests of the data room: ids, documents, splits, feeds."""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from spanbert_jax.corpus.store import Shard, Split
from spanbert_jax.corpus.tokenizers import STARTS
from spanbert_jax.data.batch import Feed, SpecialIds
from spanbert_jax.data.masking import Masking, RandomTokens
from spanbert_jax.data.plan import Plan, PlanSettings, build_plan

# Ids 0-4 are special, 5-9 unused; then words' first pieces, then the later pieces.
SPECIAL = SpecialIds(pad=0, unk=4, cls=1, sep=2, mask=3)
FIRST_WORD, FIRST_PIECE, VOCAB_SIZE = 10, 600, 1000
STARTS_WORD = np.arange(VOCAB_SIZE) < FIRST_PIECE
WORD_EDGES = np.where(STARTS_WORD, STARTS, 0).astype(np.uint8)
RANDOM_IDS = np.arange(FIRST_WORD, VOCAB_SIZE, dtype=np.int32)
RANDOM_TOKENS = RandomTokens(RANDOM_IDS)

RATIO = Fraction(3, 20)
PAPER = Masking("span", "span", RATIO, 0.2, 10, 64, 0.5, 0.8, 0.1)


def words_of(sizes: Sequence[int], dtype: type = np.uint16) -> np.ndarray:
    """Text of words with the given numbers of pieces; neighbouring ids differ."""
    starts = np.zeros(sum(sizes), bool)
    starts[np.cumsum([0, *sizes[:-1]])] = True
    place = np.arange(len(starts))
    ids = np.where(
        starts,
        FIRST_WORD + place % (FIRST_PIECE - FIRST_WORD),
        FIRST_PIECE + place % (VOCAB_SIZE - FIRST_PIECE),
    )
    return ids.astype(dtype)


def random_text(
    rng: np.random.Generator, length: int, most_pieces: int = 6, unknown: float = 0.0
) -> np.ndarray:
    """`length` tokens of words of 1 to `most_pieces` pieces: uint16.

    `unknown`: the share of tokens that are [UNK], which begins a word wherever it is.
    """
    begins = np.cumsum(rng.integers(1, most_pieces + 1, length))
    starts = np.zeros(length, bool)
    starts[0] = True
    starts[begins[begins < length]] = True
    first = rng.integers(FIRST_WORD, FIRST_PIECE, length)
    later = rng.integers(FIRST_PIECE, VOCAB_SIZE, length)
    tokens = np.where(starts, first, later).astype(np.uint16)
    if unknown:
        tokens[rng.random(length) < unknown] = SPECIAL.unk
    return tokens


def random_tags(
    rng: np.random.Generator, length: int, share: float = 0.15, longest: int = 20
) -> np.ndarray:
    """Tags that begin at a share of the tokens, wherever words do: int64 [K, 2]."""
    begins = np.flatnonzero(rng.random(length) < share)
    ends = begins + rng.integers(1, longest + 1, len(begins))
    ends = np.minimum(ends, np.append(begins, length)[1:])
    return np.stack([begins, ends], axis=1)


def make_shard(
    documents: Sequence[np.ndarray],
    name: str = "train-00000",
    tags: Mapping[str, np.ndarray] | None = None,
    line_share: float = 0.0,
) -> Shard:
    """A shard of documents of one line each, or with more lines.

    `line_share`: the share of words that begin a line in mid-document.
    """
    tokens, offsets = np.concatenate(documents), np.cumsum([0, *map(len, documents)])
    words = np.flatnonzero(STARTS_WORD[np.minimum(tokens, VOCAB_SIZE - 1)])
    chosen = np.random.default_rng(len(tokens)).random(len(words)) < line_share
    return Shard(name, tokens, offsets, np.union1d(offsets, words[chosen]), tags or {})


def random_split(
    seed: int,
    lengths: Sequence[int],
    shards: int = 1,
    most_pieces: int = 6,
    unknown: float = 0.0,
) -> Split:
    """A training split of documents of the given lengths, dealt out to shards.

    Its tags of either name heed neither words nor documents.
    """
    rng = np.random.default_rng(seed)
    documents = [random_text(rng, length, most_pieces, unknown) for length in lengths]
    parts = []
    for number in range(shards):
        mine = documents[number::shards]
        total = sum(map(len, mine))
        tags = {name: random_tags(rng, total) for name in ("entities", "noun_phrases")}
        parts.append(make_shard(mine, f"train-{number:05d}", tags, 0.1))
    return Split("train", tuple(parts))


def make_feed(
    split: Split,
    block_length: int = 64,
    packing: bool = True,
    pairs: bool = False,
    masking: Masking = PAPER,
    sbo_positions: int = 20,
    sbo_edges: bool = True,
    word_edges: np.ndarray = WORD_EDGES,
) -> Feed:
    """A feed with a plan of the whole split."""
    settings = PlanSettings(block_length, masking.ratio, packing, pairs)
    plan = build_plan(split, word_edges, SPECIAL.unk, settings)
    return Feed(
        split=split,
        plan=plan,
        masking=masking,
        special=SPECIAL,
        word_edges=word_edges,
        random_tokens=RANDOM_TOKENS,
        block_length=block_length,
        pair_slots=settings.pair_slots,
        seed=5,
        sbo_positions=sbo_positions,
        sbo_edges=sbo_edges,
    )


def segment_text(split: Split, plan: Plan, piece: int) -> np.ndarray:
    """The true tokens of one segment of a plan."""
    segments = plan.segments
    start = segments.start[piece]
    shard = split.shards[segments.shard[piece]]
    return np.asarray(shard.tokens[start : start + segments.length[piece]])


def block_texts(split: Split, plan: Plan, block: int) -> list[np.ndarray]:
    """The true tokens of one block of a plan, segment by segment."""
    pieces = [2 * block, plan.seconds[block]] if len(plan.seconds) else [block]
    return [segment_text(split, plan, piece) for piece in pieces]


def save_shard(shard: Shard, directory: Path) -> Shard:
    """The same shard with its tokens in a memory map, as a corpus has them."""
    path = directory / f"{shard.name}.tokens.npy"
    np.save(path, shard.tokens)
    tokens = np.load(path, mmap_mode="r")
    return dataclasses.replace(shard, tokens=tokens)
