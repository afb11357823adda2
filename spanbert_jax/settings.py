"""Settings: the checks of a config, and the objects that it describes."""

import json
import os
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from configs import default
from spanbert_jax.corpus import mixture, store
from spanbert_jax.corpus.build import embedded_corpus
from spanbert_jax.corpus.mixture import Mixture
from spanbert_jax.corpus.store import Corpus, Split
from spanbert_jax.data.batch import BatchShape, Feed, SpecialIds
from spanbert_jax.data.blocks import target_slots
from spanbert_jax.data.counter import derive_seed
from spanbert_jax.data.masking import SCHEMES, Masking, RandomTokens
from spanbert_jax.data.mixing import Mix, places_by_epochs, places_by_share
from spanbert_jax.data.plan import PlanSettings, load_plan
from spanbert_jax.errors import InputError, StorageError

if TYPE_CHECKING:
    from spanbert_jax.model.spanbert import SpanBert

EMBEDDED = "embedded"
# A tenth of 79 documents is the least that gives a steady held-out loss; 4,096 entries
# are what half a megabyte of text can teach.
_EMBEDDED_VALID_FRACTION = 0.1
_EMBEDDED_VOCAB_SIZE = 4096

# A pair of segments of two tokens each, the least that can be cut at all.
_SHORTEST_PAIR = 7

# What may change between two starts of a run though it lies in the data block.
_NOT_IDENTITY = {"data.workers", "data.corpus", "data.cache"}
_IDENTITY = {
    "train.seed",
    "train.batch_size",
    # What decides the shapes of the parameters, and the heads, which divide a kernel
    # without a trace in its shape.
    "model.num_layers",
    "model.hidden_size",
    "model.num_heads",
    "model.intermediate_size",
    "model.max_positions",
    "model.type_vocab_size",
    "sbo.positions",
    "sbo.position_size",
    "sbo.depth",
    # What the head reads leaves no trace in its shape.
    "sbo.boundaries",
    "sbo.internal",
}

# What the devices are laid out along. data: the rows of a batch are split over it.
# fsdp: rows too, and the parameters and the optimiser's state along the hidden axis,
# brought together where they are used. tensor: heads, feed-forward layer, vocabulary.
MESH_AXES = ("data", "fsdp", "tensor")

Rule = tuple[tuple[str, ...], str, Callable[[Any], bool]]

_RULES: list[Rule] = [
    (
        (
            "train.steps",
            "train.batch_size",
            "train.accumulation",
            "train.log_every",
            "data.workers",
            "model.num_layers",
            "model.hidden_size",
            "model.num_heads",
            "model.intermediate_size",
            "model.max_positions",
            "model.type_vocab_size",
            "model.unroll",
            "sbo.positions",
            "sbo.position_size",
            "sbo.depth",
            "checkpoint.every",
            "checkpoint.keep",
        ),
        "at least 1",
        lambda value: value >= 1,
    ),
    (
        (
            "train.stop_after",
            "train.eval_every",
            "eval.max_blocks",
            "optimizer.warmup_steps",
        ),
        "0 or more",
        lambda value: value >= 0,
    ),
    (
        (
            "train.peak_flops",
            "sbo.weight",
            "nsp.weight",
            "optimizer.end_learning_rate",
            "optimizer.weight_decay",
            "optimizer.clip_norm",
        ),
        "a finite number, 0 or more",
        lambda value: 0 <= value < float("inf"),
    ),
    (
        ("train.seed", "data.eval_seed"),
        "from 0 to 2**32 - 1, what jax keeps of a seed",
        lambda value: 0 <= value < 2**32,
    ),
    (
        ("optimizer.learning_rate", "optimizer.epsilon"),
        "a finite number above 0",
        lambda value: 0 < value < float("inf"),
    ),
    (
        ("data.mask_ratio", "data.span_p"),
        "at least 0.0001 and below 1",
        lambda value: 1e-4 <= value < 1,
    ),
    (
        (
            "init_max_new",
            "data.tag_share",
            "data.mask_share",
            "data.random_share",
        ),
        "from 0 to 1",
        lambda value: 0 <= value <= 1,
    ),
    (
        (
            "model.dropout",
            "model.attention_dropout",
            "optimizer.beta1",
            "optimizer.beta2",
        ),
        "from 0 up to, but not including, 1",
        lambda value: 0 <= value < 1,
    ),
    (
        ("mesh.data", "mesh.fsdp", "mesh.tensor"),
        "at least 1, or -1 for as many devices as the others leave",
        lambda value: value >= 1 or value == -1,
    ),
    (("data.masking",), f"one of {', '.join(SCHEMES)}", SCHEMES.__contains__),
    (
        ("data.replacement",),
        "one of scheme, span, word, token",
        ("scheme", "span", "word", "token").__contains__,
    ),
    (
        ("data.random_tokens",),
        "one of uniform, corpus",
        ("uniform", "corpus").__contains__,
    ),
    (
        ("data.weighting",),
        "one of epochs, shares",
        ("epochs", "shares").__contains__,
    ),
    (
        ("model.attention",),
        "one of plain, cudnn, splash",
        ("plain", "cudnn", "splash").__contains__,
    ),
    (
        ("model.remat",),
        "one of none, full, dots",
        ("none", "full", "dots").__contains__,
    ),
    (("sbo.edges",), "one of use, skip", ("use", "skip").__contains__),
    (
        ("sbo.boundaries",),
        "one of both, left, right",
        ("both", "left", "right").__contains__,
    ),
    (
        ("model.dtype",),
        "one of float32, bfloat16",
        ("float32", "bfloat16").__contains__,
    ),
    (
        ("data.max_span_words", "data.max_tries"),
        "from 1 to 1,000",
        lambda value: 1 <= value <= 1000,
    ),
    (
        ("data.block_length",),
        "from 3 to 65,536",
        lambda value: 3 <= value <= 2**16,
    ),
]


def flatten(config: ConfigDict) -> dict[str, Any]:
    """The settings by their dotted names; those in no block come first."""
    values = {name: value for name, value in config.items() if not _is_block(value)}
    for block, settings in config.items():
        if _is_block(settings):
            values |= {f"{block}.{name}": value for name, value in settings.items()}
    return values


def _is_block(value: Any) -> bool:
    return isinstance(value, ConfigDict)


def restored(values: Mapping[str, Any]) -> ConfigDict:
    """The config of a run from what `flatten` made of it.

    Settings that came later have their defaults; those that are no more are left out.
    """
    config = default.get_config()
    known = flatten(config).keys() & values.keys()
    config.update_from_flattened_dict({name: values[name] for name in known})
    return config


def validate(config: ConfigDict) -> None:
    """Checks all that a config alone can get wrong.

    Raises:
        InputError: names the setting, its value and what it should be.
    """
    values = flatten(config)
    for names, requirement, holds in _RULES:
        for name in names:
            if name not in values:
                raise InputError(
                    f"{name} is missing: a config derives from configs/default.py"
                )
            if not holds(values[name]):
                raise InputError(
                    f"{name} is {values[name]!r}; it must be {requirement}"
                )
    sizes = [values[f"mesh.{axis}"] for axis in MESH_AXES]
    if sizes.count(-1) > 1:
        raise InputError(
            "mesh.data, mesh.fsdp and mesh.tensor are"
            f" {', '.join(map(str, sizes))}; only one of them may be -1"
        )
    _check_attention(values)
    _not_above(values, "data.block_length", "model.max_positions")
    _not_above(values, "optimizer.warmup_steps", "train.steps")
    _not_above(values, "train.stop_after", "train.steps")
    _divides(values, "train.accumulation", "train.batch_size")
    _divides(values, "model.num_heads", "model.hidden_size")
    if values["data.pairs"] and values["model.type_vocab_size"] < 2:
        raise InputError(
            f"model.type_vocab_size is {values['model.type_vocab_size']}; with"
            " data.pairs=True it must be at least 2, one type for each segment"
        )
    if values["data.pairs"] and values["data.block_length"] < _SHORTEST_PAIR:
        raise InputError(
            f"data.block_length is {values['data.block_length']}; pairs need at least"
            f" {_SHORTEST_PAIR}"
        )
    shares = values["data.mask_share"] + values["data.random_share"]
    if shares > 1:
        raise InputError(
            f"data.mask_share + data.random_share is {shares}; they must add up to at"
            " most 1"
        )


def _check_attention(values: dict[str, Any]) -> None:
    """Checks what the fused kinds of attention ask for."""
    kind = values["model.attention"]
    if kind != "plain" and values["model.attention_dropout"]:
        raise InputError(
            f"model.attention is {kind!r}, which knows no dropout, but"
            f" model.attention_dropout is {values['model.attention_dropout']}; set it"
            " to 0, or model.attention to 'plain'"
        )
    if kind == "cudnn" and values["model.dtype"] != "bfloat16":
        raise InputError(
            f"model.attention is 'cudnn', but model.dtype is {values['model.dtype']!r};"
            " it must be 'bfloat16'"
        )
    # The lanes of a TPU; see `model.attention.SPLASH_TILE`.
    if kind == "splash" and values["data.block_length"] % 128:
        raise InputError(
            f"model.attention is 'splash', but data.block_length is"
            f" {values['data.block_length']}; it must be a multiple of 128"
        )


def _not_above(values: dict[str, Any], small: str, large: str) -> None:
    if values[small] > values[large]:
        raise InputError(
            f"{small} is {values[small]}, more than {large}, which is {values[large]}"
        )


def _divides(values: dict[str, Any], divisor: str, number: str) -> None:
    if values[number] % values[divisor]:
        raise InputError(
            f"{number} is {values[number]}, not a multiple of {divisor}, which is"
            f" {values[divisor]}"
        )


def mask_ratio(config: ConfigDict) -> Fraction:
    """The masking ratio as the decimal number that was written: 0.15 is 3/20."""
    return Fraction(repr(float(config.data.mask_ratio)))


def masking(config: ConfigDict) -> Masking:
    """The masking recipe; replacement "scheme" as what it stands for."""
    data = config.data
    replacement = data.replacement
    if replacement == "scheme":
        replacement = SCHEMES[data.masking].replacement
    return Masking(
        scheme=data.masking,
        replacement=replacement,
        ratio=mask_ratio(config),
        span_p=data.span_p,
        max_span_words=data.max_span_words,
        max_tries=data.max_tries,
        tag_share=data.tag_share,
        mask_share=data.mask_share,
        random_share=data.random_share,
    )


def cache_directory(config: ConfigDict) -> Path:
    """Where plans, the embedded corpus and compiled programs are kept."""
    if config.data.cache:
        return Path(config.data.cache)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "spanbert_jax"


def open_corpora(config: ConfigDict) -> Mixture:
    """The corpora that data.corpus names; builds the embedded one at first use.

    Raises:
        InputError: there is none, one is broken, or they do not fit together.
        StorageError: the embedded one cannot be written to the cache.
    """
    names = [name.strip() for name in config.data.corpus.split(",") if name.strip()]
    if not names:
        raise InputError(
            "data.corpus is empty; make a corpus with python -m spanbert_jax.prepare"
            " --input='TEXT/*.txt' --output=CORPUS and name it with"
            " --config.data.corpus=CORPUS"
        )
    _weights(config, len(names))
    return mixture.mix([open_corpus(config, name) for name in names])


def open_corpus(config: ConfigDict, name: str) -> Corpus:
    """One corpus: a directory, or "embedded", which is built at first use.

    Raises:
        InputError: there is none, or it is broken.
        StorageError: the embedded one cannot be written to the cache.
    """
    if name != EMBEDDED:
        return store.open_corpus(name)
    return store.open_corpus(
        embedded_corpus(
            cache_directory(config), _EMBEDDED_VOCAB_SIZE, _EMBEDDED_VALID_FRACTION
        )
    )


def _weights(config: ConfigDict, count: int) -> list[Fraction]:
    """The weight of each of some corpora, as the decimal numbers that were written."""
    text = config.data.weights
    if text and count == 1:
        raise InputError(f"data.weights is {text!r}, but data.corpus is one corpus")
    parts = [part.strip() for part in text.split(",")] if text else ["1"] * count
    try:
        weights = [Fraction(part) for part in parts]
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(
            f"data.weights is {text!r}; it must be numbers with commas between"
        ) from error
    if len(weights) != count:
        raise InputError(
            f"data.weights has {len(weights)} numbers, data.corpus {count} corpora"
        )
    if min(weights) <= 0:
        raise InputError(f"data.weights is {text!r}; each number must be above 0")
    return weights


def mix(config: ConfigDict, corpora: Mixture, split: str) -> Mix:
    """The feeds of a split of all corpora.

    Raises:
        InputError: a datum is wrong, or a corpus lacks the tags of the scheme, or has
            no block to train on although there are others.
        StorageError: a plan cannot be kept in the cache.
    """
    feeds = tuple(
        feed(config, corpus, split, number)
        for number, corpus in enumerate(corpora.corpora)
    )
    num_rows = [one.plan.num_rows for one in feeds]
    places = np.ones(1, np.int64)
    if split == "train" and len(feeds) > 1:
        if 0 in num_rows:
            empty = corpora.corpora[num_rows.index(0)].directory
            raise InputError(f"data.corpus: {empty} has 0 blocks to train on")
        weights = _weights(config, len(feeds))
        by_share = config.data.weighting == "shares"
        places = (
            places_by_share(weights)
            if by_share
            else places_by_epochs(weights, num_rows)
        )
    return Mix(feeds, places, config.train.seed)


def feed(config: ConfigDict, corpus: Corpus, split: str, number: int = 0) -> Feed:
    """The feed of a split: "train", or "valid" with the masks of data.eval_seed.

    Args:
        config: all settings.
        corpus: the text.
        split: which part of it.
        number: of the corpus among those of the run, so that no two mask alike.

    Returns:
        The feed.

    Raises:
        InputError: a datum is wrong, or the corpus lacks the tags of the scheme, or
            documents to draw second segments from.
        StorageError: the plan cannot be kept in the cache.
    """
    tokenizer = corpus.tokenizer
    held_out = split == "valid"
    seed = config.data.eval_seed if held_out else config.train.seed
    text = corpus.split(split)
    _check_tags(config, corpus, text)
    plan_settings = _plan_settings(config, held_out)
    plan = load_plan(
        text,
        tokenizer.word_edges,
        tokenizer.unk_id,
        plan_settings,
        corpus.fingerprint,
        cache_directory(config),
    )
    if config.data.pairs and not held_out and not plan.labels.any():
        raise InputError(
            "data.pairs finds no document to draw second segments from: the training"
            f" split of data.corpus={corpus.directory} makes {plan.num_blocks} pairs"
        )
    return Feed(
        split=text,
        plan=plan,
        masking=masking(config),
        special=SpecialIds(
            pad=tokenizer.pad_id,
            unk=tokenizer.unk_id,
            cls=tokenizer.cls_id,
            sep=tokenizer.sep_id,
            mask=tokenizer.mask_id,
        ),
        word_edges=tokenizer.word_edges,
        random_tokens=_random_tokens(config, corpus),
        block_length=config.data.block_length,
        pair_slots=plan_settings.pair_slots,
        seed=derive_seed(seed, number) if number else seed,
        sbo_positions=config.sbo.positions,
        sbo_edges=config.sbo.edges == "use",
    )


def _plan_settings(config: ConfigDict, held_out: bool) -> PlanSettings:
    return PlanSettings(
        block_length=config.data.block_length,
        ratio=mask_ratio(config),
        packing=config.data.packing,
        pairs=config.data.pairs,
        subset=config.eval.max_blocks if held_out else 0,
        subset_seed=config.data.eval_seed,
    )


def batch_shape(config: ConfigDict) -> BatchShape:
    """The sizes of a global batch of training text, whatever the corpus."""
    return BatchShape(
        rows=config.train.batch_size,
        block_length=config.data.block_length,
        target_slots=target_slots(config.data.block_length, mask_ratio(config)),
        pair_slots=_plan_settings(config, held_out=False).pair_slots,
    )


def _check_tags(config: ConfigDict, corpus: Corpus, split: Split) -> None:
    name = SCHEMES[config.data.masking].tags
    if name and not all(name in shard.tags for shard in split.shards):
        raise InputError(
            f"data.masking is {config.data.masking!r}, but"
            f" data.corpus={corpus.directory} holds no {name.replace('_', ' ')}; build"
            f" it with --tags={name}"
        )


def _random_tokens(config: ConfigDict, corpus: Corpus) -> RandomTokens:
    ids = corpus.tokenizer.replacement_ids
    if config.data.random_tokens == "uniform":
        return RandomTokens(ids)
    return RandomTokens.by_frequency(ids, corpus.unigram_counts)


def model(config: ConfigDict, vocab_size: int) -> "SpanBert":
    """The model of a config for a vocabulary."""
    # jax takes a second to import, and half of the commands do without.
    import jax.numpy as jnp

    from spanbert_jax.model.encoder import Geometry
    from spanbert_jax.model.heads import Sbo
    from spanbert_jax.model.spanbert import SpanBert

    settings = config.model
    geometry = Geometry(
        vocab_size=vocab_size,
        num_layers=settings.num_layers,
        hidden_size=settings.hidden_size,
        num_heads=settings.num_heads,
        intermediate_size=settings.intermediate_size,
        max_positions=settings.max_positions,
        type_vocab_size=settings.type_vocab_size,
        dropout=settings.dropout,
        attention_dropout=settings.attention_dropout,
        dtype=jnp.dtype(settings.dtype),
        attention=settings.attention,
        remat=settings.remat,
        unroll=settings.unroll,
    )
    side = config.sbo.boundaries
    sbo = Sbo(
        positions=config.sbo.positions,
        position_size=config.sbo.position_size,
        depth=config.sbo.depth,
        sides=("left", "right") if side == "both" else (side,),
        internal=config.sbo.internal,
    )
    return SpanBert(
        geometry=geometry,
        sbo=sbo if config.sbo.weight else None,
        nsp=config.data.pairs and config.nsp.weight > 0,
    )


def loss_weights(config: ConfigDict) -> dict[str, float]:
    """The weight in the objective of each head that a model may have."""
    return {"mlm": 1.0, "sbo": config.sbo.weight, "nsp": config.nsp.weight}


def identity(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that make a run the run it is: changed, it is another one.

    Args:
        values: settings by their dotted names.

    Returns:
        Those that decide which text a step sees and how it is masked, and those that
        decide the shapes of the parameters.
    """
    return {
        name: value
        for name, value in values.items()
        if name in _IDENTITY or (name.startswith("data.") and name not in _NOT_IDENTITY)
    }


def write(config: ConfigDict, path: Path) -> None:
    """Writes the resolved settings as JSON.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"--workdir: {error}") from error
