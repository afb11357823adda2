"""The step: one update of the state, and one look at held-out data; pure functions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spanbert_jax.model.losses import Prediction, hits, score
from spanbert_jax.model.spanbert import Logits, SpanBert

DeviceBatch = dict[str, jax.Array]


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
        loss: mlm mean + weight * sbo mean.
        mlm: the MLM head's sums.
        sbo: the SBO head's sums, all 0 without one.
        grad_norm: global norm of the gradient, before clipping.
        tokens: real tokens, [CLS] and [SEP] among them, without padding.
    """

    loss: jax.Array
    mlm: Prediction
    sbo: Prediction
    grad_norm: jax.Array
    tokens: jax.Array


class Hits(NamedTuple):
    """Which targets of an evaluation batch each head got right, bool [R, M]."""

    mlm: jax.Array
    sbo: jax.Array


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
    params = model.init(key, batch, deterministic=True)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """The mean of a weighted sum, 0 where nothing counts: weights sum 0s and 1s."""
    return total / jnp.maximum(weight, 1)


def score_heads(logits: Logits, batch: DeviceBatch) -> tuple[Prediction, Prediction]:
    """The sums of the MLM and of the SBO head; all 0 without SBO head."""
    mlm = score(logits.mlm, batch["target_ids"], batch["target_weights"])
    if logits.sbo is None:
        return mlm, Prediction(*jnp.zeros(3))
    return mlm, score(logits.sbo, batch["target_ids"], batch["sbo_weights"])


def loss_and_gradients(
    params: Any,
    batch: DeviceBatch,
    dropout_key: jax.Array,
    model: SpanBert,
    sbo_weight: float,
    accumulation: int,
) -> tuple[jax.Array, Any, Prediction, Prediction]:
    """The objective over the whole batch, microbatch by microbatch.

    loss = sum of MLM losses / their weight + sbo_weight * the same of SBO. The weights
    are those of the global batch, so that each microbatch adds its sums and no mean of
    means arises.

    Args:
        params: of the model.
        batch: R rows, R a multiple of `accumulation`.
        dropout_key: of the step.
        model: the model.
        sbo_weight: lambda.
        accumulation: microbatches.

    Returns:
        The loss, its gradients, and each head's sums.
    """
    mlm_total = batch["target_weights"].sum()
    sbo_total = batch["sbo_weights"].sum()

    def objective(
        params: Any, numbered: tuple[jax.Array, DeviceBatch]
    ) -> tuple[jax.Array, tuple[Prediction, Prediction]]:
        number, part = numbered
        rngs = {"dropout": jax.random.fold_in(dropout_key, number)}
        logits = model.apply({"params": params}, part, deterministic=False, rngs=rngs)
        mlm, sbo = score_heads(logits, part)
        loss = mean(mlm.loss, mlm_total) + sbo_weight * mean(sbo.loss, sbo_total)
        return loss, (mlm, sbo)

    differentiate = jax.value_and_grad(objective, has_aux=True)
    parts = (jnp.arange(accumulation), _microbatches(batch, accumulation))
    first = jax.tree.map(lambda x: x[0], parts)
    if accumulation == 1:
        (loss, heads), gradients = differentiate(params, first)
        return loss, gradients, *heads

    def add(total: Any, numbered: tuple[jax.Array, DeviceBatch]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, differentiate(params, numbered)), None

    shapes = jax.eval_shape(differentiate, params, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    ((loss, heads), gradients), _ = jax.lax.scan(add, zeros, parts)
    return loss, gradients, *heads


def _microbatches(batch: DeviceBatch, parts: int) -> DeviceBatch:
    """Splits the rows into [parts, R / parts, ...].

    Every parts-th row goes into the same microbatch, so that each device finds its
    share of a microbatch among its own rows.
    """

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, batch)


def train_step(
    state: TrainState,
    batch: DeviceBatch,
    model: SpanBert,
    optimizer: optax.GradientTransformation,
    seed: int,
    sbo_weight: float,
    accumulation: int,
) -> tuple[TrainState, StepMetrics]:
    """One update.

    Args:
        state: before it.
        batch: the global batch of step `state.step`.
        model: the model.
        optimizer: the optimiser.
        seed: of dropout; the step's key is fold_in(key(seed), step).
        sbo_weight: lambda.
        accumulation: microbatches.

    Returns:
        The state after the update, and what it reports.
    """
    dropout_key = jax.random.fold_in(jax.random.key(seed), state.step)
    loss, gradients, mlm, sbo = loss_and_gradients(
        state.params, batch, dropout_key, model, sbo_weight, accumulation
    )
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = StepMetrics(
        loss=loss,
        mlm=mlm,
        sbo=sbo,
        grad_norm=optax.tree.norm(gradients),
        tokens=(batch["segment_ids"] > 0).sum(),
    )
    return TrainState(state.step + 1, params, opt_state), metrics


def evaluation_step(
    params: Any, batch: DeviceBatch, model: SpanBert
) -> tuple[Prediction, Prediction, Hits]:
    """Scores both heads on an evaluation batch, without dropout."""
    logits = model.apply({"params": params}, batch, deterministic=True)
    mlm_hits = hits(logits.mlm, batch["target_ids"])
    sbo_hits = jnp.zeros_like(mlm_hits)
    if logits.sbo is not None:
        sbo_hits = hits(logits.sbo, batch["target_ids"])
    return *score_heads(logits, batch), Hits(mlm_hits, sbo_hits)
