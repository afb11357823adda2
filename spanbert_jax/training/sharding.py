"""Where arrays lie: the device mesh and the placement of batch and state."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from spanbert_jax.errors import InputError

DATA = "data"


def make_mesh(config: ConfigDict) -> Mesh:
    """The mesh of devices, with one axis: the rows of a batch are split along it.

    Raises:
        InputError: more devices are asked for than there are, or the batch cannot be
            split evenly.
    """
    devices = jax.devices()
    size = len(devices) if config.mesh.data == -1 else config.mesh.data
    if size > len(devices):
        raise InputError(f"mesh.data is {size}, but there are {len(devices)} devices")
    rows, parts = config.train.batch_size, config.train.accumulation
    if rows % (size * parts):
        raise InputError(
            f"train.batch_size is {rows}, not a multiple of the {size} devices of"
            f" mesh.data times train.accumulation, which is {parts}"
        )
    axis_types = (AxisType.Auto,)
    return jax.make_mesh((size,), (DATA,), axis_types, devices=devices[:size])


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device: the state."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """The first axis split over the devices: a batch."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def abstract(tree: Any, sharding: NamedSharding) -> Any:
    """The shapes of a tree of arrays, with a sharding: what a restore needs to know."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Sends this process's rows to its devices; returns the global batch."""
    sharding = by_rows(mesh)
    return {
        key: jax.make_array_from_process_local_data(sharding, array)
        for key, array in batch.items()
    }
