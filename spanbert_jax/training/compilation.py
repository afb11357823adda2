"""Compilation: the update of a run, compiled for devices that need not be there."""

import math
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.stages import Compiled, Lowered

from spanbert_jax.errors import InputError
from spanbert_jax.training import sharding
from spanbert_jax.training.budget import Memory
from spanbert_jax.training.collectives import Reading, read_collectives
from spanbert_jax.training.program import Program

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"\(?([0-9.]+)([KMGT]?)\)?"
# What the compilers say of a program that is too large: of all of it, or of what it
# makes on the way.
_TOO_LARGE = {
    "total": re.compile(rf"Used {_SIZE} of"),
    "temporaries": re.compile(rf"required for HLO temporaries {_SIZE}"),
}


class Compilation(NamedTuple):
    """What the compiler made of an update.

    Attributes:
        memory: that it takes.
        reading: the collectives; None if the program is too large for the device.
    """

    memory: Memory
    reading: Reading | None


def compile_update(program: Program) -> Compilation:
    """Compiles the update of a run for the devices of its mesh.

    Returns:
        What it takes, also if that is more than there is.

    Raises:
        InputError: its attention needs a library that is not installed.
    """
    try:
        with sharding.on(program.mesh):
            lowered = program.update.lower(program.state, program.batch, program.votes)
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise InputError(
            f"model.attention is {program.model.geometry.attention!r}, but jax says:"
            f" {error} pip install nvidia-cudnn-cu12, or estimate with --nocompile"
        ) from error
    state = bytes_per_device(program.state)
    try:
        compiled, text = _compile(lowered, program.mesh.devices.flat[0].platform)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compilation(memory_of_refusal(str(error), state), None)
    used = compiled.memory_analysis()
    total = (
        used.argument_size_in_bytes
        + used.output_size_in_bytes
        - used.alias_size_in_bytes
        + used.temp_size_in_bytes
        + used.generated_code_size_in_bytes
    )
    reading = read_collectives(text, program.mesh.size)
    return Compilation(Memory(state, total - state), reading)


def _compile(lowered: Lowered, platform: str) -> tuple[Compiled, str]:
    """The program, and its text after all optimisations."""
    if platform != "tpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    # jax cannot read back every program of a TPU: its as_text() fails where collectives
    # are fused into asynchronous steps. The compiler's own dump has the same text.
    with tempfile.TemporaryDirectory() as directory:
        options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options)
        (dump,) = Path(directory).glob("*.after_optimizations.txt")
        return compiled, dump.read_text()


def bytes_per_device(tree: Any) -> int:
    """The bytes of a device's part of arrays, given their shapes and shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def memory_of_refusal(message: str, state: int) -> Memory:
    """The memory that a program would take, from the compiler's refusal.

    Args:
        message: the compiler's.
        state: bytes of the state on a device.

    Raises:
        ValueError: the message does not say.
    """
    for kind, pattern in _TOO_LARGE.items():
        if found := pattern.search(message):
            size = int(float(found[1]) * _UNITS[found[2]])
            return Memory(state, size - state if kind == "total" else size)
    raise ValueError(message)
