"""Collectives: the bytes of compiled programs by arithmetic, and texts by hand."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spanbert_jax.training.collectives import Reading, Traffic, read_collectives

DEVICES = 8
# Of a device's float32 [64, 8].
LOCAL = 64 * 8 * 4


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = np.array(jax.devices()[:DEVICES]).reshape(2, 4)
    return Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def text_of(mesh: Mesh, work: Callable[[jax.Array], jax.Array], out: Any) -> str:
    """The program of what each device does to its own [64, 8]."""
    mapped = jax.shard_map(
        work,
        mesh=mesh,
        in_specs=PartitionSpec(("x", "y")),
        out_specs=out,
        check_vma=False,
    )
    array = jax.ShapeDtypeStruct((64 * DEVICES, 8), jnp.float32)
    return jax.jit(mapped).lower(array).compile().as_text()


SHARDED, WHOLE = PartitionSpec(("x", "y")), PartitionSpec()


@pytest.mark.parametrize(
    ("kind", "work", "payload", "sent"),
    [
        # A ring passes each eighth on 7 times to add it up, and 7 times to spread it.
        ("all-reduce", lambda x: lax.psum(x, ("x", "y")), LOCAL, 2 * LOCAL * 7 / 8),
        ("all-reduce", lambda x: lax.psum(x, "y"), LOCAL, 2 * LOCAL * 3 / 4),
        ("all-reduce", lambda x: lax.psum(x, "x"), LOCAL, LOCAL),
        (
            "all-gather",
            lambda x: lax.all_gather(x, ("x", "y")).sum(0),
            8 * LOCAL,
            7 * LOCAL,
        ),
        ("all-gather", lambda x: lax.all_gather(x, "y").sum(0), 4 * LOCAL, 3 * LOCAL),
        (
            "reduce-scatter",
            lambda x: lax.psum_scatter(x, "y", tiled=True),
            LOCAL,
            LOCAL * 3 / 4,
        ),
        (
            "all-to-all",
            lambda x: lax.all_to_all(x, "y", 0, 1, tiled=True),
            LOCAL,
            LOCAL * 3 / 4,
        ),
        (
            "collective-permute",
            lambda x: lax.ppermute(x, "y", [(i, (i + 1) % 4) for i in range(4)]),
            LOCAL,
            LOCAL,
        ),
    ],
)
def test_a_collective_moves_what_arithmetic_says(
    mesh: Mesh, kind: str, work: Callable, payload: float, sent: float
) -> None:
    reading = read_collectives(text_of(mesh, work, SHARDED), DEVICES)
    assert reading == Reading({kind: Traffic(1, payload, sent)}, 0)


def in_loops(x: jax.Array) -> jax.Array:
    """A reduction 7 times 3 times, a gather 7 times, and a reduction once."""

    def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(lax.psum(x, "y")), None

    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        x, _ = lax.scan(inner, x, length=3)
        return jnp.cos(lax.all_gather(x, "x").sum(0)), None

    x, _ = lax.scan(outer, x, length=7)
    return lax.psum(x, ("x", "y"))


IN_LOOPS = Reading(
    {
        "all-reduce": Traffic(
            22, 22 * LOCAL, 21 * 2 * LOCAL * 3 / 4 + 2 * LOCAL * 7 / 8
        ),
        "all-gather": Traffic(7, 7 * 2 * LOCAL, 7 * LOCAL),
    },
    0,
)


@pytest.fixture(scope="module")
def looping(mesh: Mesh) -> str:
    return text_of(mesh, in_loops, WHOLE)


def test_the_body_of_a_loop_counts_as_often_as_it_runs(looping: str) -> None:
    assert read_collectives(looping, DEVICES) == IN_LOOPS


def test_trips_follow_from_the_counter_where_the_compiler_has_not_noted_them(
    looping: str,
) -> None:
    # As a TPU's compiler writes it: no note, and no fusion of one scalar operation.
    bare = re.sub(r'"known_trip_count":\{[^}]*\},?', "", looping)
    bare = re.sub(r"fusion(\(.*?\)), .*calls=%wrapped_add_.*", r"add\1", bare)
    bare = re.sub(
        r"fusion(\(.*?\)), .*calls=%wrapped_compare_.*",
        r"compare\1, direction=LT",
        bare,
    )
    assert "known_trip_count" in looping
    assert "known_trip_count" not in bare
    assert read_collectives(bare, DEVICES) == IN_LOOPS


def test_a_loop_that_data_end_counts_once_and_is_told(mesh: Mesh) -> None:
    def work(x: jax.Array) -> jax.Array:
        return lax.while_loop(
            lambda x: x[0, 0] < 1, lambda x: lax.psum(x, ("x", "y")) + 1, x
        )

    reading = read_collectives(text_of(mesh, work, WHOLE), DEVICES)
    assert reading.unknown_loops == 1
    assert reading.traffic["all-reduce"].count == 1


def test_parameters_split_over_devices_are_gathered_layer_by_layer(mesh: Mesh) -> None:
    """What the partitioner adds: kernels of 256 x 256, forward and in the remat."""
    split = NamedSharding(mesh, PartitionSpec(None, "y", None))
    rows = NamedSharding(mesh, PartitionSpec(("x", "y")))
    whole = NamedSharding(mesh, PartitionSpec())

    @jax.checkpoint
    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ lax.with_sharding_constraint(kernel, whole)), None

    def loss(kernels: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(layer, x, kernels)[0].sum()

    kernels = jax.ShapeDtypeStruct((5, 256, 256), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=rows)
    gradient = jax.jit(jax.grad(loss), out_shardings=split)
    reading = read_collectives(gradient.lower(kernels, x).compile().as_text(), DEVICES)
    size = 256 * 256 * 4
    assert reading.traffic["all-gather"] == Traffic(10, 10 * size, 10 * size * 3 / 4)
    assert reading.unknown_loops == 0


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", 2),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=8] {'a':(2)4}", 4),
        ("{}", 8),
    ],
)
def test_every_spelling_of_groups(groups: str, size: int) -> None:
    text = f"""HloModule m
ENTRY %main (p: bf16[10]) -> bf16[10] {{
  %p = bf16[10]{{0:T(128)}} parameter(0)
  ROOT %r = bf16[10]{{0}} all-reduce(%p), replica_groups={groups}, to_apply=%add
}}
%add (a: bf16[], b: bf16[]) -> bf16[] {{
  %a = bf16[] parameter(0)
  ROOT %b = bf16[] parameter(1)
}}
"""
    sent = 2 * 20 * (size - 1) / size
    assert read_collectives(text, 8).traffic == {"all-reduce": Traffic(1, 20, sent)}


ASYNCHRONOUS = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}
%scatter (q: f32[16]) -> f32[4] {
  %q = f32[16]{0} parameter(0)
  ROOT %s = f32[4]{0} reduce-scatter(%q), replica_groups=[2,4]<=[8], dimensions={0}
}
%all-reduce-scatter.1 (q2: f32[16]) -> f32[4] {
  %q2 = f32[16]{0} parameter(0)
  %all = f32[16]{0} all-reduce(%q2), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %part = f32[4]{0} dynamic-slice(%all, %all), dynamic_slice_sizes={4}
}
ENTRY %main (p: f32[16]) -> f32[4] {
  %p = f32[16]{0:T(128)S(1)} parameter(0)
  %g = (f32[16]{0}, f32[64]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8]
  %gd = f32[64]{0} all-gather-done(%g)
  %b = ((f32[16]), f32[4], u32[]) async-start(%p), calls=%scatter
  %u = ((f32[16]), f32[4], u32[]) async-update(%b), calls=%scatter
  %d = f32[4]{0} async-done(%u), calls=%scatter
  ROOT %f = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_asynchronous_collectives_and_a_tpus_fusions_count_once() -> None:
    assert read_collectives(ASYNCHRONOUS, 8) == Reading(
        {
            "all-gather": Traffic(1, 256, 192),
            "reduce-scatter": Traffic(2, 128, 96),
        },
        0,
    )


def test_a_program_of_one_device_sends_nothing() -> None:
    text = jax.jit(jnp.sin).lower(jnp.zeros(3)).compile().as_text()
    assert read_collectives(text, 1) == Reading({}, 0)
