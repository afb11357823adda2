"""Guards what was measured: python benchmarks/guard.py fails where it became worse.

Compares with recorded.json. First the counts of counts.py, which no noise can change.
Then ratios of times, each within one run: seconds would compare machines.

masking_over_plain    masking.py: our masking against the naive masker's first version
masking_over_tight    against its tight one
pipeline_over_masking tokens through tf.data, against tokens masked; falls if what is
                      around masking grows
utilization           training.py: model FLOPs of a packed step against a plain product
warm_over_cold        start.py: CPU time of a start with compiled programs kept, against
                      one without

A ratio that is off is measured again, up to --tries times, and counts by its best. The
tolerances are those of _TOLERANCES. --counts leaves the ratios out; --record writes
what is measured now into recorded.json instead of comparing.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RECORDED = Path(__file__).resolve().parent / "recorded.json"
_DIRECTORY = RECORDED.parent


class Tolerance(NamedTuple):
    """What may change unnoticed.

    Attributes:
        more_is_better: which way is worse.
        share: of the recorded number, how much worse is still the same.
    """

    more_is_better: bool
    share: float


# Counts repeat exactly: what they leave room for are other processors, and other
# versions of Python and of NumPy.
_TOLERANCES = {
    "products": Tolerance(False, 0.0),
    "gflop": Tolerance(False, 0.01),
    "fusions": Tolerance(False, 0.1),
    "copies": Tolerance(False, 0.1),
    "gigabytes": Tolerance(False, 0.05),
    "temporary_mib": Tolerance(False, 0.05),
    "masking_calls": Tolerance(False, 0.2),
    "masking_calls_per_block": Tolerance(False, 0.2),
    "batch_calls": Tolerance(False, 0.2),
    "batch_calls_per_block": Tolerance(False, 0.2),
    "masking_over_plain": Tolerance(True, 0.25),
    "masking_over_tight": Tolerance(True, 0.25),
    "pipeline_over_masking": Tolerance(True, 0.25),
    "utilization": Tolerance(True, 0.15),
    "warm_over_cold": Tolerance(False, 0.3),
}


def is_worse(name: str, measured: float, recorded: float) -> bool:
    """Whether a number is worse than recorded, beyond its tolerance."""
    more_is_better, share = _TOLERANCES[name]
    if more_is_better:
        return measured < recorded * (1 - share)
    return measured > recorded * (1 + share)


def better(name: str, one: float, other: float) -> float:
    """The better of two measurements."""
    return max(one, other) if _TOLERANCES[name].more_is_better else min(one, other)


def faults(measured: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """What became worse, a sentence each.

    Args:
        measured: numbers by name.
        recorded: the same names, and perhaps others.

    Raises:
        KeyError: a number was never recorded.
    """
    return [
        f"{name} is {number:g}, recorded is {recorded[name]:g}; up to"
        f" {_TOLERANCES[name].share:.0%} worse would pass"
        for name, number in measured.items()
        if is_worse(name, number, recorded[name])
    ]


def run(script: str, *arguments: str) -> dict[str, Any]:
    """What a script of this directory prints, run without settings of XLA's."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(_DIRECTORY / script), *arguments],
        env=environment | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _masking() -> dict[str, float]:
    ratios = run("masking.py", "--nopeers")["ratios"]
    pairs = ("masking/plain", "masking/tight", "pipeline/masking")
    return {pair.replace("/", "_over_"): ratios[pair]["median"] for pair in pairs}


def _training() -> dict[str, float]:
    return {"utilization": run("training.py", "--nopeers")["utilization"]}


def _start() -> dict[str, float]:
    return {"warm_over_cold": run("start.py")["warm_over_cold"]}


_RATIOS: tuple[Callable[[], dict[str, float]], ...] = (
    _masking,
    _training,
    _start,
)


def best_of(
    measure: Callable[[], Mapping[str, float]],
    recorded: Mapping[str, float],
    tries: int,
) -> dict[str, float]:
    """Measures until nothing is worse than recorded, and keeps the best of each.

    Args:
        measure: numbers by name.
        recorded: what to compare with.
        tries: how often at most.

    Returns:
        Numbers by name.
    """
    best = dict(measure())
    for _ in range(tries - 1):
        if not faults(best, recorded):
            break
        for name, number in measure().items():
            best[name] = better(name, best[name], number)
    return best


def main() -> int:
    """Compares, or records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--counts", action="store_true", help="no ratios of times")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    counted = run("counts.py")
    kinds = () if arguments.counts else _RATIOS
    if arguments.record:
        ratios = {name: x for measure in kinds for name, x in measure().items()}
        content = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        content |= counted | ({"ratios": ratios} if ratios else {})
        RECORDED.write_text(json.dumps(content, indent=2) + "\n")
        return 0
    recorded = json.loads(RECORDED.read_text())
    if counted["versions"] != recorded["versions"]:
        differ = f"recorded with {recorded['versions']}, this is {counted['versions']}"
        print(f"note: {differ}", file=sys.stderr)
    measured, found = (
        dict(counted["counts"]),
        faults(counted["counts"], recorded["counts"]),
    )
    for measure in kinds:
        best = best_of(measure, recorded["ratios"], arguments.tries)
        measured |= best
        found += faults(best, recorded["ratios"])
    print(json.dumps({"measured": measured, "faults": found}))
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
