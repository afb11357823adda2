"""Memory: the worst device's, and the process's."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from spanbert_jax.training.memory import memory


def device(stats: dict[str, int] | None) -> Any:
    return SimpleNamespace(memory_stats=lambda: stats)


def test_the_device_with_the_highest_peak_counts() -> None:
    found = memory(
        [
            device({"peak_bytes_in_use": 5, "bytes_limit": 80, "bytes_in_use": 70}),
            device({"peak_bytes_in_use": 9, "bytes_limit": 90, "bytes_in_use": 1}),
            device(None),
        ]
    )
    assert (found["device_peak_bytes"], found["device_limit_bytes"]) == (9, 90)


def test_a_device_without_a_limit_has_a_peak() -> None:
    found = memory([device({"peak_bytes_in_use": 5})])
    assert found["device_peak_bytes"] == 5
    assert "device_limit_bytes" not in found


def test_devices_that_do_not_count_have_no_figure() -> None:
    assert memory(jax.local_devices()).keys() == {"process_peak_bytes"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_the_process_is_what_the_kernel_says_in_bytes() -> None:
    found = memory([])["process_peak_bytes"]
    [line] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found == pytest.approx(int(line) * 1024, rel=0.01)
