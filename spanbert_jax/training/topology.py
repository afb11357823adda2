"""Topologies: slices that are not there, as devices that programs are compiled for."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from spanbert_jax.errors import InputError
from spanbert_jax.training.chips import CHIPS, Chip

_GPUS_PER_HOST = 8
# Of the shape of a TPU slice: v4 and v5p are cubes.
_DIMENSIONS = {"v4": 3, "v5p": 3, "v5e": 2, "v6e": 2}
# Chips of a host; a longer side of a slice is made of whole hosts.
_HOST_SIDE = 2
_MOST_CHIPS = 8192

_TPU_ENVIRONMENT = {
    # Without these, libtpu asks the network for the machine that it is not on.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # It guards chips that this process never touches.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# What XLA asks of an NVIDIA GPU before it compiles for it.
_GPU_TARGET = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
  device_memory_size: {memory} memory_bandwidth: {bandwidth} l2_cache_size: {cache}
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_block}
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_core_limit: 2048 threads_per_block_limit: 1024 threads_per_warp: 32
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
"""
_HOPPER = {
    "major": 9,
    "cores": 132,
    "units": 128,
    "clock": 1.98,
    "cache": 50 * 2**20,
    "shared": 228 * 2**10,
    "shared_block": 227 * 2**10,
}
_AMPERE = {
    "major": 8,
    "cores": 108,
    "units": 64,
    "clock": 1.41,
    "cache": 40 * 2**20,
    "shared": 164 * 2**10,
    "shared_block": 163 * 2**10,
}
# From NVIDIA's architecture white papers.
_GPU_FACTS: dict[str, dict[str, Any]] = {
    "a100": _AMPERE | {"bandwidth": 2_039_000_000_000},
    "h100": _HOPPER | {"bandwidth": 3_352_000_000_000},
    "h200": _HOPPER | {"bandwidth": 4_800_000_000_000},
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice.

    Attributes:
        name: as written, such as v5e:8x8.
        platform: tpu, gpu or cpu.
        chip: None for a CPU, which has no figures.
        shape: chips along each side.
    """

    name: str
    platform: str
    chip: Chip | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of chips, each of which is one device."""
        return math.prod(self.shape)


def parse_topology(name: str) -> Topology:
    """Reads a topology: v5e:8x8, v4:4x4x4, gpu:h100x32, cpu:8.

    Raises:
        InputError: there is no such slice.
    """
    family, _, text = name.partition(":")
    if family == "gpu":
        return _parse_gpu(name, text)
    if family == "cpu" and re.fullmatch("[1-9][0-9]{0,3}", text):
        return Topology(name, "cpu", None, (int(text),))
    if family not in _DIMENSIONS:
        raise InputError(
            f"--topology={name}: it must be v5e:XxY, v6e:XxY, v4:XxYxZ, v5p:XxYxZ,"
            " gpu:CHIPxCOUNT or cpu:COUNT, such as v5e:8x8, gpu:h100x32, cpu:8"
        )
    sides, example = _DIMENSIONS[family], "x".join("8" * _DIMENSIONS[family])
    if not re.fullmatch("x".join(["[1-9][0-9]*"] * sides), text):
        raise InputError(
            f"--topology={name}: a {family} slice has {sides} sides, such as"
            f" {family}:{example}"
        )
    shape = tuple(map(int, text.split("x")))
    # A host holds 2 x 2 chips; one chip can be had alone.
    if math.prod(shape) > 1 and any(side % _HOST_SIDE for side in shape[:2]):
        raise InputError(
            f"--topology={name}: hosts hold {_HOST_SIDE} x {_HOST_SIDE} chips, so the"
            f" first two sides of a slice must be even"
        )
    if math.prod(shape) > _MOST_CHIPS:
        raise InputError(
            f"--topology={name} has {math.prod(shape):,} chips; the most is"
            f" {_MOST_CHIPS:,}"
        )
    return Topology(name, "tpu", CHIPS[family], shape)


def _parse_gpu(name: str, text: str) -> Topology:
    chip, _, count = text.partition("x")
    if chip not in _GPU_FACTS or not re.fullmatch("[1-9][0-9]*", count):
        raise InputError(
            f"--topology={name}: it must be gpu:CHIPxCOUNT, with one of"
            f" {', '.join(_GPU_FACTS)}, such as gpu:h100x32"
        )
    size = int(count)
    if (size > _GPUS_PER_HOST and size % _GPUS_PER_HOST) or size > _MOST_CHIPS:
        raise InputError(
            f"--topology={name}: it must be at most {_GPUS_PER_HOST} GPUs, one host's,"
            f" or a multiple of {_GPUS_PER_HOST} up to {_MOST_CHIPS:,}"
        )
    return Topology(name, "gpu", CHIPS[chip], (size,))


def can_compile(topology: Topology) -> bool:
    """Whether the compiler is installed: for a GPU that is CUDA's plugin for jax.

    Raises:
        InputError: a TPU's is not.
    """
    if topology.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"--topology={topology.name} takes the TPU compiler: pip install"
            " 'jax[tpu]', best into an environment of its own, or estimate with"
            " --nocompile"
        )
    return topology.platform != "gpu" or any(
        importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None
        for version in (12, 13)
    )


def make_devices(topology: Topology) -> Sequence[Any]:
    """The devices of a slice, to compile for; of a CPU, devices of this process.

    Raises:
        InputError: the compiler knows no such slice.
    """
    if topology.platform == "cpu":
        return jax.devices("cpu")[: topology.size]
    try:
        return _describe(topology).devices
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"--topology={topology.name}: {error}") from error


def _describe(topology: Topology) -> topologies.TopologyDescription:
    if topology.platform == "tpu":
        os.environ.update(_TPU_ENVIRONMENT)
        # Its default of a v4 is a device for each of a chip's two cores.
        options = {"chip_config_name": "megacore"} if topology.chip.name == "v4" else {}
        return topologies.get_topology_desc(topology.name, "tpu", **options)
    chip = topology.chip
    facts = {"kind": chip.kinds[0], "memory": chip.memory, **_GPU_FACTS[chip.name]}
    hosts = -(-topology.size // _GPUS_PER_HOST)
    return topologies.get_topology_desc(
        chip.name,
        "cuda",
        topology=f"1x{hosts}x{topology.size // hosts}",
        target_config=_GPU_TARGET.format(**facts),
    )
