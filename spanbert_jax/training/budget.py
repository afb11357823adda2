"""The memory budget of a device: what an update takes of it, and how to take less."""

import dataclasses
from collections.abc import Iterator, Mapping

from ml_collections import ConfigDict

from spanbert_jax.data.batch import BatchShape
from spanbert_jax.model.spanbert import SpanBert
from spanbert_jax.training.chips import Chip

# What a layer keeps for its backward pass, as measured on what XLA makes for an H100
# and a v5p in 16 bits: bytes for each number of the hidden state and, with "none", each
# attention probability. Korthikanti et al. 2022 (2205.05198) count 34 and 5: XLA keeps
# some in float32; what dropout makes of the probabilities is computed again here.
_KEPT_PER_NUMBER = {"none": 50, "dots": 23, "full": 2}
_KEPT_PER_PROBABILITY = 2
# A program that takes more than this share of a device's memory does not fit: XLA's
# figure and what runs differ by buffers of the runtime.
_USABLE = 0.97
# Of a GPU's memory, what jax can be told to take: the driver and the libraries of the
# collectives and kernels need the rest.
_LARGEST_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        state: parameters and the optimiser's state, which stay from step to step.
        temporaries: gradients, activations, the batch, the code, and what else is there
            during a step.
    """

    state: int
    temporaries: int

    @property
    def total(self) -> int:
        """At the same time, during a step."""
        return self.state + self.temporaries


def estimate_memory(
    model: SpanBert,
    shape: BatchShape,
    state: int,
    accumulation: int,
    mesh: Mapping[str, int],
) -> Memory:
    """The memory of an update where no compiler is asked: within a third or so.

    Args:
        model: the model.
        shape: of the global batch.
        state: bytes of the state on a device.
        accumulation: microbatches.
        mesh: devices along each axis.

    Returns:
        Bytes on a device.
    """
    g = model.geometry
    rows = shape.rows // (mesh["data"] * mesh["fsdp"] * accumulation)
    numbers = rows * shape.block_length * g.hidden_size
    probabilities = rows * g.num_heads * shape.block_length**2
    if g.attention != "plain":
        probabilities = 0
    kernels = 4 * g.hidden_size**2 + 2 * g.hidden_size * g.intermediate_size
    all_of_one = (
        _KEPT_PER_NUMBER["none"] * numbers
        + _KEPT_PER_PROBABILITY * probabilities
        # Kernels in the dtype of the computation.
        + 2 * kernels
    )
    kept = _KEPT_PER_NUMBER[g.remat] * numbers if g.remat != "none" else all_of_one
    # Float32 logits and their gradients, of MLM and SBO.
    logits = (
        8 * (1 + (model.sbo is not None)) * rows * shape.target_slots
    ) * g.padded_vocab_size
    # Parameters are a third of the state; an accumulated gradient is another.
    gradients = state // 3 * (1 + (accumulation > 1))
    layers = g.dtype.itemsize / 2 * (kept * g.num_layers + all_of_one)
    return Memory(state, gradients + int((layers + logits) / mesh["tensor"]))


def fits(memory: Memory, available: int) -> bool:
    """Whether an update has room, with a little to spare for the runtime."""
    return memory.total <= _USABLE * available


def remedies(
    config: ConfigDict, mesh: Mapping[str, int], memory: Memory, chip: Chip
) -> Iterator[str]:
    """What to change so that an update fits, the cheapest first.

    Args:
        config: all settings.
        mesh: devices along each axis.
        memory: what the update takes.
        chip: of which each device has one.

    Yields:
        Sentences, each with a setting and a value.
    """
    if chip.share < _LARGEST_SHARE and fits(
        memory, int(chip.memory * _LARGEST_SHARE / chip.share)
    ):
        yield (
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={_LARGEST_SHARE} in the run's environment:"
            f" jax takes {chip.share:.0%} of a GPU's memory unless it is told to take"
            " more"
        )
    # With the gradients, which are as large as the parameters, a third of the state.
    lasting = memory.state + memory.state // 3
    if lasting > chip.memory / 2:
        yield from _shard(config, mesh, lasting, chip.memory)
    yield from _cut(config, mesh, memory, chip.memory)
    if config.model.remat != "full":
        yield (
            "--config.model.remat=full: only each layer's input is kept, for a third"
            " more FLOPs"
        )
    yield "a slice of more chips, or of chips with more memory"


def _shard(
    config: ConfigDict, mesh: Mapping[str, int], need: int, available: int
) -> Iterator[str]:
    """The fewest devices that make `need` small, else as many as can share it."""
    now, whole = mesh["fsdp"], mesh["data"] * mesh["fsdp"]
    sizes = [
        size
        for size in range(now + 1, whole + 1)
        if whole % size == 0 and config.model.hidden_size % size == 0
    ]
    if not sizes:
        return
    small = (size for size in sizes if need * now / size <= available / 4)
    size = next(small, sizes[-1])
    # No more than one axis may be -1.
    tensor = f" --config.mesh.tensor={mesh['tensor']}" * (config.mesh.tensor == -1)
    yield (
        f"--config.mesh.fsdp={size} --config.mesh.data=-1{tensor}: splits parameters"
        f" and optimiser over {size} devices, now {now}"
    )


def _cut(
    config: ConfigDict, mesh: Mapping[str, int], memory: Memory, available: int
) -> Iterator[str]:
    """The fewest microbatches that leave enough room."""
    gradients = memory.state // 3
    left = available * _USABLE - memory.state - 2 * gradients
    rows = config.train.batch_size // (mesh["data"] * mesh["fsdp"])
    now = config.train.accumulation
    for parts in range(now + 1, rows + 1):
        # A microbatch's part of the temporaries shrinks with it, gradients do not.
        if rows % parts == 0 and (memory.temporaries - gradients) * now / parts <= left:
            yield (
                f"--config.train.accumulation={parts}: {rows // parts} rows of a"
                f" microbatch on a device, now {rows // now}"
            )
            return
