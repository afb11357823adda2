"""Forecasts: memory, time and cost of a run on a slice that need not be there."""

import dataclasses
from collections.abc import Mapping

import jax
from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.data.batch import BatchShape
from spanbert_jax.errors import InputError
from spanbert_jax.model.flops import step_flops
from spanbert_jax.training.budget import Memory, estimate_memory, fits, remedies
from spanbert_jax.training.chips import Chip
from spanbert_jax.training.collectives import Traffic
from spanbert_jax.training.compilation import (
    Compilation,
    bytes_per_device,
    compile_update,
)
from spanbert_jax.training.program import Program, count_parameters, make_program
from spanbert_jax.training.sharding import make_mesh
from spanbert_jax.training.topology import Topology, can_compile, make_devices


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Time and cost of a run.

    Attributes:
        step_seconds: of an update.
        days: of all updates.
        chip_hours: of all updates on all chips.
    """

    step_seconds: float
    days: float
    chip_hours: float


def schedule(
    flops: float, steps: int, chips: int, chip: Chip, utilization: float
) -> Schedule:
    """The time of a run whose chips do a share of the FLOPs that they could.

    Args:
        flops: of the model in an update, over all chips.
        steps: updates.
        chips: how many.
        chip: which.
        utilization: the share of the chip's peak, above 0 and at most 1.

    Returns:
        The time, without evaluations, checkpoints and restarts.
    """
    step = flops / (chips * chip.peak * utilization)
    return Schedule(step, step * steps / 86_400, step * steps * chips / 3_600)


def communication_seconds(traffic: Mapping[str, Traffic], chip: Chip) -> float:
    """The least time of an update's collectives: with all links of a chip busy."""
    return sum(kind.sent for kind in traffic.values()) / chip.interconnect


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What a run would take on a slice.

    Attributes:
        topology: the slice, as written.
        devices: of the slice.
        device_kind: what jax calls them.
        mesh: devices along each axis.
        compiled: whether a compiler was asked; if not, memory is an estimate.
        vocab_size: entries of the vocabulary.
        batch: sizes of the global batch.
        accumulation: microbatches.
        parameters: numbers, without the padding of the vocabulary.
        memory: bytes on a device.
        available: bytes of a device; None for a CPU.
        fits: None for a CPU.
        remedies: what to change if it does not fit.
        flops: of the model in an update, by formula, over all devices.
        collectives: of an update, by kind; None if not compiled, or too large.
        unknown_loops: see `Reading`.
        communication_seconds: see `communication_seconds`.
        utilization: assumed share of the peak.
        schedule: at that utilisation; None for a CPU.
        steps: updates of the run.
    """

    topology: str
    devices: int
    device_kind: str
    mesh: dict[str, int]
    compiled: bool
    vocab_size: int
    batch: BatchShape
    accumulation: int
    parameters: int
    memory: Memory
    available: int | None
    fits: bool | None
    remedies: tuple[str, ...]
    flops: int
    collectives: dict[str, Traffic] | None
    unknown_loops: int
    communication_seconds: float | None
    utilization: float
    schedule: Schedule | None
    steps: int


def make_forecast(
    config: ConfigDict,
    topology: Topology,
    vocab_size: int,
    utilization: float,
    compiles: bool,
) -> Forecast:
    """Compiles the update of a config for a slice, if asked to, and adds up the rest.

    Args:
        config: all settings, valid ones.
        topology: the slice.
        vocab_size: entries of the vocabulary.
        utilization: the share of a chip's peak to assume, above 0 and at most 1.
        compiles: whether to; else the memory is an estimate. A GPU's is one in any
            case where its compiler is not installed.

    Returns:
        The forecast.

    Raises:
        InputError: the mesh does not fit the slice or the batch, or a TPU's compiler is
            not installed.
    """
    compiles = compiles and can_compile(topology)
    model = settings.model(config, vocab_size)
    devices = make_devices(topology) if compiles else jax.devices("cpu")
    laid_out = model
    if not compiles:
        # CPU devices stand for those of the slice; where the state lies is the same.
        plain = dataclasses.replace(model.geometry, attention="plain")
        laid_out = model.clone(geometry=plain)
    mesh = make_mesh(config, laid_out.geometry, devices[: topology.size])
    if mesh.size != topology.size:
        asked = " * ".join(f"mesh.{axis}={size}" for axis, size in mesh.shape.items())
        raise InputError(
            f"{asked} is {mesh.size} devices, but --topology={topology.name} has"
            f" {topology.size}; set one of its axes to -1"
        )
    shape = settings.batch_shape(config)
    program = make_program(config, laid_out, mesh, shape)
    if compiles:
        compilation = compile_update(program)
    else:
        state = bytes_per_device(program.state)
        parts = config.train.accumulation
        memory = estimate_memory(model, shape, state, parts, mesh.shape)
        compilation = Compilation(memory, None)
    return _assemble(config, topology, program, compilation, compiles, utilization)


def _assemble(
    config: ConfigDict,
    topology: Topology,
    program: Program,
    compilation: Compilation,
    compiled: bool,
    utilization: float,
) -> Forecast:
    """A forecast from the compiler's, or an estimate's, figures."""
    chip, mesh = topology.chip, dict(program.mesh.shape)
    memory, reading = compilation
    size, steps = program.mesh.size, config.train.steps
    flops = step_flops(program.model, program.batch)
    has_room = None if chip is None else fits(memory, chip.memory)
    return Forecast(
        topology=topology.name,
        devices=size,
        device_kind=chip.kinds[0] if chip else "cpu",
        mesh=mesh,
        compiled=compiled,
        vocab_size=program.model.geometry.vocab_size,
        batch=settings.batch_shape(config),
        accumulation=config.train.accumulation,
        parameters=count_parameters(program),
        memory=memory,
        available=chip and chip.memory,
        fits=has_room,
        remedies=()
        if has_room is not False
        else tuple(remedies(config, mesh, memory, chip)),
        flops=flops,
        collectives=reading and reading.traffic,
        unknown_loops=reading.unknown_loops if reading else 0,
        communication_seconds=communication_seconds(reading.traffic, chip)
        if reading and chip
        else None,
        utilization=utilization,
        schedule=chip and schedule(flops, steps, size, chip, utilization),
        steps=steps,
    )
