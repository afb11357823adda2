"""The program: a run's three functions, compiled for a mesh, and what they take."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped
from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.data.batch import BatchShape, batch_spec
from spanbert_jax.model.spanbert import SpanBert
from spanbert_jax.training.evaluation import evaluation_step
from spanbert_jax.training.optimizer import make_optimizer
from spanbert_jax.training.sharding import abstract, by_names, by_rows, replicated
from spanbert_jax.training.step import TrainState, init_state, train_step


class Program(NamedTuple):
    """The functions of a run, on a mesh; to be called and traced within `sharding.on`.

    The update and the look take votes, int32 [devices], one for each device, and return
    beside their result whether any of them is not 0. So all processes of a run learn at
    the same step that one of them was told to stop.

    Attributes:
        mesh: of the devices.
        model: the model.
        state: shapes, dtypes and shardings of the train state.
        batch: the same of a global batch.
        votes: the same of the votes.
        init: key -> the state before the first update, each device making its part.
        update: state (donated), batch, votes -> state, `StepMetrics`, stop.
        look: params, batch, votes, unigram, mask_id -> `Scores`, stop.
    """

    mesh: Mesh
    model: SpanBert
    state: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    votes: jax.ShapeDtypeStruct
    init: Wrapped
    update: Wrapped
    look: Wrapped


def make_program(
    config: ConfigDict, model: SpanBert, mesh: Mesh, shape: BatchShape
) -> Program:
    """Prepares the functions of a run; nothing is compiled before they are called.

    Args:
        config: all settings.
        model: the model.
        mesh: of the devices, such as `sharding.make_mesh` makes.
        shape: of the global batch.

    Returns:
        The program.
    """
    optimizer = make_optimizer(config)
    whole, rows = replicated(mesh), by_rows(mesh)
    every_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    batch = {
        key: jax.ShapeDtypeStruct(size, dtype, sharding=rows)
        for key, (size, dtype) in batch_spec(shape).items()
    }
    state = _abstract_state(model, optimizer, batch, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    update = functools.partial(
        train_step,
        model=model,
        optimizer=optimizer,
        dropout_root=jax.random.key(config.train.seed),
        weights=settings.loss_weights(config),
        accumulation=config.train.accumulation,
    )

    def voted_update(state: Any, batch: Any, votes: jax.Array) -> tuple[Any, ...]:
        return *update(state, batch), votes.any()

    def voted_look(params: Any, batch: Any, votes: jax.Array, *known: jax.Array) -> Any:
        return evaluation_step(params, batch, *known, model=model), votes.any()

    def init(key: jax.Array) -> TrainState:
        # Of all rows: a kernel that each device runs on its own takes no single one.
        # The forward pass has no effect, and the compiler drops it.
        empty = {name: jnp.zeros(x.shape, x.dtype) for name, x in batch.items()}
        return init_state(key, empty, model, optimizer)

    return Program(
        mesh=mesh,
        model=model,
        state=state,
        batch=batch,
        votes=jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=every_device),
        init=jax.jit(init, out_shardings=shardings),
        update=jax.jit(
            voted_update,
            in_shardings=(shardings, rows, every_device),
            out_shardings=(shardings, whole, whole),
            donate_argnums=0,
        ),
        look=jax.jit(
            voted_look,
            in_shardings=(shardings.params, rows, every_device, whole, whole),
            out_shardings=whole,
        ),
    )


def _row(batch: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """One row of a batch: parameters have the same shapes whatever its number."""
    return {
        key: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
        for key, x in batch.items()
    }


def _abstract_state(
    model: SpanBert,
    optimizer: optax.GradientTransformation,
    batch: dict[str, jax.ShapeDtypeStruct],
    mesh: Mesh,
) -> TrainState:
    """The shapes of the state, placed as the axis names of the parameters say."""
    key, row, whole = jax.random.key(0), _row(batch), replicated(mesh)
    boxed = jax.eval_shape(functools.partial(model.init, deterministic=True), key, row)
    placed = by_names(boxed["params"], mesh)
    init = functools.partial(init_state, model=model, optimizer=optimizer)
    state = jax.eval_shape(init, key, row)
    # Each of the optimiser's moments lies where its parameter does.
    moments = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        placed,
        transform_non_params=lambda _: whole,
    )
    return abstract(state, TrainState(whole, placed, moments))


def count_parameters(program: Program) -> int:
    """The numbers of the model, without the padding of the vocabulary."""
    geometry = program.model.geometry
    padding = geometry.padded_vocab_size - geometry.vocab_size
    total = sum(leaf.size for leaf in jax.tree.leaves(program.state.params))
    return total - padding * geometry.hidden_size


def cast_votes(program: Program, stops: bool) -> jax.Array:
    """The vote of this process, one for each of its devices."""
    shape, sharding = program.votes.shape, program.votes.sharding

    def vote(index: tuple[slice, ...]) -> np.ndarray:
        return np.full(len(range(*index[0].indices(shape[0]))), stops, np.int32)

    return jax.make_array_from_callback(shape, sharding, vote)
