"""The step: one update of the state; pure functions."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from spanbert_jax.model.encoder import constrain
from spanbert_jax.model.losses import Prediction, score
from spanbert_jax.model.spanbert import Logits, SpanBert
from spanbert_jax.training.checksums import checksum

DeviceBatch = dict[str, jax.Array]
Predictions = dict[str, Prediction]


class Targets(NamedTuple):
    """The keys of a batch that hold what a head is to predict, and how much it counts.

    Both arrays have the shape of the head's logits without the last axis.
    """

    ids: str
    weights: str


# By head; a model has the first and perhaps the others.
TARGETS = {
    "mlm": Targets("target_ids", "target_weights"),
    "sbo": Targets("target_ids", "sbo_weights"),
    "nsp": Targets("nsp_labels", "nsp_weights"),
}


class TrainState(NamedTuple):
    """All that a run carries from step to step.

    Attributes:
        step: updates done, int32; the dropout key and the next batch follow from it.
        params: float32.
        opt_state: the optimiser's.
    """

    step: jax.Array
    params: Any
    opt_state: Any


class StepMetrics(NamedTuple):
    """What an update reports: scalars over the global batch.

    Attributes:
        loss: the objective, see `loss_and_gradients`.
        heads: the sums of each head that the model has.
        grad_norm: global norm of the gradient, before clipping.
        tokens: real tokens, [CLS] and [SEP] among them, without padding.
        batch_checksum: uint32, of the batch as the devices saw it, whichever saw what.
    """

    loss: jax.Array
    heads: Predictions
    grad_norm: jax.Array
    tokens: jax.Array
    batch_checksum: jax.Array


def init_state(
    key: jax.Array,
    batch: DeviceBatch,
    model: SpanBert,
    optimizer: optax.GradientTransformation,
) -> TrainState:
    """The state before the first update.

    Args:
        key: of the parameters.
        batch: any batch; only its shapes are used.
        model: the model.
        optimizer: the optimiser.

    Returns:
        The state.
    """
    params = nn.unbox(model.init(key, batch, deterministic=True)["params"])
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """The mean of a weighted sum, 0 where nothing counts: weights sum 0s and 1s."""
    return total / jnp.maximum(weight, 1)


def present(logits: Logits) -> dict[str, jax.Array]:
    """The logits of the heads that the model has."""
    return {head: x for head, x in logits._asdict().items() if x is not None}


def score_heads(logits: Logits, batch: DeviceBatch) -> Predictions:
    """The sums of each head that the model has."""
    return {
        head: score(x, *(batch[key] for key in TARGETS[head]))
        for head, x in present(logits).items()
    }


def loss_and_gradients(
    params: Any,
    batch: DeviceBatch,
    dropout_key: jax.Array,
    model: SpanBert,
    weights: Mapping[str, float],
    accumulation: int,
) -> tuple[jax.Array, Any, Predictions]:
    """The objective over the whole batch, microbatch by microbatch.

    loss = the sum over the heads of weight * (sum of losses / sum of targets' weights).
    The latter are those of the global batch, so that each microbatch adds its sums and
    no mean of means arises; a head without any target adds 0.

    Args:
        params: of the model.
        batch: R rows, R a multiple of `accumulation`.
        dropout_key: of the step.
        model: the model.
        weights: of each head in the objective, at least of those the model has.
        accumulation: microbatches.

    Returns:
        The loss, its gradients, and each head's sums.
    """
    totals = {
        head: batch[key].sum() for head, (_, key) in TARGETS.items() if key in batch
    }

    def objective(
        params: Any, numbered: tuple[jax.Array, DeviceBatch]
    ) -> tuple[jax.Array, Predictions]:
        number, part = numbered
        rngs = {"dropout": jax.random.fold_in(dropout_key, number)}
        logits = model.apply({"params": params}, part, deterministic=False, rngs=rngs)
        heads = score_heads(logits, part)
        loss = sum(
            weights[head] * mean(sums.loss, totals[head])
            for head, sums in heads.items()
        )
        return loss, heads

    differentiate = jax.value_and_grad(objective, has_aux=True)
    parts = (jnp.arange(accumulation), _microbatches(batch, accumulation))
    first = jax.tree.map(lambda x: x[0], parts)
    if accumulation == 1:
        (loss, heads), gradients = differentiate(params, first)
        return loss, gradients, heads

    def add(total: Any, numbered: tuple[jax.Array, DeviceBatch]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, differentiate(params, numbered)), None

    shapes = jax.eval_shape(differentiate, params, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    ((loss, heads), gradients), _ = jax.lax.scan(add, zeros, parts)
    return loss, gradients, heads


def _microbatches(batch: DeviceBatch, parts: int) -> DeviceBatch:
    """Splits the rows into [parts, R / parts, ...].

    Every parts-th row goes into the same microbatch, so that each device finds its
    share of a microbatch among its own rows.
    """

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "rows", *(None for _ in x.shape[2:]))

    return jax.tree.map(split, batch)


def train_step(
    state: TrainState,
    batch: DeviceBatch,
    model: SpanBert,
    optimizer: optax.GradientTransformation,
    dropout_root: jax.Array,
    weights: Mapping[str, float],
    accumulation: int,
) -> tuple[TrainState, StepMetrics]:
    """One update.

    Args:
        state: before it.
        batch: the global batch of step `state.step`.
        model: the model.
        optimizer: the optimiser.
        dropout_root: the key of dropout; the step's own is fold_in(root, step).
        weights: of each head in the objective, at least of those the model has.
        accumulation: microbatches.

    Returns:
        The state after the update, and what it reports.
    """
    dropout_key = jax.random.fold_in(dropout_root, state.step)
    loss, gradients, heads = loss_and_gradients(
        state.params, batch, dropout_key, model, weights, accumulation
    )
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = StepMetrics(
        loss=loss,
        heads=heads,
        grad_norm=optax.tree.norm(gradients),
        tokens=(batch["segment_ids"] > 0).sum(),
        batch_checksum=checksum(batch),
    )
    return TrainState(state.step + 1, params, opt_state), metrics
