"""The meter: times of steps, waits and utilisation, by a clock of ours."""

import math
import random
from collections.abc import Iterator

import pytest

from clock import Clock
from spanbert_jax.training.meter import Meter

TOKENS = 100


def read(meter: Meter, clock: Clock, *seconds: float) -> None:
    """Reads a step after each of some times."""
    for time in seconds:
        clock.go_on(time)
        meter.read(TOKENS)


def percentile(values: list[float], percent: float) -> float:
    """Linear between neighbours, by its definition."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_those_of_the_steps(count: int) -> None:
    clock = Clock()
    meter = Meter(2, 1, None, clock)
    times = [random.Random(count).uniform(0.1, 3) for _ in range(count)]
    read(meter, clock, 7.0, *times)
    found = meter.take()
    assert found["step_seconds"] == pytest.approx(
        {
            "p50": percentile(times, 50),
            "p90": percentile(times, 90),
            "max": max(times),
        }
    )
    rate = count * TOKENS / sum(times)
    assert found["tokens_per_second"] == pytest.approx(rate)
    assert found["tokens_per_second_per_device"] == pytest.approx(rate / 2)


def test_utilisation_is_that_of_the_median_step() -> None:
    clock = Clock()
    meter = Meter(8, 3_000, 500.0, clock)
    read(meter, clock, 9.0, 1.0, 2.0, 10.0)
    # 3,000 FLOPs in 2 s, where 8 devices could do 8 * 500 a second.
    assert meter.take()["mfu"] == pytest.approx(0.375)


def test_without_a_peak_there_is_no_utilisation() -> None:
    clock = Clock()
    meter = Meter(8, 3_000, None, clock)
    read(meter, clock, 1.0, 1.0)
    assert "mfu" not in meter.take()


def test_the_first_step_and_the_first_after_a_pause_enter_no_figure() -> None:
    clock = Clock()
    meter = Meter(1, 1, 1.0, clock)
    read(meter, clock, 60.0)
    assert meter.take() == {}
    assert meter.tokens_per_second() is None
    read(meter, clock, 1.0, 2.0)
    meter.pause()
    clock.go_on(300)
    read(meter, clock, 5.0)
    assert meter.tokens_per_second() == pytest.approx(2 * TOKENS / 3)
    read(meter, clock, 3.0)
    found = meter.take()
    assert found["step_seconds"] == {"p50": 2.0, "p90": pytest.approx(2.8), "max": 3.0}
    assert found["tokens_per_second"] == pytest.approx(3 * TOKENS / 6)


def test_figures_are_those_since_the_last_ones_without_a_gap() -> None:
    clock = Clock()
    meter = Meter(1, 1, None, clock)
    read(meter, clock, 1.0, 4.0)
    meter.take()
    assert meter.take() == {}
    clock.go_on(0.5)
    read(meter, clock, 1.5)
    assert meter.take()["step_seconds"]["max"] == 2.0


def test_seconds_count_from_the_start_whatever_was_taken() -> None:
    clock = Clock()
    meter = Meter(1, 1, None, clock)
    read(meter, clock, 1.0, 2.0)
    meter.pause()
    meter.take()
    clock.go_on(4.0)
    assert meter.seconds() == 7.0


def slow(clock: Clock, seconds: list[float]) -> Iterator[int]:
    """Numbers, each after a time."""
    for number, time in enumerate(seconds):
        clock.go_on(time)
        yield number


def run(meter: Meter, clock: Clock, waits: list[float], steps: list[float]) -> None:
    """As the loop does: asks for a batch, starts its step, reads the one before."""
    under_way = 0
    numbers = []
    for number in meter.watch(slow(clock, waits)):
        numbers.append(number)
        if under_way:
            read(meter, clock, steps[number])
        under_way = 1
    assert numbers == list(range(len(waits)))


def test_host_wait_is_the_share_of_the_time_that_the_loop_waited() -> None:
    clock = Clock()
    meter = Meter(1, 1, None, clock)
    waits, steps = [9.0, 8.0, 0.5, 1.0, 0.25], [0.0, 1.0, 2.0, 1.0, 4.0]
    run(meter, clock, waits, steps)
    # Read are the steps before the last; the first of them has no time.
    assert meter.take()["host_wait"] == pytest.approx(1.75 / (1.75 + 7.0))


@pytest.mark.parametrize(("wait", "step", "share"), [(0, 2, 0), (2, 0, 1)])
def test_host_wait_names_the_bottleneck(wait: float, step: float, share: float) -> None:
    clock = Clock()
    meter = Meter(1, 1, None, clock)
    run(meter, clock, [wait] * 6, [step] * 6)
    assert meter.take()["host_wait"] == share


def test_waits_for_a_step_without_a_time_do_not_count() -> None:
    clock = Clock()
    meter = Meter(1, 1, None, clock)
    read(meter, clock, 1.0, 1.0)
    meter.pause()
    run(meter, clock, [50.0, 50.0], [0.0, 1.0])
    read(meter, clock, 3.0)
    assert meter.take()["host_wait"] == 0
