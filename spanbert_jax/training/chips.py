"""Chips: what one accelerator holds, computes and sends, by its maker's figures."""

import dataclasses

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator.

    Attributes:
        name: as in a topology, such as v5e.
        kinds: what jax calls it: `device_kind`, which differs between versions.
        memory: bytes that a program may use.
        peak: FLOP/s of bfloat16 products that add up in float32, none skipped as zero.
        interconnect: bytes/s that it can send to its neighbours, over all links.
    """

    name: str
    kinds: tuple[str, ...]
    memory: int
    peak: float
    interconnect: float


_CHIPS = (
    # Peak and links of the TPUs: the chips' pages of the Cloud TPU documentation, whose
    # links count both directions; memory: what libtpu's compiler says is available. A
    # chip of v4 or v5p has two cores that work as one device ("megacore").
    Chip("v4", ("TPU v4",), int(30.75 * _GIB), 275e12, 300e9),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), int(15.75 * _GIB), 197e12, 200e9),
    Chip("v5p", ("TPU v5", "TPU v5p"), int(95.73 * _GIB), 459e12, 600e9),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), int(31.24 * _GIB), 918e12, 400e9),
    # Peak, memory and NVLink of the GPUs: NVIDIA's data sheets of the SXM boards. jax
    # takes three quarters of a GPU's memory unless it is told to take more.
    Chip("a100", ("NVIDIA A100-SXM4-80GB",), int(0.75 * 85.1e9), 312e12, 300e9),
    Chip("h100", ("NVIDIA H100 80GB HBM3",), int(0.75 * 84.9e9), 989e12, 450e9),
    Chip("h200", ("NVIDIA H200",), int(0.75 * 151.4e9), 989e12, 450e9),
)
CHIPS = {chip.name: chip for chip in _CHIPS}


def find_chip(device_kind: str) -> Chip | None:
    """The chip that jax calls by this name; None for one that is not in the table."""
    return next((chip for chip in _CHIPS if device_kind in chip.kinds), None)
