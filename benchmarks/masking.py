"""Compares masking with others': python benchmarks/masking.py prints one JSON line.

All work on the blocks of four batches of 256 packed rows of 512, one core each, in
turns; rates are tokens per CPU second of that core, medians over the rounds; ratios are
ours over theirs within a round: median, lowest, highest.

masking      words found, spans drawn, replacements chosen, a batch at once
batch        from the store to all arrays of training batches, 16 a round; [CLS] and
             [SEP] count as tokens here
pipeline     the same through tf.data
plain, tight naive.py: a first version in Python; as little Python as there can be
subword_np   DataCollatorForLanguageModeling of transformers, to NumPy arrays, in
             batches of 32 blocks: it pads, and masks single tokens
subword_pt   the same, to PyTorch's
word_np      the same with whole_word_mask=True, to NumPy arrays; it replaces all by
             [MASK]
word_pt      the same, to PyTorch's
tokenizers   encode_batch_fast of these blocks as text: what a pipeline pays that reads
             text

Without --corpus a text is generated whose blocks have the lengths of a real one. The
peers run in --peer_python; --nopeers leaves them out.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peers
from rounds import Player, Worker, compare, rates, take_turns

_OURS = ("masking", "batch", "pipeline")
_NAIVE = ("plain", "tight")
_PEERS = ("subword_np", "subword_pt", "word_np", "word_pt", "tokenizers")
_WARM_UP = 2


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        exchange = f"--exchange={directory}"
        ours = stack.enter_context(
            Worker(
                "masking_ours.py", [f"--corpus={arguments.corpus}", exchange], cores=1
            )
        )
        players = {case: Player(ours, case) for case in (*_OURS, *_NAIVE)}
        # It writes the blocks that the peers read.
        description = ours.describe()
        versions: Mapping[str, str] = {}
        if arguments.peers:
            theirs = stack.enter_context(
                Worker(
                    "masking_peers.py", [exchange], str(arguments.peer_python), cores=1
                )
            )
            versions = theirs.describe()
            players |= {case: Player(theirs, case) for case in _PEERS}
        measures = take_turns(players, arguments.rounds, _WARM_UP)
    return {
        **description,
        "corpus": Path(arguments.corpus).name or "generated",
        "rounds": arguments.rounds,
        "tokens_per_cpu_second": {
            case: round(rates(taken)["cpu"]) for case, taken in measures.items()
        },
        "ratios": {
            f"{one}/{other}": compare(measures[one], measures[other])["cpu"]
            for one in _OURS
            for other in measures
            if other != one
        },
        "versions": versions,
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", default="", help="default: a generated text")
    parser.add_argument("--rounds", type=int, default=15)
    peers.add_arguments(parser)
    arguments = parser.parse_args()
    peers.check(arguments)
    print(json.dumps(measure(arguments)))


if __name__ == "__main__":
    sys.exit(main())
