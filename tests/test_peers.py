"""The scripts that compare with peers, and those that run ours alone, on tiny sizes."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import runs

BENCHMARKS = runs.REPOSITORY / "benchmarks"
has_peers = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="torch or transformers is not installed",
)
TINY = ("--size=tiny", "--rows=1", "--length=512")
BESIDE = f"--peer_python={sys.executable}"


def start(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def figures(script: str, *arguments: str) -> dict[str, Any]:
    done = start(script, *arguments)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def assert_ordered(ratio: Mapping[str, float]) -> None:
    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]


def test_a_missing_interpreter_is_a_sentence_with_its_remedy(tmp_path: Path) -> None:
    absent = tmp_path / "venv" / "bin" / "python"
    for script in ("masking.py", "training.py", "memory.py", "table.py"):
        done = start(script, f"--peer_python={absent}")
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert f"no {absent}" in line
        assert f"python3 -m venv {absent.parents[1]} && " in line
        assert line.endswith(str(BENCHMARKS / "requirements.txt"))


@has_peers
@pytest.mark.slow
def test_masking_is_compared_with_every_peer() -> None:
    found = figures("masking.py", "--rounds=1", BESIDE)
    assert (found["corpus"], found["rounds"]) == ("generated", 1)
    # Four batches of rows of 512, filled.
    assert found["tokens"] + 2 * found["blocks"] == pytest.approx(
        4 * 256 * 512, rel=0.01
    )
    rates = found["tokens_per_cpu_second"]
    peers = {"subword_np", "subword_pt", "word_np", "word_pt", "tokenizers"}
    assert rates.keys() == {"masking", "batch", "pipeline", "plain", "tight"} | peers
    for name in {"plain", "tight"} | peers:
        expected = rates["masking"] / rates[name]
        assert found["ratios"][f"masking/{name}"]["median"] == pytest.approx(
            expected, rel=0.01
        )
    assert found["versions"].keys() == {"torch", "transformers", "tokenizers"}


@has_peers
@pytest.mark.slow
def test_a_step_is_compared_with_eager_pytorch() -> None:
    found = figures(
        "training.py", *TINY, "--rounds=2", "--peer_cases", "eager", "full", BESIDE
    )
    places = {"padded", "packed", "everywhere", "eager", "full"}
    assert found["places_per_second"].keys() == places
    assert 0 < found["utilization"] < 1
    ratios = found["ratios"]
    assert {name: set(one) for name, one in ratios.items()} == {
        "equal_padding": {"eager"},
        "real_tokens": {"eager"},
        "equal_work": {"eager"},
        "run_together": {"full"},
    }
    for clock in ("cpu", "wall"):
        for others in ratios.values():
            for ratio in others.values():
                assert_ordered(ratio[clock])
    assert 0.6 < found["fill"]["padded"] < 0.8 < 0.99 < found["fill"]["packed"] < 1
    assert found["peers"]["allocators"].keys() == {"eager", "full"}


@has_peers
@pytest.mark.slow
def test_memory_is_more_than_what_it_is_made_of() -> None:
    found = figures("memory.py", *TINY, BESIDE)
    for allocator, cases in (
        ("usual", ("update", "eager")),
        ("large", ("update", "eager")),
        ("kept", ("update", "training", "eager")),
    ):
        one = found[allocator]
        for case in cases:
            assert one[case]["imported_bytes"] < one[case]["peak_bytes"] < 2**33
        held = one["update"]["imported_bytes"] + one["state_bytes"]
        assert held + one["temporary_bytes"] < one["update"]["peak_bytes"]
        # The optimiser keeps two numbers beside each parameter.
        assert one["state_bytes"] == pytest.approx(3 * one["parameter_bytes"], rel=0.01)


@pytest.mark.slow
def test_work_is_measured_over_lengths_of_as_many_places() -> None:
    sizes = ("--size=tiny", "--rows=1", "--length=256", "--base_rows=1")
    found = figures("work.py", *sizes, "--rounds=1", "--base_rounds=1")
    shapes = {name: (x["rows"], x["length"]) for name, x in found["length"].items()}
    assert shapes == {"128": (2, 128), "256": (1, 256)}
    assert found["size"].keys() == {"small", "base"}
    assert found["size"]["base"]["gflop"] > 5 * found["size"]["small"]["gflop"]


@pytest.mark.slow
def test_a_start_with_compiled_programs_takes_less() -> None:
    found = figures("start.py", "--rounds=1")
    assert found["warm"]["cpu"] < found["cold"]["cpu"]
    assert found["warm_over_cold"] == pytest.approx(
        found["warm"]["cpu"] / found["cold"]["cpu"], abs=0.01
    )
    assert all(found[kind]["wall"] > 1 for kind in ("first", "cold", "warm"))
