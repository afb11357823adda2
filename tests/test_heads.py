"""The heads against plain NumPy: what they read, and what they must not."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
import text
import toy
from spanbert_jax import settings
from spanbert_jax.data.batch import Batch, empty_batch
from spanbert_jax.model.losses import score
from spanbert_jax.model.spanbert import Logits, SpanBert

LENGTH, SLOTS = 20, 8
PADDED = 1024
Predict = Callable[[reference.Tree, np.ndarray, Batch], Logits]


def make_model(dtype: str = "float32", sbo_weight: float = 1.0) -> SpanBert:
    config = toy.make_config(Path())
    config.model.num_layers = 1
    config.model.dtype = dtype
    config.sbo.weight = sbo_weight
    return settings.model(config, text.VOCAB_SIZE)


def parameter_shapes(model: SpanBert) -> reference.Tree:
    batch = empty_batch(1, LENGTH, SLOTS)
    key = jax.random.key(0)
    return jax.eval_shape(lambda: model.init(key, batch, deterministic=True))["params"]


def make_targets() -> Batch:
    """Two rows: spans (5, 8) and (12, 12); the span (1, 3). Three empty slots a row."""
    batch = empty_batch(2, LENGTH, SLOTS)
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
    return batch


@pytest.fixture(scope="module")
def params() -> reference.Tree:
    return reference.rough_params(parameter_shapes(make_model()), seed=1)


@pytest.fixture(scope="module")
def hidden() -> np.ndarray:
    rng = np.random.default_rng(2)
    return rng.normal(size=(2, LENGTH, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def predict() -> Predict:
    model = make_model()

    @jax.jit
    def call(params: reference.Tree, hidden: jax.Array, batch: Batch) -> Logits:
        return model.apply({"params": params}, hidden, batch, method="predict")

    return call


@pytest.fixture(scope="module")
def gradients() -> Callable:
    """Of one head's loss, with respect to the parameters and the hidden states."""
    model = make_model()

    @jax.jit
    def call(
        params: reference.Tree, hidden: jax.Array, batch: Batch
    ) -> dict[str, tuple[reference.Tree, jax.Array]]:
        def loss(
            params: reference.Tree, hidden: jax.Array, head: str, weights: str
        ) -> jax.Array:
            logits = model.apply({"params": params}, hidden, batch, method="predict")
            return score(getattr(logits, head), batch["target_ids"], batch[weights])[0]

        of = jax.grad(loss, argnums=(0, 1))
        return {
            head: of(params, hidden, head, weights)
            for head, weights in (("mlm", "target_weights"), ("sbo", "sbo_weights"))
        }

    return call


@pytest.mark.parametrize("head", ["mlm", "sbo"])
def test_logits_are_those_of_plain_numpy(
    params: reference.Tree, hidden: np.ndarray, predict: Predict, head: str
) -> None:
    batch = make_targets()
    logits = np.asarray(getattr(predict(params, hidden, batch), head))
    assert logits.shape == (2, SLOTS, PADDED)
    expected = list(
        reference.target_logits(
            reference.double(params), hidden.astype(np.float64), batch, head
        )
    )
    assert len(expected) == 8
    for row, slot, values in expected:
        np.testing.assert_allclose(
            logits[row, slot, : text.VOCAB_SIZE], values, rtol=0, atol=2e-5
        )


def places_with_gradient(gradient: jax.Array) -> list[list[int]]:
    return [np.flatnonzero(row.any(axis=1)).tolist() for row in np.asarray(gradient)]


@pytest.mark.parametrize(("row", "span"), [(0, (5, 8)), (0, (12, 12)), (1, (1, 3))])
def test_sbo_reads_nothing_but_the_two_boundaries_of_a_span(
    params: reference.Tree,
    hidden: np.ndarray,
    gradients: Callable,
    row: int,
    span: tuple[int, int],
) -> None:
    batch = make_targets()
    inside = (batch["target_positions"] >= span[0]) & (
        batch["target_positions"] <= span[1]
    )
    inside[1 - row] = False
    batch["sbo_weights"] *= inside
    expected = [[], []]
    expected[row] = [span[0] - 1, span[1] + 1]
    assert places_with_gradient(gradients(params, hidden, batch)["sbo"][1]) == expected


def test_mlm_reads_nothing_but_the_targets(
    params: reference.Tree, hidden: np.ndarray, gradients: Callable
) -> None:
    gradient = gradients(params, hidden, make_targets())["mlm"][1]
    assert places_with_gradient(gradient) == [[5, 6, 7, 8, 12], [1, 2, 3]]


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
    params: reference.Tree, hidden: np.ndarray, gradients: Callable, head: str
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
    params: reference.Tree, hidden: np.ndarray, gradients: Callable, head: str
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
    gradients: Callable,
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
    model = make_model("bfloat16")
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
        "encoder/layer_0/attention", "query", "key", "value", "output", other="kernel"
    )
    | with_bias("encoder/layer_0", "attention_norm", "output_norm", other="scale")
    | with_bias("encoder/layer_0", "intermediate", "output", other="kernel")
)
MLM_NAMES = (
    with_bias("mlm_head", "dense", other="kernel")
    | with_bias("mlm_head", "norm", other="scale")
    | {"mlm_head/projection/bias"}
)


def test_the_parameters_keep_their_names() -> None:
    # Checkpoints and exports know parameters by these names.
    tree = parameter_shapes(make_model())
    sbo = names(tree) - ENCODER_NAMES - MLM_NAMES
    table = {name for name in sbo if name.endswith("embedding")}
    assert len(table) == 1
    assert sbo - table == (
        with_bias("sbo_head", "dense_1", "dense_2", other="kernel")
        | with_bias("sbo_head", "norm_1", "norm_2", other="scale")
        | {"sbo_head/projection/bias"}
    )
    assert len(names(tree)) == len(ENCODER_NAMES) + len(MLM_NAMES) + 10


def test_without_weight_there_is_no_sbo_head() -> None:
    model = make_model(sbo_weight=0.0)
    assert names(parameter_shapes(model)) == ENCODER_NAMES | MLM_NAMES
    batch = empty_batch(1, LENGTH, SLOTS)
    key = jax.random.key(0)
    logits, _ = jax.eval_shape(
        lambda: model.init_with_output(key, batch, deterministic=True)
    )
    assert logits.sbo is None


def count(tree: reference.Tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("layers", "size", "heads", "counts"),
    [
        (12, 768, 12, (107_719_680, 621_124, 1_960_676)),
        (24, 1024, 16, (332_529_664, 1_080_644, 3_389_668)),
    ],
    ids=["base", "large"],
)
def test_parameter_counts(
    layers: int, size: int, heads: int, counts: tuple[int, int, int]
) -> None:
    """Without the vocabulary's padding, V = 28,996, the SBO table 20 x 200.

    Layer: 4 (D^2 + D) + (4 D^2 + 4 D) + (4 D^2 + D) + 2 * 2 D = 12 D^2 + 13 D.
    Encoder: (V + 512 + 2) D + 2 D + layers. MLM: D^2 + D + 2 D + V.
    SBO: 20 * 200 + (2 D + 200) D + D + D^2 + D + 2 * 2 D + V.
    """
    vocabulary = 28_996
    tables = (vocabulary + 512 + 2) * size + 2 * size
    encoder = tables + layers * (12 * size**2 + 13 * size)
    mlm = size**2 + 3 * size + vocabulary
    sbo = 4_000 + (2 * size + 200) * size + size**2 + 6 * size + vocabulary
    assert (encoder, mlm, sbo) == counts
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
