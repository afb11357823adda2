"""Workers take turns, and ratios are of one round."""

import json
import os
import sys
from pathlib import Path

import pytest

import runs
from benchmarks.allocator import ALLOCATORS
from benchmarks.rounds import (
    Measure,
    Player,
    Worker,
    available_cores,
    compare,
    rates,
    take_turns,
)

WORKER = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "benchmarks")!r})
from rounds import available_cores, serve
name, turns = sys.argv[1], open(sys.argv[2], "a")

def tell(case):
    def work():
        turns.write(f"{{name}}.{{case}} ")
        turns.flush()
        return {{"amount": 6}}
    return work

def sleep():
    time.sleep(0.05)
    return {{"amount": 1}}

def part():
    return {{"amount": 6, "cpu": 2.0}}

cases = {{case: tell(case) for case in "ab"}}
description = {{
    "name": name,
    "cores": available_cores(),
    "tunables": os.environ.get("GLIBC_TUNABLES"),
}}
serve(description, cases | {{"sleep": sleep, "part": part, "end": lambda: os._exit(7)}})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def start(script: Path, name: str, **settings: object) -> Worker:
    turns = script.parent / "turns"
    return Worker(str(script), [name, str(turns)], sys.executable, **settings)


def test_each_works_once_a_round_and_the_warm_up_does_not_count(script: Path) -> None:
    with start(script, "one") as one, start(script, "two") as two:
        assert (one.describe()["name"], two.describe()["name"]) == ("one", "two")
        players = {"x": Player(one, "a"), "y": Player(two, "a"), "z": Player(one, "b")}
        measures = take_turns(players, rounds=2, warm_up=1)
    turns = (script.parent / "turns").read_text().split()
    assert turns == ["one.a", "two.a", "one.b"] * 3
    assert {name: len(taken) for name, taken in measures.items()} == {
        "x": 2,
        "y": 2,
        "z": 2,
    }
    assert all(one.amount == 6 for taken in measures.values() for one in taken)


def test_both_clocks_and_the_memory_are_the_workers(script: Path) -> None:
    with start(script, "one") as worker:
        worker.describe()
        slept, part = worker.work("sleep"), worker.work("part")
    assert slept.wall >= 0.05 > slept.cpu
    assert part.cpu == 2.0 > part.wall
    assert part.rate("cpu") == 3.0
    assert 2**20 < part.own_bytes < part.peak_bytes


def test_a_worker_has_its_cores_and_its_allocator(script: Path) -> None:
    cores = available_cores()
    with start(script, "one", cores=1, allocator="usual") as worker:
        described = worker.describe()
    assert (described["cores"], described["tunables"]) == (cores[:1], "")
    assert sorted(os.sched_getaffinity(0)) == cores
    with start(script, "two") as worker:
        described = worker.describe()
    assert described["cores"] == cores
    assert described["tunables"] == "glibc.malloc.hugetlb=1"


def test_the_demo_and_the_documentation_keep_what_is_freed_as_benchmarks_do() -> None:
    (kept,) = ALLOCATORS["kept"].values()
    makefile = (runs.REPOSITORY / "Makefile").read_text().replace("$\\\n", "")
    assert f"\nKEPT := {kept}\n" in makefile
    page = (runs.REPOSITORY / "docs" / "benchmarks.md").read_text()
    assert f"\nexport GLIBC_TUNABLES={kept}\n" in page


def test_a_worker_that_ends_is_named_with_its_code(script: Path) -> None:
    with start(script, "one") as worker:
        worker.describe()
        with pytest.raises(RuntimeError, match=r"worker\.py ended with code 7"):
            worker.work("end")


def measure(amount: float, wall: float, cpu: float) -> Measure:
    return Measure(amount, wall, cpu, 0, 0)


def test_ratios_are_of_one_round() -> None:
    # A machine that is ten times as slow in the second round.
    ours = [measure(100, 1, 2), measure(100, 10, 20), measure(100, 1, 2)]
    theirs = [measure(50, 1, 1), measure(50, 10, 10), measure(25, 1, 1)]
    found = compare(ours, theirs)
    assert found["wall"] == {"median": 2, "low": 2, "high": 4}
    assert found["cpu"] == {"median": 1, "low": 1, "high": 2}
    assert compare(ours, theirs, worth=1.5)["wall"]["high"] == 6
    assert rates(ours) == {"wall": 100, "cpu": 50}
    assert json.loads(json.dumps(found)) == found
