"""Where arrays lie: the device mesh, and what the model's axis names mean on it."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from spanbert_jax.errors import InputError
from spanbert_jax.model.encoder import Geometry
from spanbert_jax.settings import MESH_AXES

# From the axis names of spanbert_jax.model.encoder to those of the mesh.
RULES = (
    ("rows", ("data", "fsdp")),
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("hidden", None),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("layers", None),
)

_ROWS = PartitionSpec(("data", "fsdp"))


def mesh_shape(config: ConfigDict, num_devices: int) -> dict[str, int]:
    """The devices along each axis; -1 takes what the others leave.

    Raises:
        InputError: they do not come to the number of devices.
    """
    sizes = {name: config.mesh[name] for name in MESH_AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    asked = " * ".join(f"mesh.{name}={size}" for name, size in sizes.items())
    if -1 not in sizes.values():
        if given > num_devices:
            raise InputError(
                f"{asked} is {given} devices, but there are {num_devices}; a -1 takes"
                " what the others leave"
            )
        return sizes
    if num_devices % given:
        raise InputError(
            f"{asked}: there are {num_devices} devices, not a multiple of {given};"
            f" the others may come to {_listed(_divisors(num_devices))}"
        )
    return {
        name: num_devices // given if size == -1 else size
        for name, size in sizes.items()
    }


def _divisors(*numbers: int) -> list[int]:
    common = math.gcd(*numbers)
    return [size for size in range(1, common + 1) if common % size == 0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def check_mesh(
    config: ConfigDict, geometry: Geometry, shape: Mapping[str, int]
) -> None:
    """Checks that all that is split over an axis can be.

    Args:
        config: all settings.
        geometry: of the encoder.
        shape: the devices along each axis.

    Raises:
        InputError: names the axis, what it would split, and the sizes that would do.
    """
    split = {
        "fsdp": {"model.hidden_size": geometry.hidden_size},
        "tensor": {
            "model.num_heads": geometry.num_heads,
            "model.intermediate_size": geometry.intermediate_size,
            "the padded vocabulary": geometry.padded_vocab_size,
        },
    }
    for axis, numbers in split.items():
        for name, number in numbers.items():
            if number % shape[axis]:
                raise InputError(
                    f"mesh.{axis} is {shape[axis]}, which does not divide {name},"
                    f" {number}; it may be {_listed(_divisors(*numbers.values()))}"
                )
    rows, parts = config.train.batch_size, config.train.accumulation
    holders = shape["data"] * shape["fsdp"]
    if rows % (holders * parts):
        raise InputError(
            f"train.batch_size is {rows}, not a multiple of the {holders} devices that"
            f" share its rows (mesh.data * mesh.fsdp) times train.accumulation, which"
            f" is {parts}; a multiple of {holders * parts} would do, such as"
            f" {_near(rows, holders * parts)}"
        )


def _near(number: int, divisor: int) -> str:
    low = number // divisor * divisor
    return f"{low} or {low + divisor}" if low else str(divisor)


def _check_platform(attention: str, platform: str) -> None:
    asked = {"cudnn": "gpu", "splash": "tpu"}.get(attention, platform)
    if platform != asked:
        raise InputError(
            f"model.attention is {attention!r}, which runs on a {asked}, but the"
            f" devices are of the kind {platform}; 'plain' runs anywhere"
        )


def make_mesh(
    config: ConfigDict, geometry: Geometry, devices: Sequence[Any] | None = None
) -> Mesh:
    """The mesh of devices.

    Args:
        config: all settings.
        geometry: of the encoder.
        devices: all of all processes by default; of one process's, the first as many
            as the mesh takes.

    Returns:
        A mesh with the axes `MESH_AXES`.

    Raises:
        InputError: the devices cannot be laid out so, or are of the wrong kind, or
            what is split over an axis cannot be.
    """
    devices = jax.devices() if devices is None else list(devices)
    _check_platform(geometry.attention, devices[0].platform)
    shape = mesh_shape(config, len(devices))
    check_mesh(config, geometry, shape)
    used = devices[: math.prod(shape.values())]
    processes = {device.process_index for device in devices}
    if len(used) < len(devices) and len(processes) > 1:
        raise InputError(
            f"the mesh takes {len(used)} of {len(devices)} devices, which would leave"
            " processes without any; set one of its axes to -1"
        )
    laid_out = mesh_utils.create_device_mesh(
        tuple(shape.values()), used, allow_split_physical_axes=True
    )
    return Mesh(laid_out, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@contextlib.contextmanager
def on(mesh: Mesh) -> Iterator[None]:
    """Within it, what is traced gives the model's axis names their meaning."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """The first axis split over the devices that share the rows: a batch."""
    return NamedSharding(mesh, _ROWS)


def by_names(boxed: Any, mesh: Mesh) -> Any:
    """The shardings of a tree of flax's boxes, by the axis names that they carry."""
    names = nn.get_partition_spec(boxed)
    return nn.logical_to_mesh_sharding(names, mesh, RULES)


def abstract(tree: Any, shardings: Any) -> Any:
    """The shapes of a tree of arrays, with shardings: what a restore needs to know."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def local_rows(mesh: Mesh, rows: int) -> np.ndarray:
    """The rows of a global batch that this process's devices hold, in order: int64.

    Devices along the tensor axis hold the same rows, perhaps in several processes.
    """
    held = by_rows(mesh).addressable_devices_indices_map((rows,)).values()
    numbers = [np.arange(rows)[index] for index in held]
    return np.unique(np.concatenate(numbers))


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh, rows: int) -> Any:
    """Sends this process's rows to its devices.

    Args:
        batch: of the rows `local_rows`.
        mesh: of the devices.
        rows: of the global batch.

    Returns:
        The global batch.
    """
    sharding, mine = by_rows(mesh), local_rows(mesh, rows)

    def put(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            return array[np.searchsorted(mine, np.arange(rows)[index[0]])]

        shape = (rows, *array.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)

    return {key: put(array) for key, array in batch.items()}
