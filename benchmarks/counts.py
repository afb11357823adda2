"""Counts what no clock changes: python benchmarks/counts.py prints one JSON line.

Of an update of two layers at the geometry of step.py, as compiled for this machine:

products         matrix products in the program, before compilation
gflop            of all operations, before compilation, as XLA estimates them
fusions, copies  in the compiled program: fused loops, and moves of arrays
gigabytes        that the compiled program reads and writes, as XLA estimates them
temporary_mib    that it needs beside its arguments

Of the host, in calls of functions, Python's and NumPy's:

masking_calls            for the masks of a batch of 256 packed rows
masking_calls_per_block  how many of them come with another block: near 0 if all blocks
                         are masked at once
batch_calls, batch_calls_per_block
                         the same for all arrays of the batch

The same on every run with the same versions; another processor may fuse otherwise.
"""

from common import prepare_process

prepare_process()

import functools
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import step
from configs import default
from feeds import VOCAB_SIZE, make_feed
from spanbert_jax import settings
from spanbert_jax.data.batch import Feed, make_batch, masked_blocks
from spanbert_jax.training.program import make_program
from spanbert_jax.training.sharding import make_mesh

_LAYERS = 2
_FEW_ROWS, _ROWS = 32, 256


def count_update() -> dict[str, float]:
    """The counts of an update; nothing is computed."""
    config = step.make_config("small", 0.1)
    if config.model.unroll > 1:
        config.model.unroll = _LAYERS
    config.model.num_layers = _LAYERS
    model = settings.model(config, VOCAB_SIZE)
    mesh = make_mesh(config, model.geometry)
    program = make_program(config, model, mesh, settings.batch_shape(config))
    lowered = program.update.lower(program.state, program.batch, program.votes)
    compiled = lowered.compile()
    text = compiled.as_text()
    return {
        "products": lowered.as_text().count("stablehlo.dot_general"),
        "gflop": lowered.cost_analysis()["flops"] / 1e9,
        "fusions": len(re.findall(r" fusion\(", text)),
        "copies": len(re.findall(r" copy\(", text)),
        "gigabytes": compiled.cost_analysis()["bytes accessed"] / 1e9,
        "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
    }


def count_calls(work: Callable[[], Any]) -> int:
    """How many functions are called, at any depth."""
    calls = 0

    def watch(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # What is made once and kept is not to count.
    work()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_for_rows(feed: Feed, count: int) -> tuple[int, dict[str, int]]:
    """The blocks of the first rows of a plan, and the calls that they take."""
    rows = np.arange(count)
    chosen = feed.plan.row_blocks[: feed.plan.row_offsets[count]]
    works = {
        "masking": functools.partial(
            masked_blocks, feed, chosen, np.zeros_like(chosen)
        ),
        "batch": functools.partial(make_batch, feed, rows, np.zeros_like(rows)),
    }
    return len(chosen), {name: count_calls(work) for name, work in works.items()}


def count_host(feed: Feed) -> dict[str, float]:
    """The counts of masking and of batches."""
    few_blocks, few = calls_for_rows(feed, _FEW_ROWS)
    blocks, many = calls_for_rows(feed, _ROWS)
    counts = {f"{name}_calls": calls for name, calls in many.items()}
    return counts | {
        f"{name}_calls_per_block": (calls - few[name]) / (blocks - few_blocks)
        for name, calls in many.items()
    }


def main() -> None:
    """Prints the counts."""
    config = default.get_config()
    config.data.packing = True
    with tempfile.TemporaryDirectory() as cache:
        counts = count_update() | count_host(make_feed(config, "", Path(cache)))
    rounded = {name: round(float(count), 3) for name, count in counts.items()}
    versions = {"jax": jax.__version__, "numpy": np.__version__}
    print(json.dumps({"counts": rounded, "versions": versions}))


if __name__ == "__main__":
    main()
