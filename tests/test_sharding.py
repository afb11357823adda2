"""Where arrays lie: meshes, the table of names, and what is never whole anywhere."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

import text
import toy
from spanbert_jax import settings
from spanbert_jax.data.batch import BatchShape, batch_spec
from spanbert_jax.errors import InputError
from spanbert_jax.settings import MESH_AXES
from spanbert_jax.training.program import Program, cast_votes, make_program
from spanbert_jax.training.sharding import (
    RULES,
    local_rows,
    make_mesh,
    mesh_shape,
    on,
    put_batch,
)

SHAPE = BatchShape(rows=8, block_length=32, target_slots=8)
PADDED_VOCAB = 384


def make_config(mesh: tuple[int, ...], **changes: Any) -> ConfigDict:
    config = toy.make_config(Path())
    config.mesh.update(dict(zip(MESH_AXES, mesh, strict=True)))
    config.update_from_flattened_dict(changes)
    return config


def compose(config: ConfigDict) -> Program:
    model = settings.model(config, PADDED_VOCAB)
    return make_program(config, model, make_mesh(config, model.geometry), SHAPE)


# ---- Shapes of meshes


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ((-1, 1, 1), (8, 1, 1)),
        ((1, -1, 1), (1, 8, 1)),
        ((2, -1, 2), (2, 2, 2)),
        ((2, 2, -1), (2, 2, 2)),
        ((8, 1, -1), (8, 1, 1)),
        ((2, 2, 2), (2, 2, 2)),
        # Some devices of one process may stay idle.
        ((3, 1, 2), (3, 1, 2)),
        ((1, 1, 1), (1, 1, 1)),
    ],
)
def test_minus_one_takes_what_the_other_axes_leave(
    asked: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    assert tuple(mesh_shape(make_config(asked), 8).values()) == shape


@pytest.mark.parametrize(
    ("mesh", "changes", "parts"),
    [
        ((9, 1, 1), {}, ("mesh.data=9", "is 9 devices", "there are 8")),
        ((4, 2, 2), {}, ("is 16 devices", "there are 8")),
        ((-1, 3, 1), {}, ("mesh.fsdp=3", "8 devices", "multiple of 3", "1, 2, 4, 8")),
        ((3, 1, 1), {}, ("train.batch_size is 8", "3 devices", "6 or 9")),
        (
            (2, 2, 1),
            {"train.accumulation": 4},
            ("train.batch_size is 8", "4 devices", "train.accumulation", "16"),
        ),
        ((-1, 1, 1), {"train.batch_size": 12}, ("is 12", "8 devices", "8 or 16")),
        (
            (1, 8, 1),
            {"model.hidden_size": 60, "model.num_heads": 2},
            ("mesh.fsdp is 8", "model.hidden_size, 60", "1, 2, 3, 4, 5, 6, 10"),
        ),
        ((2, 1, 4), {}, ("mesh.tensor is 4", "model.num_heads, 2", "may be 1, 2")),
        (
            (2, 1, 4),
            {"model.num_heads": 4, "model.intermediate_size": 130},
            ("mesh.tensor is 4", "model.intermediate_size, 130", "may be 1, 2"),
        ),
        (
            (1, 1, 3),
            {"model.num_heads": 3, "model.hidden_size": 66, "model.max_positions": 32}
            | {"model.intermediate_size": 129, "train.batch_size": 8},
            ("mesh.tensor is 3", "the padded vocabulary, 512", "may be 1"),
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_what_would(
    mesh: tuple[int, ...], changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    config = make_config(mesh, **changes)
    vocab_size = 400 if "model.intermediate_size" in changes else text.VOCAB_SIZE
    model = settings.model(config, vocab_size)
    with pytest.raises(InputError) as caught:
        make_mesh(config, model.geometry)
    for part in parts:
        assert part in str(caught.value)


# ---- The table


def names_of(leaf: jax.ShapeDtypeStruct) -> set[str]:
    return {axis for axis in leaf.sharding.spec if axis is not None}


def test_the_state_is_shared_as_the_table_says() -> None:
    program = compose(make_config((2, 2, 2)))
    layers = program.state.params["encoder"]["layers"]
    assert dict(RULES)["embed"] == "fsdp"
    expected = {
        ("attention", "query"): PartitionSpec(None, "fsdp", "tensor"),
        ("attention", "output"): PartitionSpec(None, "tensor", "fsdp"),
        ("intermediate",): PartitionSpec(None, "fsdp", "tensor"),
        ("output",): PartitionSpec(None, "tensor", "fsdp"),
    }
    for path, spec in expected.items():
        part = layers
        for name in path:
            part = part[name]
        assert part["kernel"].sharding.spec == spec
    table = program.state.params["encoder"]["token_embedding"]["embedding"]
    assert table.sharding.spec == PartitionSpec("tensor", "fsdp")


def test_every_matrix_is_shared_over_fsdp_and_so_are_its_moments() -> None:
    program = compose(make_config((1, 8, 1)))
    params = program.state.params
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_matrix = path[-1].key == "kernel" or (
            path[-1].key == "embedding" and path[0].key == "encoder"
        )
        assert ("fsdp" in names_of(leaf)) == is_matrix, path
    moments = [
        leaf.sharding.spec
        for leaf in jax.tree.leaves(program.state.opt_state)
        if leaf.shape
    ]
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(params)]
    assert moments == specs * 2


# ---- Never whole


def bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def local_bytes(tree: Any) -> int:
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def test_the_state_is_born_in_its_places() -> None:
    """No device ever holds more than its share: not even while it is drawn."""
    program = compose(
        make_config((1, 8, 1), **{"model.hidden_size": 256, "model.num_heads": 4})
    )
    with on(program.mesh):
        compiled = program.init.lower(jax.random.key(0)).compile()
        state = compiled(jax.random.key(0))
    jax.tree.map(
        lambda leaf, like: (
            leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
            or pytest.fail(str(leaf.sharding))
        ),
        state,
        program.state,
    )
    used = compiled.memory_analysis()
    whole, share = bytes_of(program.state), local_bytes(program.state)
    assert share < whole / 6
    held = used.output_size_in_bytes + used.temp_size_in_bytes
    assert share <= held < whole / 2


def test_the_logits_are_never_whole_on_a_device() -> None:
    """Neither forwards nor backwards: the vocabulary stays split over the tensor axis.

    8 rows of 8 slots; a device of the tensor axis sees all rows and half of the table.
    """
    program = compose(make_config((1, 1, 2)))
    with on(program.mesh):
        lowered = program.update.lower(program.state, program.batch, program.votes)
        compiled = lowered.compile({"xla_backend_optimization_level": 0})
    slots = SHAPE.rows * SHAPE.target_slots
    shapes = {
        tuple(map(int, sizes.split(",")))
        for sizes in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    }
    last = {shape[-1] for shape in shapes if math.prod(shape[:-1]) == slots}
    assert PADDED_VOCAB // 2 in last
    assert PADDED_VOCAB not in last


# ---- Rows


@pytest.mark.parametrize(
    "mesh", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 8), (2, 1, 1)]
)
def test_a_batch_arrives_as_it_was_sent(mesh: tuple[int, ...]) -> None:
    config = make_config(mesh, **{"model.num_heads": 8, "model.intermediate_size": 128})
    program = compose(config)
    rng = np.random.default_rng(0)
    batch = {
        key: rng.integers(0, 100, size).astype(dtype)
        for key, (size, dtype) in batch_spec(SHAPE).items()
    }
    placed = put_batch(batch, program.mesh, SHAPE.rows)
    sharers = mesh[0] * mesh[1]
    for key, array in placed.items():
        np.testing.assert_array_equal(np.asarray(array), batch[key])
        assert array.sharding == program.batch[key].sharding
        for shard in array.addressable_shards:
            assert len(shard.data) == SHAPE.rows // sharers
    # One process holds all rows.
    assert local_rows(program.mesh, SHAPE.rows).tolist() == list(range(SHAPE.rows))


def test_each_device_casts_the_vote_of_its_process() -> None:
    program = compose(make_config((2, 2, 2)))
    for stops in (False, True):
        votes = cast_votes(program, stops)
        assert votes.sharding == program.votes.sharding
        assert np.asarray(votes).tolist() == [int(stops)] * 8
