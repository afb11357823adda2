"""Times the host's work: python benchmarks/host.py [--corpus=DIR] prints one JSON line.

masking_tokens_per_second   tokens of blocks masked per CPU second of one core, word
                            borders included, in batches of 256 packed rows of 512
pipeline_tokens_per_second  real tokens per second of wall time, store to NumPy batch,
                            through tf.data with as many workers as there are cores
pairs                       the first two for packed pairs, on all cores
fill_packed, fill_padded    share of the rows' places that hold a token
first_batch_seconds         from opening the plan to the first batch, by first step

Without --corpus a text is generated whose blocks have the lengths of a real one.
"""

from common import median_seconds, prepare_process

prepare_process()

import argparse
import functools
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from configs import default
from feeds import make_feed
from spanbert_jax.data import counter
from spanbert_jax.data.batch import Feed, masked_blocks
from spanbert_jax.data.blocks import find_words
from spanbert_jax.data.masking import mask
from spanbert_jax.data.mixing import Mix
from spanbert_jax.data.pipeline import RowOrder, batches

_ROWS = 256
_BATCHES = 40
_REPEATS = 7


def one_corpus(feed: Feed) -> Mix:
    """A run's data: this feed, and no other."""
    return Mix((feed,), np.ones(1, np.int64), feed.seed)


def row_order(feed: Feed) -> RowOrder:
    """The order of a training run."""
    return functools.partial(one_corpus(feed).training_rows, batch_size=_ROWS)


def masking_rate(feed: Feed) -> float:
    """Tokens masked per CPU second: words found, spans drawn, replacements chosen."""
    rows = row_order(feed)(0).row
    held = [
        feed.plan.row_blocks[slice(*feed.plan.row_offsets[r : r + 2])] for r in rows
    ]
    chosen = np.concatenate(held)
    read = masked_blocks(feed, chosen, np.zeros_like(chosen))
    pieces, segments = feed.plan.segments_of(chosen), feed.plan.segments
    continued, continues = segments.continued(pieces), segments.continues[pieces]
    keys = counter.fold(counter.root_key(0), chosen)

    def work() -> None:
        tokens, special = read.tokens, feed.special
        edges, slots = feed.word_edges, feed.target_slots
        words = find_words(
            tokens, read.segments, continued, continues, edges, special.unk, slots
        )
        if feed.plan.is_paired:
            words = words.in_pairs()
        choice = feed.masking, special.mask, feed.random_tokens
        mask(tokens, read.offsets, words, keys, *choice)

    seconds = median_seconds(work, 3 * _REPEATS, time.process_time)
    return len(read.tokens) / seconds


def pipeline_rate(feed: Feed, workers: int) -> float:
    """Real tokens per second of wall time, from the store to NumPy batches."""
    order, rates = row_order(feed), []
    for repeat in range(_REPEATS):
        steps = range(repeat * _BATCHES, (repeat + 1) * _BATCHES)
        # The graph's tracing counts: batches made before the clock starts would not.
        start = time.perf_counter()
        made = batches(one_corpus(feed), order, np.arange(_ROWS), steps, workers)
        tokens = sum(int((batch["segment_ids"] > 0).sum()) for batch in made)
        rates.append(tokens / (time.perf_counter() - start))
    return float(np.median(rates))


def first_batch_seconds(
    config: ConfigDict, corpus: str, cache: Path, step: int
) -> float:
    """Seconds from opening corpus and plan to the first batch."""
    start = time.perf_counter()
    feed = make_feed(config, corpus, cache)
    steps = range(step, step + 1)
    next(batches(one_corpus(feed), row_order(feed), np.arange(_ROWS), steps, 1))
    return time.perf_counter() - start


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", default="", help="default: a generated text")
    corpus = parser.parse_args().corpus
    config = default.get_config()
    workers = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory)
        padded = make_feed(config, corpus, cache)
        config.data.packing = True
        packed = make_feed(config, corpus, cache)
        config.data.pairs = True
        paired = make_feed(config, corpus, cache)
        config.data.pairs = False
        length = config.data.block_length
        figures = {
            "masking_tokens_per_second": round(masking_rate(packed)),
            "pipeline_tokens_per_second": round(pipeline_rate(packed, workers)),
            "pipeline_tokens_per_second_one_worker": round(pipeline_rate(packed, 1)),
            "pairs": {
                "masking_tokens_per_second": round(masking_rate(paired)),
                "pipeline_tokens_per_second": round(pipeline_rate(paired, workers)),
            },
            "fill_packed": round(packed.plan.fill(length), 4),
            "fill_padded": round(padded.plan.fill(length), 4),
            "first_batch_seconds": {
                str(step): round(first_batch_seconds(config, corpus, cache, step), 3)
                for step in (0, 100_000)
            },
            "corpus": corpus or "generated",
            "workers": workers,
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
