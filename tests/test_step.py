"""One update: the same however the batch is cut, and finite whatever is in it."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

import reference
import text
import toy
from pairs import as_pairs
from spanbert_jax import settings
from spanbert_jax.data.batch import Batch, BatchShape, empty_batch, make_batch
from spanbert_jax.model.spanbert import Logits
from spanbert_jax.training.program import Program, cast_votes, make_program
from spanbert_jax.training.sharding import make_mesh, on, put_batch, replicated
from spanbert_jax.training.step import (
    Predictions,
    StepMetrics,
    TrainState,
    loss_and_gradients,
)

LENGTH, SLOTS, HEADS = 32, 8, 2
WEIGHTS = {"mlm": 1.0, "sbo": 0.5, "nsp": 0.25}
# Half the time to compile; it changes neither the sharding nor what is computed.
QUICKLY = {"xla_backend_optimization_level": 0}
Update = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


def make_config(
    mesh: Sequence[int] = (1, 1, 1),
    accumulation: int = 1,
    rows: int = 32,
    dropout: float = 0.0,
    dtype: str = "float32",
) -> ConfigDict:
    config = toy.make_config(Path())
    config.train.batch_size = rows
    config.train.accumulation = accumulation
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh
    config.model.num_layers = 2
    config.model.hidden_size = 32
    config.model.intermediate_size = 64
    config.model.num_heads = HEADS
    config.model.dropout = config.model.attention_dropout = dropout
    config.model.dtype = dtype
    config.data.pairs = True
    config.sbo.weight = WEIGHTS["sbo"]
    config.nsp.weight = WEIGHTS["nsp"]
    return config


def make_rows(packing: bool, rows: int = 32) -> Batch:
    """24 blocks of 1 to 30 tokens, so of 1 to 5 targets or more, and empty rows.

    Those of at least 3 tokens are pairs.
    """
    lengths = [30, 1, 2, 30, 3, 17, 1, 7, 30, 30, 1, 1] * 2
    feed = text.make_feed(text.random_split(3, lengths), LENGTH, packing)
    assert feed.target_slots == SLOTS
    numbers = np.arange(rows)
    numbers = np.where(numbers < feed.plan.num_rows, numbers, -1)
    assert feed.plan.num_rows < rows or not packing
    return as_pairs(make_batch(feed, numbers, np.zeros_like(numbers)))


@pytest.fixture(scope="module")
def padded() -> Batch:
    batch = make_rows(packing=False)
    counts = batch["target_weights"].sum(axis=1)
    assert counts.min() == 0
    assert counts[counts > 0].max() >= 5 * counts[counts > 0].min()
    assert 0 < batch["sbo_weights"].sum() <= batch["target_weights"].sum()
    paired = batch["nsp_weights"].sum(axis=1)
    assert 0 < paired.sum() < (counts > 0).sum()
    assert 0 < (batch["nsp_labels"] * batch["nsp_weights"]).sum() < paired.sum()
    return batch


def compose(config: ConfigDict) -> Program:
    """The program of a config for batches as `as_pairs` makes them."""
    model = settings.model(config, text.VOCAB_SIZE)
    mesh = make_mesh(config, model.geometry)
    one = as_pairs(empty_batch(BatchShape(1, LENGTH, SLOTS)))
    pair_slots = one["nsp_labels"].shape[1]
    shape = BatchShape(config.train.batch_size, LENGTH, SLOTS, pair_slots)
    return make_program(config, model, mesh, shape)


@pytest.fixture(scope="module")
def params() -> reference.Tree:
    return reference.rough_params(compose(make_config()).state.params, seed=4)


class Outcome(NamedTuple):
    """The loss of a batch, its gradients, and the sums of its heads."""

    loss: float
    gradients: reference.Tree
    sums: Predictions


def differentiate(
    config: ConfigDict, params: reference.Tree
) -> Callable[[Batch], Outcome]:
    """The objective as the loop compiles it, on the mesh of a config."""
    program = compose(config)
    shardings = jax.tree.map(lambda x: x.sharding, (program.state, program.batch))
    compiled = jax.jit(
        functools.partial(
            loss_and_gradients,
            model=program.model,
            weights=WEIGHTS,
            accumulation=config.train.accumulation,
        ),
        in_shardings=(shardings[0].params, shardings[1], replicated(program.mesh)),
        out_shardings=replicated(program.mesh),
        compiler_options=QUICKLY,
    )

    def call(batch: Batch) -> Outcome:
        with on(program.mesh):
            placed = put_batch(batch, program.mesh, config.train.batch_size)
            found = jax.device_get(compiled(params, placed, jax.random.key(0)))
        return Outcome(float(found[0]), *found[1:])

    return call


@pytest.fixture(scope="module")
def at_once(params: reference.Tree) -> Callable[[Batch], Outcome]:
    """One device, one microbatch."""
    return differentiate(make_config(), params)


@pytest.fixture(scope="module")
def expected(at_once: Callable[[Batch], Outcome], padded: Batch) -> Outcome:
    return at_once(padded)


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    whole = float(optax.tree.norm(expected.gradients))

    def check(path: tuple, ours: np.ndarray, theirs: np.ndarray) -> None:
        # A floor: the true gradient of the biases of the attention's keys is 0.
        size = max(np.linalg.norm(theirs), 1e-3 * whole)
        name = jax.tree_util.keystr(path)
        assert np.linalg.norm(ours - theirs) <= 1e-5 * size, name

    jax.tree_util.tree_map_with_path(check, found.gradients, expected.gradients)
    assert found.sums.keys() == expected.sums.keys() == WEIGHTS.keys()
    for head, ours in found.sums.items():
        theirs = expected.sums[head]
        assert ours.weight == theirs.weight
        assert ours.correct == theirs.correct
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


def test_the_loss_is_that_of_plain_numpy(
    params: reference.Tree, padded: Batch, expected: Outcome
) -> None:
    value = reference.objective(reference.double(params), padded, HEADS, WEIGHTS)
    assert expected.loss == pytest.approx(value, rel=1e-6)


def test_the_gradient_is_the_slope_of_plain_numpy(
    params: reference.Tree, padded: Batch, expected: Outcome
) -> None:
    direction = reference.rough_params(params, seed=5)
    step = 1e-5

    def along(size: float) -> float:
        moved = jax.tree.map(
            lambda p, d: p + size * d,
            reference.double(params),
            reference.double(direction),
        )
        return reference.objective(moved, padded, HEADS, WEIGHTS)

    slope = (along(step) - along(-step)) / (2 * step)
    products = jax.tree.map(
        lambda g, d: np.vdot(g.astype(np.float64), d), expected.gradients, direction
    )
    assert sum(jax.tree.leaves(products)) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize(
    ("mesh", "accumulation", "changes"),
    [
        ((8, 1, 1), 1, {}),
        ((1, 1, 1), 4, {}),
        ((2, 2, 2), 2, {"model.remat": "dots", "model.unroll": 2}),
        # Each compiles for ten seconds.
        pytest.param((1, 8, 1), 1, {}, marks=pytest.mark.slow),
        pytest.param((2, 4, 1), 1, {"model.remat": "full"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 1, {}, marks=pytest.mark.slow),
        pytest.param((8, 1, 1), 4, {}, marks=pytest.mark.slow),
    ],
)
def test_no_mesh_and_no_microbatches_change_the_loss_or_the_gradients(
    params: reference.Tree,
    padded: Batch,
    expected: Outcome,
    mesh: tuple[int, int, int],
    accumulation: int,
    changes: dict[str, Any],
) -> None:
    config = make_config(mesh, accumulation)
    config.update_from_flattened_dict(changes)
    assert_same(differentiate(config, params)(padded), expected)


def test_the_order_of_the_rows_changes_neither_loss_nor_gradients(
    at_once: Callable[[Batch], Outcome], padded: Batch, expected: Outcome
) -> None:
    order = np.random.default_rng(6).permutation(32)
    permuted = {key: array[order] for key, array in padded.items()}
    assert_same(at_once(permuted), expected)


def test_packing_changes_neither_loss_nor_gradients(
    at_once: Callable[[Batch], Outcome], padded: Batch, expected: Outcome
) -> None:
    packed = make_rows(packing=True)
    assert packed["segment_ids"].max() > 1
    assert packed["nsp_weights"].sum(axis=1).max() > 1
    rows_used = (packed["segment_ids"] > 0).any(axis=1).sum()
    assert rows_used < (padded["segment_ids"] > 0).any(axis=1).sum()
    assert_same(at_once(packed), expected)


def differentiate_stub(
    model: Any, params: jax.Array, batch: dict[str, jax.Array], accumulation: int
) -> tuple[Any, ...]:
    compiled = jax.jit(
        functools.partial(
            loss_and_gradients,
            model=model,
            weights={"mlm": 1.0},
            accumulation=accumulation,
        ),
        compiler_options=QUICKLY,
    )
    return compiled(params, batch, jax.random.key(0))


class FixedLosses:
    """A model whose MLM losses are the batch's "losses" times its one parameter."""

    def apply(self, variables: dict, batch: dict, **_: object) -> Logits:
        losses = batch["losses"] * variables["params"]
        logits = jnp.stack([-losses, jnp.log1p(-jnp.exp(-losses))], -1)
        return Logits(logits, None, None)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_is_no_mean_of_means(accumulation: int) -> None:
    # One target of loss 10, four of 2.5: their mean is 4, the rows' mean 6.25.
    batch = {
        "losses": jnp.array([[10.0, 1, 1, 1], [2.5, 2.5, 2.5, 2.5]]),
        "target_ids": jnp.zeros((2, 4), jnp.int32),
        "target_weights": jnp.array([[1.0, 0, 0, 0], [1, 1, 1, 1]]),
        "sbo_weights": jnp.ones((2, 4)),
    }
    loss, gradient, heads = differentiate_stub(
        FixedLosses(), jnp.ones(()), batch, accumulation
    )
    assert float(loss) == pytest.approx(4.0, rel=1e-5)
    assert float(gradient) == pytest.approx(4.0, rel=1e-5)
    assert heads.keys() == {"mlm"}
    sums = heads["mlm"]
    assert (float(sums.loss), float(sums.weight)) == (pytest.approx(20, rel=1e-5), 5)


def compile_update(config: ConfigDict) -> Update:
    """The update as the loop calls it, to and from the host."""
    program = compose(config)
    shardings = jax.tree.map(lambda x: x.sharding, program.state)
    with on(program.mesh):
        lowered = program.update.lower(program.state, program.batch, program.votes)
        compiled = lowered.compile(QUICKLY)

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        placed = put_batch(batch, program.mesh, config.train.batch_size)
        state = jax.device_put(state, shardings)
        new, metrics, stops = compiled(state, placed, cast_votes(program, False))
        assert not stops
        return jax.device_get((new, metrics))

    return update


def update_config(
    mesh: Sequence[int], accumulation: int = 1, dtype: str = "float32"
) -> ConfigDict:
    config = make_config(mesh, accumulation, 8, dropout=0.1, dtype=dtype)
    config.optimizer.warmup_steps = 5
    return config


@pytest.fixture(scope="module")
def updates() -> dict[str, Update]:
    """Updates on 8 devices with dropout, by dtype of the computation."""
    return {
        dtype: compile_update(update_config((8, 1, 1), dtype=dtype))
        for dtype in ("float32", "bfloat16")
    }


@pytest.fixture(scope="module")
def state() -> TrainState:
    program = compose(update_config((1, 1, 1)))
    init = program.init.lower(jax.random.key(0)).compile(QUICKLY)
    return jax.device_get(init(jax.random.key(0)))


@pytest.fixture
def eight() -> Batch:
    """Eight rows, each with targets: one per device."""
    return make_rows(packing=False, rows=8)


def test_the_first_parameters_are_those_of_bert(state: TrainState) -> None:
    def check(path: tuple, leaf: np.ndarray) -> None:
        assert leaf.dtype == np.float32
        kind = path[-1].key
        if kind in ("bias", "scale"):
            assert (leaf == (kind == "scale")).all()
        else:
            bound = 5 / np.sqrt(leaf.size)
            assert abs(leaf.mean()) < 0.02 * bound
            assert abs(leaf.std() / 0.02 - 1) < bound

    jax.tree_util.tree_map_with_path(check, state.params)
    assert state.step == 0
    assert state.step.dtype == np.int32


def drop_targets(batch: Batch) -> None:
    for key in ("target_weights", "sbo_weights"):
        batch[key][:] = 0


def drop_sbo(batch: Batch) -> None:
    batch["sbo_weights"][:] = 0


def drop_nsp(batch: Batch) -> None:
    for key in ("nsp_positions", "nsp_labels", "nsp_weights"):
        batch[key][:] = 0


def empty_one_row(batch: Batch) -> None:
    for array in batch.values():
        array[3] = 0


def empty_all_rows_but_one(batch: Batch) -> None:
    for array in batch.values():
        array[1:] = 0


def empty_all_rows(batch: Batch) -> None:
    for array in batch.values():
        array[:] = 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "spoil",
    [
        drop_targets,
        drop_sbo,
        drop_nsp,
        empty_one_row,
        empty_all_rows_but_one,
        empty_all_rows,
    ],
)
def test_an_empty_part_adds_nothing_and_breaks_nothing(
    updates: dict[str, Update],
    state: TrainState,
    eight: Batch,
    spoil: Callable[[Batch], None],
    dtype: str,
) -> None:
    """One row a device. A finite gradient norm means that every gradient is finite."""
    spoil(eight)
    new, metrics = updates[dtype](state, eight)
    for leaf in jax.tree.leaves((new, metrics)):
        assert np.isfinite(leaf).all()
    loss = 0.0
    for head, factor in WEIGHTS.items():
        sums = metrics.heads[head]
        _, weights = reference.TARGETS[head]
        assert sums.weight == eight[weights].sum()
        assert (sums.loss > 0) == (sums.weight > 0)
        loss += factor * sums.loss / max(sums.weight, 1)
    assert metrics.loss == pytest.approx(loss, rel=1e-6)
    assert (metrics.grad_norm > 0) == (metrics.loss > 0)
    assert metrics.tokens == (eight["segment_ids"] > 0).sum()


def same(a: Any, b: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_the_dropout_of_a_step_is_its_own_and_repeatable(
    updates: dict[str, Update], state: TrainState, eight: Batch
) -> None:
    update = updates["float32"]
    first, again = update(state, eight), update(state, eight)
    assert same(first, again)
    later = state._replace(step=np.int32(1))
    _, metrics = update(later, eight)
    # Same parameters, same batch: only the mask differs.
    assert metrics.loss != first[1].loss
    assert metrics.loss == pytest.approx(first[1].loss, rel=0.05)


def run_five(
    update: Update, state: TrainState, batch: Batch
) -> tuple[TrainState, list[StepMetrics]]:
    reports = []
    for _ in range(5):
        state, metrics = update(state, batch)
        reports.append(metrics)
    return state, reports


@pytest.fixture(scope="module")
def five_on_one(state: TrainState) -> tuple[TrainState, list[StepMetrics]]:
    batch = make_rows(packing=False, rows=8)
    return run_five(compile_update(update_config((1, 1, 1))), state, batch)


@pytest.mark.parametrize(
    "mesh",
    [
        (8, 1, 1),
        (2, 2, 2),
        pytest.param((1, 8, 1), marks=pytest.mark.slow),
        pytest.param((2, 4, 1), marks=pytest.mark.slow),
    ],
)
def test_five_updates_on_any_mesh_are_those_on_one_device(
    updates: dict[str, Update],
    state: TrainState,
    eight: Batch,
    five_on_one: tuple[TrainState, list[StepMetrics]],
    mesh: tuple[int, int, int],
) -> None:
    """With dropout, whose bits depend on no mesh either."""
    by_data = mesh == (8, 1, 1)
    many = updates["float32"] if by_data else compile_update(update_config(mesh))
    theirs, expected = five_on_one
    ours, reports = run_five(many, state, eight)
    for found, wanted in zip(reports, expected, strict=True):
        assert found.loss == pytest.approx(wanted.loss, abs=5e-6)
        assert found.batch_checksum == wanted.batch_checksum
    assert ours.step == theirs.step == 5
    # They do move: the comparison is one of five different states.
    assert reports[-1].loss < reports[0].loss - 0.1
    for a, b in zip(
        jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_what_is_computed_again_drops_the_same(
    updates: dict[str, Update], state: TrainState, eight: Batch
) -> None:
    config = update_config((1, 1, 1))
    config.model.remat = "full"
    ours, metrics = compile_update(config)(state, eight)
    theirs, expected = updates["float32"](state, eight)
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-6)
    assert metrics.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    # The momentum after one update is a tenth of the clipped gradient.
    for a, b in zip(
        jax.tree.leaves(ours.opt_state), jax.tree.leaves(theirs.opt_state), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_accumulation_makes_one_update_with_dropout_on(
    updates: dict[str, Update], state: TrainState, eight: Batch
) -> None:
    config = update_config((1, 1, 1), accumulation=4)
    new, metrics = compile_update(config)(state, eight)
    assert new.step == 1
    counts = [
        leaf
        for leaf in jax.tree.leaves(new.opt_state)
        if np.issubdtype(leaf.dtype, np.integer)
    ]
    assert counts
    assert all(count == 1 for count in counts)
    # The first of 5 updates of warm-up; AdamW's first step is at most its rate.
    rate = config.optimizer.learning_rate / 5
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), new.params, state.params)
    assert max(jax.tree.leaves(moved)) == pytest.approx(rate, rel=0.05)
    _, whole = updates["float32"](state, eight)
    for head, sums in metrics.heads.items():
        assert sums.weight == whole.heads[head].weight > 0
    assert metrics.tokens == whole.tokens
    assert metrics.loss == pytest.approx(whole.loss, rel=0.05)
    assert metrics.grad_norm == pytest.approx(whole.grad_norm, rel=0.3)


class DrawnLosses:
    """A model that draws one number per call, the loss of each row's one target."""

    def apply(self, variables: dict, batch: dict, rngs: dict, **_: object) -> Logits:
        drawn = jax.random.uniform(rngs["dropout"], minval=1, maxval=2)
        losses = drawn * variables["params"][batch["row"]]
        logits = jnp.stack([-losses, jnp.log1p(-jnp.exp(-losses))], -1)
        return Logits(logits, None, None)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_each_microbatch_draws_a_mask_of_its_own(accumulation: int) -> None:
    batch = {
        "row": jnp.arange(4)[:, None],
        "target_ids": jnp.zeros((4, 1), jnp.int32),
        "target_weights": jnp.ones((4, 1)),
    }
    _, gradient, *_ = differentiate_stub(
        DrawnLosses(), jnp.ones(4), batch, accumulation
    )
    drawn = np.round(4 * np.asarray(gradient), 4)
    assert len(set(drawn.tolist())) == accumulation
