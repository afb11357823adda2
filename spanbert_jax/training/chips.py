"""Chips: what one accelerator holds, computes and sends."""

import dataclasses

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator.

    Attributes:
        name: as in a topology, such as v5e.
        kinds: what jax calls it: `device_kind`, which differs between versions.
        memory: bytes that a program may use.
        share: of the whole memory that these are.
        peak: FLOP/s of bfloat16 products that add up in float32, none skipped as zero.
        interconnect: bytes/s that it can send to its neighbours, over all links.
    """

    name: str
    kinds: tuple[str, ...]
    memory: int
    peak: float
    interconnect: float
    share: float = 1.0


# Of a GPU's memory, what jax takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says another.
_GPU_SHARE = 0.75


def _gpu(name: str, kind: str, memory: float, peak: float, nvlink: float) -> Chip:
    return Chip(name, (kind,), int(_GPU_SHARE * memory), peak, nvlink, _GPU_SHARE)


_CHIPS = (
    # Peak and links of the TPUs: the chips' pages of the Cloud TPU documentation, whose
    # links count both directions; memory: what libtpu's compiler says is available. A
    # chip of v4 or v5p has two cores that work as one device ("megacore").
    Chip("v4", ("TPU v4",), int(30.75 * _GIB), 275e12, 300e9),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), int(15.75 * _GIB), 197e12, 200e9),
    Chip("v5p", ("TPU v5", "TPU v5p"), int(95.73 * _GIB), 459e12, 600e9),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), int(31.24 * _GIB), 918e12, 400e9),
    # Peak and NVLink of the GPUs: NVIDIA's data sheets of the SXM boards; memory: what
    # the driver says is there, which is less than the chips on the board hold.
    _gpu("a100", "NVIDIA A100-SXM4-80GB", 85.1e9, 312e12, 300e9),
    _gpu("h100", "NVIDIA H100 80GB HBM3", 84.9e9, 989e12, 450e9),
    _gpu("h200", "NVIDIA H200", 150.1e9, 989e12, 450e9),
)
CHIPS = {chip.name: chip for chip in _CHIPS}


def find_chip(device_kind: str) -> Chip | None:
    """The chip that jax calls by this name; None for one that is not in the table."""
    return next((chip for chip in _CHIPS if device_kind in chip.kinds), None)
