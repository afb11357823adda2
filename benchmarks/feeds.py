"""What the benchmarks read: a real corpus, or a generated one of like lengths."""

import contextlib
import functools
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.corpus.store import Shard, Split, appending, open_corpus, token_dtype
from spanbert_jax.corpus.tokenizers import STARTS
from spanbert_jax.data.batch import Feed, SpecialIds
from spanbert_jax.data.masking import RandomTokens
from spanbert_jax.data.plan import PlanSettings, load_plan

VOCAB_SIZE = 28_996
# BERT's cased vocabulary: [PAD] 0, [UNK] 100, [CLS] 101, [SEP] 102, [MASK] 103.
SPECIAL = SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)
_FIRST_WORD = 104
# Pieces of a word, as BERT's vocabulary cuts English: 1.25 in the mean.
_CONTINUED = 0.2
# What is generated at a time, and what a build leaves in a shard of a large corpus.
_PART_TOKENS, _SHARD_PARTS = 8_000_000, 12
_ARRAYS = {"tokens": token_dtype(VOCAB_SIZE), "documents": np.int64}


def _word_edges() -> np.ndarray:
    """uint8 [V]: the upper fifth of the ids continue a word."""
    edges = np.full(VOCAB_SIZE, STARTS, np.uint8)
    edges[-VOCAB_SIZE // 5 :] = 0
    return edges


@functools.cache
def make_split(tokens: int, seed: int = 0) -> Split:
    """Documents of log-normal length: blocks of 512 hold some 350 tokens in the mean.

    Args:
        tokens: how many in all, about.
        seed: of the text.

    Returns:
        A split of one shard.
    """
    random = np.random.default_rng(seed)
    lengths = random.lognormal(6.0, 1.0, size=tokens // 665).astype(np.int64) + 1
    documents = np.concatenate([[0], np.cumsum(lengths)])
    total = int(documents[-1])
    border = VOCAB_SIZE - VOCAB_SIZE // 5
    ids = random.integers(_FIRST_WORD, border, total)
    continued = random.random(total) < _CONTINUED
    ids[continued] = random.integers(border, VOCAB_SIZE, int(continued.sum()))
    ids[documents[:-1]] = random.integers(_FIRST_WORD, border, len(lengths))
    shard = Shard("generated", ids.astype(np.uint16), documents, documents)
    return Split("train", (shard,))


def write_split(tokens: int, directory: Path) -> None:
    """Writes a split of any size, as `prepare` writes its shards.

    A generated text of up to 8 million tokens again and again: its size is what counts.

    Args:
        tokens: how many in all, about.
        directory: takes the shards.
    """
    count = -(-tokens // _PART_TOKENS)
    (part,) = make_split(tokens // count).shards
    for number, first in enumerate(range(0, count, _SHARD_PARTS)):
        with contextlib.ExitStack() as stack:
            append = {
                name: stack.enter_context(
                    appending(directory / f"{number:05d}.{name}.npy", dtype)
                )
                for name, dtype in _ARRAYS.items()
            }
            append["documents"](np.zeros(1, np.int64))
            for repeat in range(min(_SHARD_PARTS, count - first)):
                append["tokens"](part.tokens)
                append["documents"](part.documents[1:] + repeat * len(part.tokens))


def open_split(directory: Path) -> Split:
    """What `write_split` wrote, in memory maps; each document is a line."""

    def load(number: int, name: str) -> np.ndarray:
        return np.load(directory / f"{number:05d}.{name}.npy", mmap_mode="r")

    shards = []
    for number in range(len(list(directory.glob("*.tokens.npy")))):
        tokens, documents = (load(number, name) for name in _ARRAYS)
        shards.append(Shard(f"train-{number:05d}", tokens, documents, documents))
    return Split("train", tuple(shards))


def make_feed(config: ConfigDict, corpus: str, cache: Path) -> Feed:
    """The feed of a corpus directory, or of a generated text of 8 million tokens.

    Args:
        config: the data settings.
        corpus: a directory; "" generates.
        cache: where the plan is kept, in memory maps, as in training.

    Returns:
        The feed.
    """
    if not corpus:
        return feed_of(config, make_split(_PART_TOKENS), cache)
    config = config.copy_and_resolve_references()
    config.data.cache = str(cache)
    return settings.feed(config, open_corpus(corpus), "train")


def feed_of(config: ConfigDict, split: Split, cache: Path) -> Feed:
    """The feed of a generated split; `cache` keeps the plan of no other one."""
    edges = _word_edges()
    plan_settings = PlanSettings(
        config.data.block_length,
        settings.mask_ratio(config),
        config.data.packing,
        config.data.pairs,
    )
    ids = np.arange(_FIRST_WORD, VOCAB_SIZE, dtype=np.int32)
    return Feed(
        split=split,
        plan=load_plan(split, edges, SPECIAL.unk, plan_settings, "generated", cache),
        masking=settings.masking(config),
        special=SPECIAL,
        word_edges=edges,
        random_tokens=RandomTokens(ids),
        block_length=config.data.block_length,
        pair_slots=plan_settings.pair_slots,
        seed=config.train.seed,
        sbo_positions=config.sbo.positions,
        sbo_edges=config.sbo.edges == "use",
    )
