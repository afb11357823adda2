"""Times the host's work: python benchmarks/host.py [--corpus=DIR] prints one JSON line.

masking_tokens_per_second   tokens of blocks masked per CPU second of one core, word
                            borders included, in four batches of 256 packed rows of 512:
                            one of them may have a block that nothing fits in
pipeline_tokens_per_second  real tokens per second of wall time, store to NumPy batch,
                            through tf.data with as many workers as there are cores
pipeline_tokens_per_cpu_second
                            the same per CPU second of all threads, with one worker
pairs                       the first two for packed pairs, on all cores
fill_packed, fill_padded    share of the rows' places that hold a token
first_batch_seconds         from opening the plan to the first batch, by first step

Without --corpus a text is generated whose blocks have the lengths of a real one.

python benchmarks/host.py --tokens=1e6,1e9 writes texts of these sizes to a temporary
directory, two bytes a token, and prints a line for each: the figures of packed rows,
with the text in the page cache, and

plan_seconds                to plan the rows, once for a text and its settings
plan_bytes                  what the plan takes on disk
plan_peak_bytes, peak_bytes the most memory that planning takes, and the making of
                            batches, beyond that of the libraries and of mapped files
"""

from common import median_seconds, prepare_process, with_peak_bytes

prepare_process()

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from configs import default
from feeds import feed_of, make_feed, open_split, write_split
from spanbert_jax.data import counter
from spanbert_jax.data.batch import Feed, masked_blocks
from spanbert_jax.data.blocks import find_words
from spanbert_jax.data.masking import mask
from spanbert_jax.data.mixing import Mix
from spanbert_jax.data.pipeline import RowOrder, batches

_ROWS = 256
_BATCHES = 40
_REPEATS = 7
_FIRST_STEPS = (0, 100_000)
MASKED_STEPS = range(4)


def one_corpus(feed: Feed) -> Mix:
    """A run's data: this feed, and no other."""
    return Mix((feed,), np.ones(1, np.int64), feed.seed)


def row_order(feed: Feed) -> RowOrder:
    """The order of a training run."""
    return functools.partial(one_corpus(feed).training_rows, batch_size=_ROWS)


def batch_blocks(feed: Feed, step: int) -> np.ndarray:
    """The blocks of the batch of a step: int64."""
    offsets = feed.plan.row_offsets
    held = [
        feed.plan.row_blocks[offsets[row] : offsets[row + 1]]
        for row in row_order(feed)(step).row
    ]
    return np.concatenate(held)


def masking_rate(feed: Feed) -> float:
    """Tokens masked per CPU second: words found, spans drawn, replacements chosen."""
    timed = [_time_masking(feed, batch_blocks(feed, step)) for step in MASKED_STEPS]
    tokens, seconds = np.sum(timed, axis=0)
    return tokens / seconds


def _time_masking(feed: Feed, chosen: np.ndarray) -> tuple[int, float]:
    """Tokens of some blocks, and the CPU seconds that masking them takes."""
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

    return len(read.tokens), median_seconds(work, 2 * _REPEATS, time.process_time)


def pipeline_rate(
    feed: Feed, workers: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Real tokens per second of a clock, from the store to NumPy batches."""
    order, rates = row_order(feed), []
    for repeat in range(_REPEATS):
        steps = range(repeat * _BATCHES, (repeat + 1) * _BATCHES)
        # The graph's tracing counts: batches made before the clock starts would not.
        start = clock()
        made = batches(one_corpus(feed), order, np.arange(_ROWS), steps, workers)
        tokens = sum(int((batch["segment_ids"] > 0).sum()) for batch in made)
        rates.append(tokens / (clock() - start))
    return float(np.median(rates))


def first_batch_seconds(open_feed: Callable[[], Feed]) -> dict[str, float]:
    """Seconds from opening text and plan to the first batch, by first step."""
    seconds = {}
    for step in _FIRST_STEPS:
        start = time.perf_counter()
        feed = open_feed()
        steps = range(step, step + 1)
        next(batches(one_corpus(feed), row_order(feed), np.arange(_ROWS), steps, 1))
        seconds[str(step)] = round(time.perf_counter() - start, 3)
    return seconds


def rates(feed: Feed, workers: int) -> dict[str, int]:
    """Tokens per second, of masking and of the whole way."""
    return {
        "masking_tokens_per_second": round(masking_rate(feed)),
        "pipeline_tokens_per_second": round(pipeline_rate(feed, workers)),
    }


def one_text(corpus: str, workers: int) -> dict[str, Any]:
    """The figures of a corpus, or of a generated text."""
    config = default.get_config()
    length = config.data.block_length
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory)
        padded = make_feed(config, corpus, cache)
        config.data.packing = True
        packed = make_feed(config, corpus, cache)
        paired_config = config.copy_and_resolve_references()
        paired_config.data.pairs = True
        paired = make_feed(paired_config, corpus, cache)
        cpu_rate = pipeline_rate(packed, 1, time.process_time)
        open_feed = functools.partial(make_feed, config, corpus, cache)
        return rates(packed, workers) | {
            "pipeline_tokens_per_cpu_second": round(cpu_rate),
            "pairs": rates(paired, workers),
            "fill_packed": round(packed.plan.fill(length), 4),
            "fill_padded": round(padded.plan.fill(length), 4),
            "first_batch_seconds": first_batch_seconds(open_feed),
            "corpus": corpus or "generated",
            "workers": workers,
        }


def open_generated(directory: Path) -> Feed:
    """The feed of packed rows of what `write_split` wrote, with the plan beside it."""
    config = default.get_config()
    config.data.packing = True
    return feed_of(config, open_split(directory), directory)


def plan_figures(directory: Path) -> dict[str, Any]:
    """Plans the rows of a generated text."""
    start = time.perf_counter()
    # The plan says when it takes long; the figures are all that stdout is for.
    with contextlib.redirect_stdout(sys.stderr):
        plan, peak = with_peak_bytes(lambda: open_generated(directory).plan)
    seconds = time.perf_counter() - start
    files = [file.stat().st_size for file in (directory / "plans").rglob("*.npy")]
    return {
        "blocks": plan.num_blocks,
        "rows": plan.num_rows,
        "plan_seconds": round(seconds, 1),
        "plan_bytes": sum(files),
        "plan_peak_bytes": peak,
    }


def batch_figures(directory: Path, workers: int) -> dict[str, Any]:
    """Makes batches of a generated text of which the plan is there."""
    # What it takes is no text's.
    import tensorflow  # noqa: F401

    def work() -> dict[str, Any]:
        feed = open_generated(directory)
        cpu_rate = pipeline_rate(feed, 1, time.process_time)
        open_feed = functools.partial(open_generated, directory)
        return rates(feed, workers) | {
            "pipeline_tokens_per_cpu_second": round(cpu_rate),
            "first_batch_seconds": first_batch_seconds(open_feed),
        }

    figures, peak = with_peak_bytes(work)
    return figures | {"peak_bytes": peak}


def by_itself(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Calls a function in a process of its own, which no other's memory is part of."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def one_size(tokens: int, workers: int) -> dict[str, Any]:
    """The figures of a generated text of some size."""
    with tempfile.TemporaryDirectory() as directory:
        write_split(tokens, Path(directory))
        figures = {"tokens": open_split(Path(directory)).num_tokens}
        figures |= by_itself(plan_figures, Path(directory))
        return figures | by_itself(batch_figures, Path(directory), workers)


def sizes(written: str) -> list[int]:
    """Numbers of tokens, as in "1e6,1e9"."""
    numbers = [int(float(one)) for one in written.split(",")]
    if min(numbers) < 1e5:
        raise argparse.ArgumentTypeError("a text has 100,000 tokens at least")
    return numbers


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", default="", help="default: a generated text")
    parser.add_argument("--tokens", type=sizes, help="sizes of generated texts")
    flags = parser.parse_args()
    workers = os.cpu_count() or 1
    if not flags.tokens:
        print(json.dumps(one_text(flags.corpus, workers)))
        return
    for tokens in flags.tokens:
        print(json.dumps(one_size(tokens, workers)), flush=True)


if __name__ == "__main__":
    main()
