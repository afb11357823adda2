"""The table of slices: which number of microbatches it shows, and what is not known."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling

ROWS = 32


def make_record(parts: int, fits: bool, advised: int | None = None) -> dict[str, Any]:
    return {
        "topology": "v5e:2x4",
        "devices": 8,
        "mesh": {"data": 8, "fsdp": 1, "tensor": 1},
        "batch": {"rows": 8 * ROWS},
        "accumulation": parts,
        "fits": fits,
        "available": 16 * 2**30,
        "memory": {"total": 12 * 2**30},
        "remedies": [f"--config.train.accumulation={advised}: x"] if advised else [],
        "collectives": {"all-reduce": {"sent": 2e9}, "all-gather": {"sent": 1e9}},
        "communication_seconds": 0.015,
        "schedule": {"step_seconds": 0.1, "days": 2.5, "chip_hours": 480.0},
    }


class Compiler:
    """Refuses what is below `fits_from`, as does its estimate what is below `guess`."""

    def __init__(self, guess: int, fits_from: int, most: int = ROWS) -> None:
        self.compiled: list[int] = []
        self._least = {True: guess, False: fits_from}
        self._most = most

    def __call__(self, arguments: Sequence[str]) -> dict[str, Any]:
        found = re.search(r"accumulation=([0-9]+)", " ".join(arguments))
        parts = int(found[1]) if found else 1
        estimates = "--nocompile" in arguments
        if not estimates:
            self.compiled.append(parts)
        if parts >= self._least[estimates]:
            return make_record(parts, True)
        # An advice that is too careful, as long as there is one.
        return make_record(parts, False, 4 * parts if parts < self._most else None)


@pytest.mark.parametrize(
    ("guess", "fits_from", "compiled"),
    [
        # The estimate agrees; that fewer do not fit, only the compiler can say.
        (1, 1, [1]),
        (4, 4, [4, 2]),
        # It is too careful: by one divisor, or by all.
        (16, 8, [16, 8, 4]),
        (16, 1, [16, 8, 4, 2, 1]),
        # It is not careful enough, the compiler's advice too much so.
        (1, 2, [1, 4, 2]),
        (4, 16, [4, 16, 8]),
    ],
)
def test_the_fewest_microbatches_that_fit_are_found(
    monkeypatch: pytest.MonkeyPatch, guess: int, fits_from: int, compiled: list[int]
) -> None:
    compiler = Compiler(guess, fits_from)
    monkeypatch.setattr(scaling, "dry_run", compiler)
    record = scaling.forecast(["--topology=v5e:2x4"])
    assert record["fits"]
    assert record["accumulation"] == fits_from
    assert compiler.compiled == compiled


def test_what_does_not_fit_at_all_is_a_row_with_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "dry_run", Compiler(1, 1000, most=4))
    record = scaling.forecast([])
    assert not record["fits"]
    unknown = record | {"collectives": None, "communication_seconds": None}
    cells = scaling.row(unknown).split(" | ")
    assert cells[3:] == ["4 x 8", "12.0 of 16.0", "-", "100.0", "-", "2.50", "480 |"]
    known = scaling.row(record).split(" | ")
    assert (known[5], known[7]) == ("3.00", "15.0")


def test_results_are_those_of_their_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = Compiler(1, 1)
    monkeypatch.setattr(scaling, "dry_run", compiler)
    monkeypatch.setattr(scaling, "_SLICES", ("v5e:2x4",))
    results = tmp_path / "results.jsonl"
    for config in ("one.py", "other.py", "one.py"):
        words = ["scaling.py", f"--config={config}", f"--results={results}"]
        monkeypatch.setattr(sys, "argv", words)
        scaling.main()
    kept = [json.loads(line)["config"] for line in results.read_text().splitlines()]
    assert kept == ["one.py", "other.py"]
    assert compiler.compiled == [1, 1]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| v5e:2x4 |") for line in lines) == 3
