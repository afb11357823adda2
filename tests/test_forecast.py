"""Forecasts: arithmetic by other formulas, and the way out of a full memory."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ml_collections import ConfigDict

import toy
from configs import large
from spanbert_jax import settings
from spanbert_jax.errors import InputError
from spanbert_jax.settings import MESH_AXES
from spanbert_jax.training import forecast as forecasts
from spanbert_jax.training.budget import Memory, estimate_memory, fits, remedies
from spanbert_jax.training.chips import CHIPS, Chip
from spanbert_jax.training.collectives import Traffic
from spanbert_jax.training.compilation import memory_of_refusal
from spanbert_jax.training.sharding import check_mesh, mesh_shape
from spanbert_jax.training.topology import parse_topology

GIB = 2**30


def test_the_schedule_is_work_over_rate() -> None:
    # A second at the full peak of ten v5e chips; at a quarter of it, four.
    made = forecasts.schedule(1970e12, 21_600, 10, CHIPS["v5e"], 0.25)
    assert made.step_seconds == pytest.approx(4)
    assert made.days == pytest.approx(1)
    assert made.chip_hours == pytest.approx(240)


def test_the_large_recipe_takes_six_flops_a_parameter_and_token() -> None:
    """All 12 D^2 kernels of 24 layers on all places, and what attention adds."""
    config = large.get_config()
    topology = parse_topology("cpu:8")
    made = forecasts.make_forecast(config, topology, 28_996, 0.4, compiles=False)
    tokens = 256 * 512
    layers = 6 * tokens * 24 * (12 * 1024**2 + 2 * 512 * 1024)
    assert 1 < made.flops / layers < 1.1
    assert made.parameters == 336_999_976
    # Parameters and two moments, float32, with the padding of the vocabulary.
    padded = made.parameters + (29_056 - 28_996) * 1024
    assert made.memory.state == pytest.approx(12 * padded, rel=1e-6)


def test_a_chip_sends_over_all_its_links() -> None:
    traffic = {"all-reduce": Traffic(3, 50e9, 90e9), "all-gather": Traffic(1, 8, 10e9)}
    seconds = forecasts.communication_seconds(traffic, CHIPS["v5e"])
    assert seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("total", "verdict"), [(10 * GIB, True), (15.2 * GIB, True), (15.7 * GIB, False)]
)
def test_memory_fits_with_a_little_to_spare(total: float, verdict: bool) -> None:
    memory = Memory(4 * GIB, int(total) - 4 * GIB)
    assert memory.total == int(total)
    assert fits(memory, CHIPS["v5e"].memory) is verdict


# 16 GiB to a program, all of them or of a GPU's.
CHIP = Chip("toy", (), 16 * GIB, 1e12, 1e9)
GPU = dataclasses.replace(CHIP, share=0.75)


def advice(
    config: ConfigDict, mesh: dict, state: float, temporaries: float, chip: Chip = CHIP
) -> list[str]:
    memory = Memory(int(state * GIB), int(temporaries * GIB))
    return list(remedies(config, mesh, memory, chip))


def test_too_many_activations_take_microbatches_that_divide_the_rows() -> None:
    config = large.get_config()
    mesh = {"data": 8, "fsdp": 1, "tensor": 1}
    first, *others = advice(config, mesh, 3, 49)
    parts = int(re.match(r"--config\.train\.accumulation=([0-9]+): ", first)[1])
    assert 256 % (8 * parts) == 0
    # What is no gradient shrinks by `parts`, and half as many would not do.
    assert 3 + 2 + 48 / parts <= 16 < 3 + 2 + 48 / (parts / 2)
    assert any("model.remat=full" in other for other in others)
    config.train.accumulation = parts
    settings.validate(config)


def test_too_large_a_state_is_split_over_devices_that_share_it() -> None:
    first = advice(large.get_config(), {"data": 8, "fsdp": 1, "tensor": 1}, 24, 10)[0]
    size = int(re.match(r"--config\.mesh\.fsdp=([0-9]+) ", first)[1])
    assert 8 % size == 0
    assert (24 + 8) / size <= 4


def test_a_state_that_nothing_makes_small_is_split_as_far_as_it_can_be() -> None:
    config = large.get_config()
    first = advice(config, {"data": 4, "fsdp": 1, "tensor": 1}, 24, 10)[0]
    assert first.startswith("--config.mesh.fsdp=4 --config.mesh.data=-1: ")
    # 12 devices could share it, but a third of 1,024 numbers is none.
    first = advice(config, {"data": 12, "fsdp": 1, "tensor": 1}, 24, 10)[0]
    assert first.startswith("--config.mesh.fsdp=4 --config.mesh.data=-1: ")


@pytest.mark.parametrize(
    ("chip", "temporaries", "offered"),
    [(GPU, 14, True), (GPU, 16, False), (CHIP, 14, False)],
)
def test_a_gpu_can_give_more_than_it_does(
    chip: Chip, temporaries: float, offered: bool
) -> None:
    # 16 GiB are three quarters: nine tenths are 19.2, of which 18.6 are usable.
    mesh = {"data": 8, "fsdp": 1, "tensor": 1}
    first = advice(large.get_config(), mesh, 4, temporaries, chip)[0]
    assert first.startswith("XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 ") is offered


def test_what_is_at_its_end_is_not_advised() -> None:
    config = large.get_config()
    config.model.remat = "full"
    config.train.accumulation = 32
    words = advice(config, {"data": 1, "fsdp": 8, "tensor": 1}, 24, 30)
    assert words == ["a slice of more chips, or of chips with more memory"]


SETTING = re.compile(r"--config\.([a-z_.]+)=([a-z0-9-]+)")


def change(config: ConfigDict, words: str) -> ConfigDict:
    """A config with the settings that a remedy names."""
    changed = config.copy_and_resolve_references()
    for name, value in SETTING.findall(words):
        block, field = name.split(".")
        changed[block][field] = value if name == "model.remat" else int(value)
    return changed


def checked_estimate(config: ConfigDict, state: int) -> tuple[dict, Memory]:
    """The mesh of eight devices and the memory of one, once all checks have passed.

    Args:
        config: all settings.
        state: bytes of the whole state, all of it split.
    """
    settings.validate(config)
    model = settings.model(config, 300)
    mesh = mesh_shape(config, 8)
    check_mesh(config, model.geometry, mesh)
    shape = settings.batch_shape(config)
    part = state // (mesh["fsdp"] * mesh["tensor"])
    return mesh, estimate_memory(model, shape, part, config.train.accumulation, mesh)


@pytest.mark.parametrize(
    ("mesh", "hidden_size"),
    [
        *(((-1, 1, 1), 64), ((-1, 1, 1), 68), ((-1, 1, 1), 66)),
        *(((4, 2, 1), 64), ((4, 2, 1), 66), ((1, 8, 1), 64), ((2, -1, 1), 64)),
        *(((2, 2, -1), 64), ((4, 1, -1), 66), ((-1, 1, 2), 68), ((1, -1, 2), 64)),
    ],
)
def test_every_advised_setting_is_a_valid_one_that_takes_less(
    mesh: tuple[int, int, int], hidden_size: int
) -> None:
    config = toy.make_config(Path())
    config.mesh.update(dict(zip(MESH_AXES, mesh, strict=True)))
    config.model.hidden_size = hidden_size
    config.train.batch_size = 96
    named = set()
    # From a state that hardly counts to one beside which nothing else does.
    for remat, parts, state in itertools.product(
        ("none", "dots", "full"), (1, 3), (10**6, 10**8, 10**10)
    ):
        config.model.remat, config.train.accumulation = remat, parts
        shape, before = checked_estimate(config, state)
        # From chips that lack nearly all of it to some that lack a little.
        advised = {
            words
            for share in (0.3, 0.6, 0.9, 1.02)
            for words in advise(config, shape, before, share)
            if SETTING.search(words)
        }
        for words in advised:
            _, after = checked_estimate(change(config, words), state)
            assert after.total < before.total, words
            named |= {name for name, _ in SETTING.findall(words)}
    assert {"model.remat", "train.accumulation"} <= named
    holders, now = shape["data"] * shape["fsdp"], shape["fsdp"]
    splits = [2, 4, 8] if hidden_size == 64 else [2, 4] if hidden_size == 68 else [2]
    assert ("mesh.fsdp" in named) is any(
        now < size and holders % size == 0 for size in splits
    )


def advise(
    config: ConfigDict, mesh: dict, memory: Memory, share: float
) -> Iterator[str]:
    """The remedies on a chip that has this share of what an update takes."""
    chip = dataclasses.replace(CHIP, memory=int(share * memory.total))
    return remedies(config, mesh, memory, chip)


@pytest.mark.parametrize(
    ("message", "temporaries"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM,"
            " the total memory required for HLO temporaries (60.50G) exceeds available"
            " HBM (15.75G). HLO module: jit_f.",
            60.5 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.25G of"
            " 15.75G hbm. Exceeded hbm capacity by 4.5G.",
            16.25 * GIB,
        ),
    ],
)
def test_a_refusal_says_what_is_missing(message: str, temporaries: float) -> None:
    assert memory_of_refusal(message, 4 * GIB) == Memory(4 * GIB, int(temporaries))


def test_a_refusal_that_says_nothing_is_a_bug() -> None:
    with pytest.raises(ValueError, match="no idea"):
        memory_of_refusal("no idea", 0)


def test_a_mesh_that_leaves_devices_of_the_slice_idle_is_refused() -> None:
    config = large.get_config()
    config.mesh.data = 2
    with pytest.raises(InputError) as caught:
        forecasts.make_forecast(config, parse_topology("v5e:2x4"), 300, 0.4, False)
    assert str(caught.value) == (
        "mesh.data=2 * mesh.fsdp=1 * mesh.tensor=1 is 2 devices, but --topology=v5e:2x4"
        " has 8; set one of its axes to -1"
    )


def forecast_parts(parts: int) -> forecasts.Forecast:
    """A layer on two by four devices, each with a row in each of some microbatches."""
    config = toy.make_config(Path())
    config.model.num_layers = 1
    config.train.batch_size = 8 * parts
    config.train.accumulation = parts
    config.mesh.fsdp = 4
    return forecasts.make_forecast(config, parse_topology("cpu:8"), 384, 0.4, True)


@pytest.fixture(scope="module")
def sharded() -> forecasts.Forecast:
    return forecast_parts(2)


def test_the_state_of_a_device_is_its_part(sharded: forecasts.Forecast) -> None:
    assert sharded.mesh == {"data": 2, "fsdp": 4, "tensor": 1}
    whole = 12 * sharded.parameters
    # Vectors, and the tables' axes that no axis of the mesh splits, are everywhere.
    assert whole / 4 <= sharded.memory.state < whole / 3
    assert sharded.memory.temporaries > 0


def test_what_is_split_is_gathered_and_gradients_are_reduced_in_each_microbatch(
    sharded: forecasts.Forecast,
) -> None:
    whole = 4 * sharded.parameters
    # A third of the state is parameters: a quarter of what is split, the rest whole.
    split = 4 / 3 * (whole - sharded.memory.state / 3)
    # Forward, and again backward where it was not kept; all microbatches share it.
    assert split <= sharded.collectives["all-gather"].payload < 2 * split
    one = forecast_parts(1).collectives["all-reduce"].payload
    # Every gradient, those of the table from its look-up and from both heads.
    assert whole <= one < 2 * whole
    two = sharded.collectives["all-reduce"].payload
    # All but the norms and counts of the whole step.
    assert two == pytest.approx(2 * one, rel=1e-3)
    assert sharded.unknown_loops == 0


def test_a_cpu_has_neither_verdict_nor_time(sharded: forecasts.Forecast) -> None:
    assert sharded.compiled
    assert sharded.fits is None
    assert sharded.schedule is None
    assert sharded.remedies == ()


def estimate(**changes: object) -> Memory:
    """Of the large config on eight devices."""
    changed = large.get_config()
    changed.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in changes.items()}
    )
    return forecasts.make_forecast(
        changed, parse_topology("gpu:h100x8"), 28_996, 0.4, compiles=False
    ).memory


@pytest.mark.parametrize(
    ("rows", "remat", "compiled"),
    [
        (256, "none", 29.98),
        (64, "none", 8.86),
        (64, "dots", 3.97),
        (64, "full", 2.26),
    ],
)
def test_an_estimate_is_near_what_a_compiler_takes(
    rows: int, remat: str, compiled: float
) -> None:
    """`compiled`: GiB of temporaries, by libtpu 0.0.52 for v5p:2x2x2."""
    found = estimate(train__batch_size=rows, model__remat=remat)
    assert found.state / GIB == pytest.approx(3.77, abs=0.01)
    assert found.temporaries / GIB == pytest.approx(compiled, rel=0.15)


def test_an_estimate_shrinks_with_fused_attention_and_a_split_state() -> None:
    plain = estimate()
    fused = estimate(model__attention="cudnn", model__attention_dropout=0.0)
    assert fused.temporaries < plain.temporaries
    assert estimate(mesh__fsdp=8).state < plain.state / 7
