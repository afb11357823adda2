"""Memory: how much of it a process and its devices have taken at most."""

import resource
import sys
from collections.abc import Iterable

import jax

_PEAK = "peak_bytes_in_use"


def memory(devices: Iterable[jax.Device]) -> dict[str, int]:
    """The peaks since the process began.

    Args:
        devices: of this process.

    Returns:
        process_peak_bytes: resident size of the process.
        device_peak_bytes, device_limit_bytes: of the device with the highest peak, and
            how much it could have taken; left out where devices do not count, as CPUs.
    """
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    counted = [device.memory_stats() or {} for device in devices]
    worst = max(counted, key=lambda stats: stats.get(_PEAK, 0), default={})
    names = {"device_peak_bytes": _PEAK, "device_limit_bytes": "bytes_limit"}
    return {"process_peak_bytes": resident} | {
        name: worst[key] for name, key in names.items() if key in worst
    }
