"""The dry run: a config on a slice, from the command line to what is printed."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import runs
import toy
from spanbert_jax import dryrun
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.data.batch import BatchShape
from spanbert_jax.training.budget import Memory
from spanbert_jax.training.collectives import Traffic
from spanbert_jax.training.forecast import Forecast, Schedule

GIB = 2**30

FORECAST = Forecast(
    topology="v5e:8x8",
    devices=64,
    device_kind="TPU v5 lite",
    mesh={"data": 16, "fsdp": 4, "tensor": 1},
    compiled=True,
    vocab_size=28_996,
    batch=BatchShape(256, 512, 80),
    accumulation=2,
    parameters=336_999_976,
    memory=Memory(2 * GIB, 6 * GIB),
    available=16 * GIB,
    fits=True,
    remedies=(),
    flops=265_000_000_000_000,
    collectives={"all-reduce": Traffic(7, 1e9, 2e9)},
    unknown_loops=0,
    communication_seconds=0.01,
    utilization=0.4,
    schedule=Schedule(0.0526, 1.46, 2243.0),
    steps=2_400_000,
)


def shown(**changes: Any) -> str:
    return "\n".join(dryrun.describe(dataclasses.replace(FORECAST, **changes)))


def test_what_fits_says_so_with_its_figures() -> None:
    text = shown()
    for words in (
        "64 x TPU v5 lite, mesh data=16 fsdp=4 tensor=1",
        "336,999,976 parameters",
        "256 rows of 512, 2 a device in each of 2 microbatches",
        "8.00 of 16.00 GiB a device: fits (state 2.00, temporaries 6.00)",
        "265.0 TFLOP a step, 4.14 on each device",
        "all-reduce: 7 a step, 1,000.0 MB; each device sends 2,000.0 MB",
        "52.6 ms a step at 40% of the peak, 1.46 days for 2,400,000 steps",
        "2,243 chip-hours",
        "10.0 ms a step at the least",
    ):
        assert words in text
    assert "change" not in text
    assert "out of reach" not in text


def test_what_does_not_fit_says_what_to_change() -> None:
    text = shown(fits=False, remedies=("--config.a=1: x", "--config.b=2: y"))
    assert "a device: DOES NOT FIT" in text
    assert "change       --config.a=1: x\nor           --config.b=2: y" in text


def test_a_network_that_is_too_slow_is_told() -> None:
    assert "40% is out of reach" in shown(communication_seconds=0.06)


def test_what_is_not_known_is_not_shown() -> None:
    estimate = shown(compiled=False, collectives=None, communication_seconds=None)
    assert "by estimate: not compiled" in estimate
    assert "unknown: not compiled" in estimate
    assert "at the least" not in estimate
    assert "too large to compile" in shown(collectives=None)
    assert "3 loops" in shown(unknown_loops=3)
    cpu = shown(available=None, fits=None, schedule=None)
    assert "8.00 GiB a device (state" in cpu
    assert "time         unknown" in cpu


def test_json_holds_every_figure() -> None:
    record = json.loads(json.dumps(dryrun.as_json(FORECAST)))
    assert record.keys() == {field.name for field in dataclasses.fields(Forecast)}
    assert record["memory"] == {
        "state": 2 * GIB,
        "temporaries": 6 * GIB,
        "total": 8 * GIB,
    }
    assert record["batch"]["rows"] == 256
    assert record["collectives"]["all-reduce"]["sent"] == 2e9
    assert record["schedule"]["days"] == 1.46


def command(*arguments: str, config: Any = None) -> runs.Exit:
    """The dry run of the toy, or of another config, in its own process."""
    config = toy.make_config(Path()) if config is None else config
    line = runs.command(config, Path())
    line = [word for word in line if not word.startswith("--workdir")]
    line[2] = "spanbert_jax.dryrun"
    return runs.wait(runs.launch([*line, *arguments]))


def test_the_command_compiles_for_devices_that_are_not_there(
    toy_corpus: Corpus,
) -> None:
    config = toy.make_config(Path())
    config.data.corpus = str(toy_corpus.directory)
    config.mesh.fsdp = 2
    config.model.num_layers = 1
    done = command("--topology=cpu:8", "--json", config=config)
    assert (done.code, done.errors) == (0, "")
    record = json.loads(done.output)
    assert record["mesh"] == {"data": 4, "fsdp": 2, "tensor": 1}
    assert record["vocab_size"] == toy_corpus.tokenizer.vocab_size
    assert record["collectives"]["all-gather"]["sent"] > 0
    assert record["compiled"]


def test_an_estimate_needs_no_compiler_and_takes_the_vocabulary_of_a_flag() -> None:
    done = command(
        *("--topology=v5e:2x4", "--nocompile", "--vocab_size=1000", "--json"),
        "--utilization=0.5",
    )
    assert (done.code, done.errors) == (0, "")
    record = json.loads(done.output)
    assert record["vocab_size"] == 1000
    assert record["fits"]
    assert not record["compiled"]
    assert record["collectives"] is None
    seconds = record["flops"] / (8 * 197e12 * 0.5)
    assert record["schedule"]["step_seconds"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--topology=v3:8"], "--topology=v3:8: it must be"),
        (
            ["--topology=cpu:3", "--nocompile"],
            "train.batch_size is 8, not a multiple of the 3 devices",
        ),
        (["--topology=cpu:8", "--utilization=0"], "--utilization=0.0: it must be"),
        (["--topology=cpu:8", "--config.model.num_heads=3"], "model.hidden_size is 64"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], says: str) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert done.output == ""
    assert done.errors.startswith(f"error: {says}")
    assert done.errors.count("\n") == 1


NO_LIBTPU = importlib.util.find_spec("libtpu") is None
NO_CUDA = all(
    importlib.util.find_spec(f"jax_cuda{version}_plugin") is None
    for version in (12, 13)
)


@pytest.mark.skipif(not NO_LIBTPU, reason="libtpu is installed")
def test_without_the_tpus_compiler_a_sentence_says_how_to_get_it() -> None:
    done = command("--topology=v5e:2x4")
    assert done.code == 2
    assert "pip install 'jax[tpu]'" in done.errors
    assert done.errors.count("\n") == 1


@pytest.mark.skipif(not NO_CUDA, reason="jax's CUDA plugin is installed")
@pytest.mark.parametrize(("asks", "told"), [((), True), (("--nocompile",), False)])
def test_without_a_gpus_compiler_the_estimate_says_how_to_get_it(
    asks: tuple[str, ...], told: bool
) -> None:
    done = command("--topology=gpu:h100x8", *asks)
    assert (done.code, done.errors) == (0, "")
    assert "by estimate: not compiled" in done.output
    assert ("pip install 'jax[cuda12]'" in done.output) is told


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(name, marks=pytest.mark.skipif(lacks, reason="no compiler"))
        for name, lacks in (
            ("v5e:2x4", NO_LIBTPU),
            ("v4:2x2x2", NO_LIBTPU),
            ("gpu:h100x8", NO_CUDA),
        )
    ],
)
def test_a_compiler_tells_memory_and_collectives(topology: str) -> None:
    config = toy.make_config(Path())
    config.model.num_layers = 1
    config.mesh.fsdp = 4
    payloads = []
    # The same microbatch, once and twice.
    for parts in (1, 2):
        config.train.batch_size = 8 * parts
        config.train.accumulation = parts
        # A table that may be gathered once in a step must not outweigh the kernels.
        words = (f"--topology={topology}", "--vocab_size=384", "--json")
        done = command(*words, config=config)
        assert done.code == 0
        record = json.loads(done.output)
        assert record["compiled"]
        assert record["devices"] == 8
        assert record["fits"]
        assert record["unknown_loops"] == 0
        assert record["schedule"]["days"] > 0
        traffic = record["collectives"]
        reduced = sum(
            traffic[kind]["payload"]
            for kind in ("all-reduce", "reduce-scatter")
            if kind in traffic
        )
        payloads.append((traffic["all-gather"]["payload"], reduced))
    # Most of it is of microbatches, which gather the parameters and reduce the
    # gradients; the lesser part is of the step.
    for one, two in zip(*payloads, strict=True):
        assert 1.5 * one < two < 2.5 * one
