"""The guard: what counts as worse, and that nothing is by count."""

import json

import pytest

from benchmarks import guard


def test_nothing_is_worse_than_recorded_by_count() -> None:
    counted, recorded = guard.run("counts.py"), json.loads(guard.RECORDED.read_text())
    if counted["versions"] != recorded["versions"]:
        pytest.skip(f"recorded with {recorded['versions']}: --record it again")
    assert counted["counts"].keys() == recorded["counts"].keys()
    assert not guard.faults(counted["counts"], recorded["counts"])


def test_every_number_that_is_recorded_has_a_tolerance() -> None:
    recorded = json.loads(guard.RECORDED.read_text())
    names = [*recorded["counts"], *recorded["ratios"]]
    assert sorted(names) == sorted(guard._TOLERANCES)


@pytest.mark.parametrize(
    ("name", "recorded", "passes", "fails"),
    [
        # More is better, and a quarter less is the same.
        ("masking_over_plain", 10.0, (7.6, 10.0, 99.0), (7.4, 0.0)),
        ("utilization", 0.6, (0.52, 0.6, 0.9), (0.5,)),
        # Less is better.
        ("warm_over_cold", 0.5, (0.64, 0.5, 0.0), (0.66, 1.0)),
        ("products", 39.0, (39.0, 38.0), (40.0,)),
        ("gflop", 100.0, (100.9, 50.0), (101.1,)),
    ],
)
def test_worse_is_beyond_the_tolerance_on_the_bad_side(
    name: str, recorded: float, passes: tuple[float, ...], fails: tuple[float, ...]
) -> None:
    for number in passes:
        assert guard.faults({name: number}, {name: recorded}) == []
    for number in fails:
        (fault,) = guard.faults({name: number}, {name: recorded})
        assert fault.startswith(f"{name} is {number:g}, recorded is {recorded:g}")


def test_a_noisy_ratio_is_measured_again_and_counts_by_its_best() -> None:
    recorded = {"masking_over_plain": 10.0, "warm_over_cold": 0.5}
    tries = iter(
        [
            {"masking_over_plain": 5.0, "warm_over_cold": 0.5},
            {"masking_over_plain": 9.0, "warm_over_cold": 0.9},
            {"masking_over_plain": 99.0, "warm_over_cold": 0.1},
        ]
    )
    best = guard.best_of(lambda: next(tries), recorded, tries=3)
    # The second one mends the first, so there is no third.
    assert best == {"masking_over_plain": 9.0, "warm_over_cold": 0.5}
    assert len(list(tries)) == 1


def test_a_ratio_that_stays_worse_is_measured_so_often_and_no_more() -> None:
    calls = 0

    def measure() -> dict[str, float]:
        nonlocal calls
        calls += 1
        return {"utilization": 0.1 * calls}

    best = guard.best_of(measure, {"utilization": 0.6}, tries=3)
    assert calls == 3
    assert best["utilization"] == pytest.approx(0.3)
    assert guard.faults(best, {"utilization": 0.6})
