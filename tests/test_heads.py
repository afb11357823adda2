"""The heads against plain NumPy: what they read, and what they must not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import reference
import text
import toy
from pairs import as_pairs
from spanbert_jax import settings
from spanbert_jax.data.batch import Batch, BatchShape, empty_batch
from spanbert_jax.model.heads import add_bias
from spanbert_jax.model.losses import score
from spanbert_jax.model.spanbert import Logits, SpanBert

LENGTH, SLOTS = 20, 8
PADDED = 1024
Predict = Callable[[reference.Tree, np.ndarray, Batch], Logits]
# Of one head's loss, with respect to the parameters and to the hidden states.
Gradients = dict[str, tuple[reference.Tree, jax.Array]]
PAIRS = {"data.pairs": True}
VARIANTS = [
    {"sbo.boundaries": boundaries, "sbo.internal": internal, "sbo.depth": depth}
    for boundaries, internal, depth in (
        ("both", False, 2),
        ("both", True, 3),
        ("left", False, 1),
        ("left", True, 2),
        ("right", False, 3),
        ("right", True, 1),
    )
]
per_variant = pytest.mark.parametrize(
    "variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values()))
)


def make_model(changes: dict[str, Any]) -> SpanBert:
    """The toy of one layer, some settings changed."""
    config = toy.make_config(Path())
    config.model.num_layers = 1
    config.update_from_flattened_dict(changes)
    return settings.model(config, text.VOCAB_SIZE)


def parameter_shapes(model: SpanBert) -> reference.Tree:
    batch = as_pairs(empty_batch(BatchShape(1, LENGTH, SLOTS)))
    key = jax.random.key(0)
    tree = jax.eval_shape(lambda: model.init(key, batch, deterministic=True))
    return nn.unbox(tree["params"])


def make_targets() -> Batch:
    """Two rows: spans (5, 8) and (12, 12); the span (1, 3). Three empty slots a row.

    The first row holds a block of 10 places and one of 8, the second one of 20.
    """
    batch = empty_batch(BatchShape(2, LENGTH, SLOTS))
    batch["segment_ids"][0, :18] = np.repeat([1, 2], [10, 8])
    batch["segment_ids"][1] = 1
    for row, spans in enumerate(([(5, 8), (12, 12)], [(1, 3)])):
        slot = 0
        for begin, end in spans:
            for place in range(begin, end + 1):
                batch["target_positions"][row, slot] = place
                batch["target_ids"][row, slot] = 100 * row + 17 * place
                batch["left_positions"][row, slot] = begin - 1
                batch["right_positions"][row, slot] = end + 1
                batch["span_offsets"][row, slot] = place - begin + 1
                slot += 1
        batch["target_weights"][row, :slot] = batch["sbo_weights"][row, :slot] = 1
    return as_pairs(batch)


@pytest.fixture(scope="module")
def params() -> reference.Tree:
    return reference.rough_params(parameter_shapes(make_model(PAIRS)), seed=1)


@pytest.fixture(scope="module")
def hidden() -> np.ndarray:
    rng = np.random.default_rng(2)
    return rng.normal(size=(2, LENGTH, 64)).astype(np.float32)


def predictor(model: SpanBert) -> Predict:
    @jax.jit
    def call(params: reference.Tree, hidden: jax.Array, batch: Batch) -> Logits:
        return model.apply({"params": params}, hidden, batch, method="predict")

    return call


def differentiator(model: SpanBert, *heads: str) -> Callable[..., Gradients]:
    @jax.jit
    def call(params: reference.Tree, hidden: jax.Array, batch: Batch) -> Gradients:
        def loss(params: reference.Tree, hidden: jax.Array, head: str) -> jax.Array:
            logits = model.apply({"params": params}, hidden, batch, method="predict")
            ids, weights = reference.TARGETS[head]
            return score(getattr(logits, head), batch[ids], batch[weights]).loss

        of = jax.grad(loss, argnums=(0, 1))
        return {head: of(params, hidden, head) for head in heads}

    return call


@pytest.fixture(scope="module")
def predict() -> Predict:
    return predictor(make_model(PAIRS))


@pytest.fixture(scope="module")
def gradients() -> Callable[..., Gradients]:
    return differentiator(make_model(PAIRS), "mlm", "sbo", "nsp")


@pytest.mark.parametrize(
    ("head", "size", "count"),
    [("mlm", PADDED, 8), ("sbo", PADDED, 8), ("nsp", 2, 3)],
)
def test_logits_are_those_of_plain_numpy(
    params: reference.Tree,
    hidden: np.ndarray,
    predict: Predict,
    head: str,
    size: int,
    count: int,
) -> None:
    batch = make_targets()
    logits = np.asarray(getattr(predict(params, hidden, batch), head))
    assert logits.shape == (2, SLOTS, size)
    expected = list(
        reference.target_logits(
            reference.double(params), hidden.astype(np.float64), batch, head
        )
    )
    assert len(expected) == count
    for row, slot, values in expected:
        np.testing.assert_allclose(
            logits[row, slot, : text.VOCAB_SIZE], values, rtol=0, atol=2e-5
        )


@per_variant
def test_the_logits_of_each_variant_of_sbo_are_those_of_plain_numpy(
    hidden: np.ndarray, variant: dict[str, Any]
) -> None:
    model = make_model(variant)
    params = reference.rough_params(parameter_shapes(model), seed=3)
    batch = make_targets()
    logits = np.asarray(predictor(model)(params, hidden, batch).sbo)
    expected = reference.target_logits(
        reference.double(params),
        hidden.astype(np.float64),
        batch,
        "sbo",
        variant["sbo.boundaries"],
        variant["sbo.internal"],
    )
    for row, slot, values in expected:
        np.testing.assert_allclose(
            logits[row, slot, : text.VOCAB_SIZE], values, rtol=0, atol=2e-5
        )
    assert np.isfinite(logits).all()


def keep_only(batch: Batch, row: int, span: tuple[int, int]) -> None:
    """Takes the SBO weight from all targets but those of one span."""
    position = batch["target_positions"]
    inside = (position >= span[0]) & (position <= span[1])
    inside[1 - row] = False
    batch["sbo_weights"] *= inside


def places_with_gradient(gradient: jax.Array) -> list[list[int]]:
    return [np.flatnonzero(row.any(axis=1)).tolist() for row in np.asarray(gradient)]


@pytest.mark.parametrize(("row", "span"), [(0, (5, 8)), (0, (12, 12)), (1, (1, 3))])
def test_sbo_reads_nothing_but_the_two_boundaries_of_a_span(
    params: reference.Tree,
    hidden: np.ndarray,
    gradients: Callable[..., Gradients],
    row: int,
    span: tuple[int, int],
) -> None:
    batch = make_targets()
    keep_only(batch, row, span)
    expected = [[], []]
    expected[row] = [span[0] - 1, span[1] + 1]
    assert places_with_gradient(gradients(params, hidden, batch)["sbo"][1]) == expected


@per_variant
def test_each_variant_of_sbo_reads_its_boundaries_and_its_rows_of_the_table(
    hidden: np.ndarray, variant: dict[str, Any]
) -> None:
    model = make_model(variant)
    params = reference.rough_params(parameter_shapes(model), seed=3)
    differentiate = differentiator(model, "sbo")
    for row, span in ((0, (5, 8)), (0, (12, 12)), (1, (1, 3))):
        batch = make_targets()
        keep_only(batch, row, span)
        outer, inner = [span[0] - 1, span[1] + 1], [span[0], span[1]]
        ends = inner if variant["sbo.internal"] else outer
        places = {"both": ends, "left": ends[:1], "right": ends[1:]}
        expected = [[], []]
        expected[row] = sorted(set(places[variant["sbo.boundaries"]]))
        of_params, of_hidden = differentiate(params, hidden, batch)["sbo"]
        assert places_with_gradient(of_hidden) == expected
        table = np.asarray(of_params["sbo_head"]["position_embedding"]["embedding"])
        assert len(table) == 20
        used = np.flatnonzero(table.any(axis=1)).tolist()
        assert used == list(range(span[1] - span[0] + 1))


@per_variant
def test_the_boundaries_of_empty_slots_lie_within_the_row(
    variant: dict[str, Any],
) -> None:
    form = make_model(variant).sbo
    assert form is not None
    for batch in (make_targets(), empty_batch(BatchShape(2, LENGTH, SLOTS))):
        for places in form.boundary_places(batch):
            assert places.shape == (2, SLOTS)
            assert (places >= 0).all()
            assert (places < LENGTH).all()


def test_nsp_reads_nothing_but_the_first_place_of_the_blocks(
    params: reference.Tree, hidden: np.ndarray, gradients: Callable[..., Gradients]
) -> None:
    batch = make_targets()
    of_params, of_hidden = gradients(params, hidden, batch)["nsp"]
    assert places_with_gradient(of_hidden) == [[0, 10], [0]]
    for part in ("encoder", "mlm_head", "sbo_head"):
        assert not any(leaf.any() for leaf in jax.tree.leaves(of_params[part]))
    batch["nsp_weights"][0, 0] = 0
    of_hidden = gradients(params, hidden, batch)["nsp"][1]
    assert places_with_gradient(of_hidden) == [[10], [0]]


def test_mlm_reads_nothing_but_the_targets(
    params: reference.Tree, hidden: np.ndarray, gradients: Callable[..., Gradients]
) -> None:
    gradient = gradients(params, hidden, make_targets())["mlm"][1]
    assert places_with_gradient(gradient) == [[5, 6, 7, 8, 12], [1, 2, 3]]


def test_the_gradient_of_a_bias_is_a_sum_over_all_slots() -> None:
    rng = np.random.default_rng(6)
    x, g = rng.normal(size=(2, 3, 40, 130)).astype(np.float32)
    bias = rng.normal(size=130).astype(np.float32)
    y, pull = jax.vjp(add_bias, x, bias)
    of_x, of_bias = pull(g)
    np.testing.assert_array_equal(y, x + bias[None, None])
    np.testing.assert_array_equal(of_x, g)
    np.testing.assert_allclose(of_bias, g.sum(axis=(0, 1)), atol=2e-5)


@pytest.mark.parametrize("head", ["mlm", "sbo"])
def test_logits_use_the_input_table(
    params: reference.Tree, hidden: np.ndarray, predict: Predict, head: str
) -> None:
    table = params["encoder"]["token_embedding"]["embedding"].copy()
    table[123] = 0
    encoder = params["encoder"] | {"token_embedding": {"embedding": table}}
    batch = make_targets()
    before = np.asarray(getattr(predict(params, hidden, batch), head))
    after = getattr(predict(params | {"encoder": encoder}, hidden, batch), head)
    after = np.array(after)
    bias = params[f"{head}_head"]["projection"]["bias"][123]
    np.testing.assert_array_equal(after[..., 123], np.full((2, SLOTS), bias))
    after[..., 123] = before[..., 123]
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("head", ["mlm", "sbo"])
def test_the_heads_learn_the_input_table(
    params: reference.Tree,
    hidden: np.ndarray,
    gradients: Callable[..., Gradients],
    head: str,
) -> None:
    gradient = gradients(params, hidden, make_targets())[head][0]["encoder"]
    table = np.asarray(gradient["token_embedding"]["embedding"])
    assert table[: text.VOCAB_SIZE].any(axis=1).all()


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("head", ["mlm", "sbo"])
def test_padding_of_the_vocabulary_has_probability_0(
    params: reference.Tree,
    hidden: np.ndarray,
    predict: Predict,
    head: str,
    scale: float,
) -> None:
    logits = getattr(predict(params, hidden * np.float32(scale), make_targets()), head)
    probabilities = np.asarray(jax.nn.softmax(logits))
    assert not probabilities[..., text.VOCAB_SIZE :].any()
    np.testing.assert_allclose(probabilities.sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize("head", ["mlm", "sbo"])
def test_padding_of_the_vocabulary_has_no_gradient(
    params: reference.Tree,
    hidden: np.ndarray,
    gradients: Callable[..., Gradients],
    head: str,
) -> None:
    gradient = gradients(params, hidden, make_targets())[head][0]["encoder"]
    table = np.asarray(gradient["token_embedding"]["embedding"])
    assert len(table) == PADDED
    assert not table[text.VOCAB_SIZE :].any()


@pytest.mark.parametrize("offset", [0, 21, 500, 2**31 - 1])
def test_an_offset_beyond_the_table_is_finite_and_without_effect(
    params: reference.Tree,
    hidden: np.ndarray,
    predict: Predict,
    gradients: Callable[..., Gradients],
    offset: int,
) -> None:
    batch = make_targets()
    batch["sbo_weights"][0, 2] = 0
    other = {key: array.copy() for key, array in batch.items()}
    other["span_offsets"][0, 2] = offset
    assert np.isfinite(predict(params, hidden, other).sbo).all()
    before, after = (gradients(params, hidden, each)["sbo"] for each in (batch, other))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_bfloat16_heads_answer_in_float32_and_closely(
    params: reference.Tree, hidden: np.ndarray, predict: Predict
) -> None:
    batch = make_targets()
    exact = predict(params, hidden, batch)
    model = make_model(PAIRS | {"model.dtype": "bfloat16"})
    states = jnp.asarray(hidden, jnp.bfloat16)
    rough = jax.jit(
        lambda: model.apply({"params": params}, states, batch, method="predict")
    )()
    for ours, theirs in zip(rough, exact, strict=True):
        assert ours.dtype == jnp.float32
        error = np.asarray(ours - theirs)[..., : text.VOCAB_SIZE]
        assert 0 < np.sqrt((error**2).mean()) < 0.02


def names(tree: reference.Tree) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
    }


def with_bias(prefix: str, *layers: str, other: str) -> set[str]:
    return {f"{prefix}/{layer}/{kind}" for layer in layers for kind in (other, "bias")}


ENCODER_NAMES = (
    {f"encoder/{kind}_embedding/embedding" for kind in ("token", "position", "type")}
    | with_bias("encoder", "embedding_norm", other="scale")
    | with_bias(
        "encoder/layers/attention", "query", "key", "value", "output", other="kernel"
    )
    | with_bias("encoder/layers", "attention_norm", "output_norm", other="scale")
    | with_bias("encoder/layers", "intermediate", "output", other="kernel")
)
MLM_NAMES = (
    with_bias("mlm_head", "dense", other="kernel")
    | with_bias("mlm_head", "norm", other="scale")
    | {"mlm_head/projection/bias"}
)


NSP_NAMES = with_bias("nsp_head", "pooler", "relationship", other="kernel")


def test_the_parameters_keep_their_names() -> None:
    # Checkpoints and exports know parameters by these names.
    tree = parameter_shapes(make_model({}))
    sbo = names(tree) - ENCODER_NAMES - MLM_NAMES
    table = {name for name in sbo if name.endswith("embedding")}
    assert len(table) == 1
    assert sbo - table == (
        with_bias("sbo_head", "dense_1", "dense_2", other="kernel")
        | with_bias("sbo_head", "norm_1", "norm_2", other="scale")
        | {"sbo_head/projection/bias"}
    )
    assert len(names(tree)) == len(ENCODER_NAMES) + len(MLM_NAMES) + 10


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"sbo.weight": 0.0}, MLM_NAMES),
        ({"sbo.weight": 0.0, "data.pairs": True}, MLM_NAMES | NSP_NAMES),
        ({"sbo.weight": 0.0, "data.pairs": True, "nsp.weight": 0.0}, MLM_NAMES),
    ],
)
def test_a_head_without_weight_or_without_pairs_is_not_there(
    changes: dict[str, Any], heads: set[str]
) -> None:
    model = make_model(changes)
    assert names(parameter_shapes(model)) == ENCODER_NAMES | heads
    batch = as_pairs(empty_batch(BatchShape(1, LENGTH, SLOTS)))
    key = jax.random.key(0)
    logits, _ = jax.eval_shape(
        lambda: model.init_with_output(key, batch, deterministic=True)
    )
    assert logits.sbo is None
    assert (logits.nsp is None) == (heads == MLM_NAMES)


@per_variant
def test_a_variant_of_sbo_has_as_many_layers_and_inputs_as_it_asks_for(
    variant: dict[str, Any],
) -> None:
    head = parameter_shapes(make_model(variant))["sbo_head"]
    sides = 2 if variant["sbo.boundaries"] == "both" else 1
    widths = [sides * 64 + 200, 64, 64][: variant["sbo.depth"]]
    layers = [name for name in head if name.startswith("dense_")]
    assert sorted(layers) == [f"dense_{n + 1}" for n in range(len(widths))]
    shapes = [head[name]["kernel"].shape for name in sorted(layers)]
    assert shapes == [(width, 64) for width in widths]


def count(tree: reference.Tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("layers", "size", "heads", "counts"),
    [
        (12, 768, 12, (107_719_680, 621_124, 1_960_676, 592_130)),
        (24, 1024, 16, (332_529_664, 1_080_644, 3_389_668, 1_051_650)),
    ],
    ids=["base", "large"],
)
def test_parameter_counts(
    layers: int, size: int, heads: int, counts: tuple[int, int, int, int]
) -> None:
    """Without the vocabulary's padding, V = 28,996, the SBO table 20 x 200.

    Layer: 4 (D^2 + D) + (4 D^2 + 4 D) + (4 D^2 + D) + 2 * 2 D = 12 D^2 + 13 D.
    Encoder: (V + 512 + 2) D + 2 D + layers. MLM: D^2 + D + 2 D + V.
    SBO: 20 * 200 + (2 D + 200) D + D + D^2 + D + 2 * 2 D + V.
    NSP, in pair runs only: D^2 + D + 2 D + 2.
    """
    vocabulary = 28_996
    tables = (vocabulary + 512 + 2) * size + 2 * size
    encoder = tables + layers * (12 * size**2 + 13 * size)
    mlm = size**2 + 3 * size + vocabulary
    sbo = 4_000 + (2 * size + 200) * size + size**2 + 6 * size + vocabulary
    nsp = size**2 + 3 * size + 2
    assert (encoder, mlm, sbo, nsp) == counts
    config = toy.make_config(Path())
    config.model.num_layers = layers
    config.model.hidden_size = size
    config.model.num_heads = heads
    config.model.intermediate_size = 4 * size
    config.model.max_positions = 512
    tree = parameter_shapes(settings.model(config, vocabulary))
    padding = 60 * size  # 28,996 is 227 * 128 - 60
    assert count(tree["encoder"]) - padding == encoder
    assert count(tree["mlm_head"]) == mlm
    assert count(tree["sbo_head"]) == sbo
    assert count(tree) - padding == encoder + mlm + sbo
    config.data.pairs = True
    tree = parameter_shapes(settings.model(config, vocabulary))
    assert count(tree["nsp_head"]) == nsp
    assert count(tree) - padding == encoder + mlm + sbo + nsp
