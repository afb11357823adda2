"""The checks of a config: what is wrong is named, with its value, before any step."""

import importlib
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

import toy
from configs import default
from spanbert_jax import settings
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.data.masking import SCHEMES
from spanbert_jax.errors import InputError, StorageError
from spanbert_jax.model.attention import ATTENTION, SPLASH_TILE
from spanbert_jax.model.encoder import REMAT
from spanbert_jax.model.heads import Sbo

CONFIGS = sorted(
    path.stem
    for path in Path(default.__file__).parent.glob("*.py")
    if path.stem != "__init__"
)


@pytest.fixture
def config() -> ConfigDict:
    return toy.make_config(Path())


def put(config: ConfigDict, name: str, value: Any) -> None:
    config.update_from_flattened_dict({name: value})


def refusal(config: ConfigDict) -> str:
    """The message of the one line that a wrong config gives."""
    with pytest.raises(InputError) as caught:
        settings.validate(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", CONFIGS)
def test_every_recipe_is_valid(name: str) -> None:
    recipe = importlib.import_module(f"configs.{name}")
    config = recipe.get_config()
    settings.validate(config)
    assert set(settings.flatten(config)) == set(settings.flatten(default.get_config()))
    assert recipe.__doc__


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_takes_no_unknown_setting(name: str) -> None:
    config = importlib.import_module(f"configs.{name}").get_config()
    with pytest.raises(AttributeError):
        config.train.step = 1
    with pytest.raises(TypeError):
        config.train.steps = "many"


AT_LEAST_1 = [
    "train.steps",
    "train.batch_size",
    "train.accumulation",
    "train.log_every",
    "data.max_span_words",
    "data.max_tries",
    "data.workers",
    "model.num_layers",
    "model.hidden_size",
    "model.num_heads",
    "model.intermediate_size",
    "model.max_positions",
    "model.type_vocab_size",
    "sbo.positions",
    "sbo.position_size",
    "sbo.depth",
    "checkpoint.every",
    "checkpoint.keep",
]
NOT_NEGATIVE = [
    "train.stop_after",
    "train.peak_flops",
    "train.seed",
    "train.eval_every",
    "data.eval_seed",
    "eval.max_blocks",
    "sbo.weight",
    "nsp.weight",
    "optimizer.warmup_steps",
    "optimizer.end_learning_rate",
    "optimizer.weight_decay",
    "optimizer.clip_norm",
    "data.tag_share",
    "data.mask_share",
    "data.random_share",
    "model.dropout",
    "model.attention_dropout",
    "optimizer.beta1",
    "optimizer.beta2",
]
ABOVE_0 = [
    "optimizer.learning_rate",
    "optimizer.epsilon",
    "data.mask_ratio",
    "data.span_p",
]
FLOATS = [
    name
    for name, value in settings.flatten(default.get_config()).items()
    if isinstance(value, float)
]
BELOW_1 = [
    "data.mask_ratio",
    "data.span_p",
    "model.dropout",
    "model.attention_dropout",
    "optimizer.beta1",
    "optimizer.beta2",
]
WRONG = [
    *((name, 0) for name in AT_LEAST_1),
    *((name, -1) for name in AT_LEAST_1),
    *((name, -1) for name in NOT_NEGATIVE),
    *((name, 0.0) for name in ABOVE_0),
    *((name, -0.1) for name in ABOVE_0),
    *((name, math.nan) for name in FLOATS),
    *((name, math.inf) for name in FLOATS),
    *((name, 1.0) for name in BELOW_1),
    ("data.tag_share", 1.1),
    ("data.mask_share", 1.1),
    ("data.random_share", 1.1),
    ("data.block_length", 2),
    ("data.masking", "spans"),
    ("data.replacement", "sentence"),
    ("data.random_tokens", "zipf"),
    ("sbo.edges", "maybe"),
    ("sbo.boundaries", "none"),
    ("sbo.boundaries", ""),
    ("model.dtype", "float16"),
    ("mesh.data", 0),
    ("mesh.data", -2),
    ("mesh.fsdp", 0),
    ("mesh.tensor", -3),
    ("model.unroll", 0),
    ("model.remat", "some"),
    ("model.attention", "flash"),
    # More than the generators of random numbers can tell apart.
    ("train.seed", 2**63),
]


def stored(config: ConfigDict, name: str) -> Any:
    return settings.flatten(config)[name]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_named_with_its_setting(
    config: ConfigDict, name: str, value: Any
) -> None:
    put(config, name, type(stored(config, name))(value))
    message = refusal(config)
    assert name in message
    assert repr(stored(config, name)) in message


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"optimizer.warmup_steps": 100, "train.steps": 50},
            ("optimizer.warmup_steps is 100", "train.steps", "50"),
        ),
        (
            {"data.block_length": 1024, "model.max_positions": 512},
            ("data.block_length is 1024", "model.max_positions", "512"),
        ),
        (
            {"train.stop_after": 21, "train.steps": 20},
            ("train.stop_after is 21", "train.steps", "20"),
        ),
        (
            {"model.hidden_size": 64, "model.num_heads": 3},
            ("model.hidden_size is 64", "model.num_heads", "3"),
        ),
        (
            {"train.batch_size": 8, "train.accumulation": 3},
            ("train.batch_size is 8", "train.accumulation", "3"),
        ),
        (
            {"data.pairs": True, "model.type_vocab_size": 1},
            ("data.pairs", "model.type_vocab_size is 1", "2"),
        ),
        (
            {"data.pairs": True, "data.block_length": 6},
            ("data.block_length is 6", "pairs need at least 7"),
        ),
        (
            {"data.mask_share": 0.75, "data.random_share": 0.5},
            ("data.mask_share", "data.random_share", "1.25"),
        ),
    ],
)
def test_settings_at_odds_are_both_named(
    config: ConfigDict, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    for name, value in changes.items():
        put(config, name, value)
    message = refusal(config)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer.warmup_steps": 20, "train.steps": 20},
        {"optimizer.warmup_steps": 0},
        {"train.steps": 1, "optimizer.warmup_steps": 1},
        {"data.block_length": 32, "model.max_positions": 32},
        {"data.pairs": True, "data.block_length": 7},
        {"data.mask_share": 1.0, "data.random_share": 0.0},
        {"sbo.weight": 0.0},
        {"nsp.weight": 0.0, "data.pairs": True},
        {"model.type_vocab_size": 1},
        {"sbo.depth": 1, "sbo.boundaries": "left", "sbo.internal": True},
        {"model.dropout": 0.0, "model.attention_dropout": 1e-6},
        {"optimizer.clip_norm": 0.0},
        {"mesh.data": -1},
        {"train.stop_after": 20},
    ],
)
def test_a_setting_at_its_limit_is_valid(
    config: ConfigDict, changes: dict[str, Any]
) -> None:
    for name, value in changes.items():
        put(config, name, value)
    settings.validate(config)


def test_shares_that_add_up_to_1_on_paper_are_valid(config: ConfigDict) -> None:
    for mask_share in (0.1, 0.3, 0.6, 0.7, 0.8, 0.9):
        config.data.mask_share = mask_share
        config.data.random_share = round(1 - mask_share, 10)
        settings.validate(config)


def test_a_setting_that_is_missing_is_named() -> None:
    config = ConfigDict({"train": {"steps": 10}})
    assert "train.batch_size is missing" in refusal(config)


def test_only_one_axis_of_the_mesh_takes_what_the_others_leave(
    config: ConfigDict,
) -> None:
    config.mesh.fsdp = -1
    with pytest.raises(InputError, match=r"mesh\.fsdp.* -1, -1, 1; only one of them"):
        settings.validate(config)
    config.mesh.data = 1
    settings.validate(config)


@pytest.mark.parametrize("kind", ["remat", "attention"])
def test_the_names_of_the_model_are_those_that_the_settings_know(
    config: ConfigDict, kind: str
) -> None:
    config.model.attention_dropout = 0.0
    config.model.dtype = "bfloat16"
    config.data.block_length = config.model.max_positions = SPLASH_TILE
    for name in {"remat": REMAT, "attention": ATTENTION}[kind]:
        put(config, f"model.{kind}", name)
        settings.validate(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"'splash', which knows no dropout, .* is 0\.1"),
        ({"model.attention_dropout": 0.0}, r"block_length is 32.* multiple of 128"),
        ({"model.attention": "cudnn"}, r"'cudnn', which knows no dropout, .* is 0\.1"),
        (
            {"model.attention": "cudnn", "model.attention_dropout": 0.0},
            r"'cudnn', but model\.dtype is 'float32'.* 'bfloat16'",
        ),
    ],
)
def test_a_kind_of_attention_says_what_it_cannot_do(
    config: ConfigDict, changes: dict[str, Any], message: str
) -> None:
    config.model.attention = "splash"
    config.update_from_flattened_dict(changes)
    with pytest.raises(InputError, match=message):
        settings.validate(config)


@pytest.mark.parametrize(
    ("written", "exact"),
    [
        (0.15, Fraction(3, 20)),
        (0.1, Fraction(1, 10)),
        (0.3, Fraction(3, 10)),
        (0.5, Fraction(1, 2)),
        (0.07, Fraction(7, 100)),
        (1e-05, Fraction(1, 100_000)),
    ],
)
def test_the_mask_ratio_is_the_number_that_was_written(
    config: ConfigDict, written: float, exact: Fraction
) -> None:
    config.data.mask_ratio = written
    assert settings.mask_ratio(config) == exact


IDENTITY = {
    "train.seed",
    "train.batch_size",
    "data.block_length",
    "data.packing",
    "data.pairs",
    "data.masking",
    "data.replacement",
    "data.mask_ratio",
    "data.span_p",
    "data.max_span_words",
    "data.max_tries",
    "data.tag_share",
    "data.weights",
    "data.weighting",
    "data.mask_share",
    "data.random_share",
    "data.random_tokens",
    "data.eval_seed",
    "model.num_layers",
    "model.hidden_size",
    "model.num_heads",
    "model.intermediate_size",
    "model.max_positions",
    "model.type_vocab_size",
    "sbo.positions",
    "sbo.position_size",
    "sbo.depth",
    "sbo.boundaries",
    "sbo.internal",
}


def test_the_identity_is_seed_batch_shapes_and_data_without_paths_and_workers(
    config: ConfigDict,
) -> None:
    values = settings.flatten(config)
    assert settings.identity(values) == {name: values[name] for name in IDENTITY}


def test_the_masking_recipe_is_that_of_the_config(config: ConfigDict) -> None:
    config.data.masking = "word"
    config.data.replacement = "token"
    config.data.mask_ratio = 0.2
    config.data.span_p = 0.3
    config.data.max_span_words = 7
    config.data.max_tries = 11
    config.data.tag_share = 0.4
    config.data.mask_share = 0.5
    config.data.random_share = 0.25
    masking = settings.masking(config)
    assert (masking.scheme, masking.replacement) == ("word", "token")
    assert masking.ratio == Fraction(1, 5)
    assert (masking.span_p, masking.max_span_words, masking.max_tries) == (0.3, 7, 11)
    assert masking.tag_share == 0.4
    assert (masking.mask_share, masking.random_share) == (0.5, 0.25)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_line_of_config_makes_the_replacement_that_of_the_scheme(
    config: ConfigDict, scheme: str
) -> None:
    config.data.masking = scheme
    settings.validate(config)
    bert = scheme in ("word", "subword")
    assert settings.masking(config).replacement == ("token" if bert else "span")
    for replacement in ("span", "word", "token"):
        config.data.replacement = replacement
        assert settings.masking(config).replacement == replacement


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_pairs_are_fed_when_asked_for(
    config: ConfigDict, toy_corpus: Corpus, toy_cache: Path, packing: bool, split: str
) -> None:
    config.data.cache = str(toy_cache)
    config.data.packing = packing
    assert not settings.feed(config, toy_corpus, split).plan.is_paired
    assert settings.feed(config, toy_corpus, split).pair_slots == 0
    config.data.pairs = True
    feed = settings.feed(config, toy_corpus, split)
    assert feed.plan.is_paired
    assert feed.pair_slots == (config.data.block_length // 16 if packing else 1)


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("one document of words\n", 1),
        ("one of words\n\na\n\nb\n", 1),
        ("a\n\nb\n", 0),
        ("one of words\n\nanother of words\n\nb\n", 2),
    ],
)
def test_pairs_without_documents_to_draw_from_are_an_error(
    config: ConfigDict, tmp_path: Path, text: str, pairs: int
) -> None:
    source = tmp_path / "text.txt"
    source.write_text(text)
    corpus = build(
        BuildOptions(
            output=tmp_path / "corpus",
            input=(str(source),),
            vocab_size=100,
            valid_fraction=0.0,
            runner=Local(1),
        )
    )
    config.data.cache = str(tmp_path)
    settings.feed(config, corpus, "train")
    config.data.pairs = True
    with pytest.raises(InputError) as caught:
        settings.feed(config, corpus, "train")
    assert str(caught.value) == (
        "data.pairs finds no document to draw second segments from: the training split"
        f" of data.corpus={corpus.directory} makes {pairs} pairs"
    )
    # Held out there may be one, or none at all.
    assert settings.feed(config, corpus, "valid").plan.num_rows <= 1


@pytest.mark.parametrize(
    ("scheme", "name", "words"),
    [
        ("entity", "entities", "entities"),
        ("noun_phrase", "noun_phrases", "noun phrases"),
    ],
)
def test_a_corpus_without_the_tags_of_the_scheme_is_an_error(
    toy_corpus: Corpus, toy_cache: Path, scheme: str, name: str, words: str
) -> None:
    config = toy.make_config(toy_cache)
    config.data.masking = scheme
    with pytest.raises(InputError) as caught:
        settings.feed(config, toy_corpus, "train")
    assert str(caught.value) == (
        f"data.masking is '{scheme}', but data.corpus={toy_corpus.directory} holds no"
        f" {words}; build it with --tags={name}"
    )


@pytest.mark.parametrize("split", ["train", "valid"])
def test_random_tokens_are_uniform_or_those_of_the_training_text(
    toy_corpus: Corpus, toy_cache: Path, split: str
) -> None:
    config = toy.make_config(toy_cache)
    ids = toy_corpus.tokenizer.replacement_ids
    bits = np.arange(2**10, dtype=np.uint64) << np.uint64(54)
    uniform = settings.feed(config, toy_corpus, split).random_tokens.draw(bits)
    config.data.random_tokens = "corpus"
    frequent = settings.feed(config, toy_corpus, split).random_tokens.draw(bits)
    for drawn, expected in (
        (uniform, np.full(len(ids), 1 / len(ids))),
        (
            frequent,
            toy_corpus.unigram_counts[ids] / toy_corpus.unigram_counts[ids].sum(),
        ),
    ):
        observed = np.array([(drawn == i).mean() for i in ids])
        # Evenly spread bits: each id's share to the last one or two draws.
        np.testing.assert_allclose(observed, expected, atol=2 / 2**10)


def test_the_model_is_that_of_the_config(config: ConfigDict) -> None:
    config.model.dropout = 0.25
    config.model.attention_dropout = 0.125
    config.model.dtype = "bfloat16"
    model = settings.model(config, 1234)
    g = model.geometry
    assert (g.vocab_size, g.num_layers, g.hidden_size, g.num_heads) == (1234, 2, 64, 2)
    assert (g.intermediate_size, g.max_positions, g.type_vocab_size) == (128, 32, 2)
    assert (g.dropout, g.attention_dropout, g.dtype) == (0.25, 0.125, "bfloat16")
    assert model.sbo is not None
    assert (model.sbo.positions, model.sbo.position_size) == (20, 200)
    assert (model.sbo.depth, model.sbo.internal) == (2, False)
    assert model.sbo.sides == ("left", "right")
    assert not model.nsp


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_form_of_sbo_is_that_of_the_config(config: ConfigDict, side: str) -> None:
    config.sbo.boundaries = side
    config.sbo.internal = True
    config.sbo.depth = 3
    config.sbo.positions = 7
    config.sbo.position_size = 50
    form = settings.model(config, 1234).sbo
    assert form == Sbo(7, 50, 3, (side,), True)


def test_the_heads_weigh_what_the_config_says(config: ConfigDict) -> None:
    config.sbo.weight, config.nsp.weight = 0.5, 0.25
    assert settings.loss_weights(config) == {"mlm": 1.0, "sbo": 0.5, "nsp": 0.25}


def test_the_cache_is_the_one_asked_for_or_the_users(
    config: ConfigDict, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config.data.cache = str(tmp_path)
    assert settings.cache_directory(config) == tmp_path
    config.data.cache = ""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert settings.cache_directory(config) == tmp_path / "xdg" / "spanbert_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.cache_directory(config) == tmp_path / ".cache" / "spanbert_jax"


def test_settings_are_written_as_json(config: ConfigDict, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    settings.write(config, path)
    assert json.loads(path.read_text()) == config.to_dict()
    with pytest.raises(StorageError, match="missing"):
        settings.write(config, tmp_path / "missing" / "config.json")
