"""The card of an export: its README.md, filled from the run; Markdown."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ml_collections import ConfigDict

from spanbert_jax import settings
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.data.masking import SCHEMES
from spanbert_jax.interop.boundary_head import module_text, usage_text
from spanbert_jax.interop.history import History, last_evaluation
from spanbert_jax.interop.names import Tensors
from spanbert_jax.interop.pretrained import DESCRIPTION, SBO_PREFIX, SBO_WEIGHTS
from spanbert_jax.model.spanbert import SpanBert
from spanbert_jax.training.saved import Saved

CARD = "README.md"
CURVES = "curves.png"
# Stands where only the user knows.
OPEN = "FILL IN"

# Sources of a corpus to name; there may be thousands.
_MOST_SOURCES = 5
# The parts of a model by how the names of their tensors begin.
_PARTS = {
    "bert.embeddings.": "encoder",
    "bert.encoder.": "encoder",
    "cls.predictions.": "MLM head",
    "bert.pooler.": "next-sentence head",
    "cls.seq_relationship.": "next-sentence head",
    SBO_PREFIX: "span boundary head",
}
# Changes between two starts of a run that are told: of the recipe, not of the machine.
_TOLD_CHANGES = (
    *("train.steps", "model.dropout", "model.attention_dropout", "model.dtype"),
    *("sbo.", "nsp.", "optimizer."),
)

_FRONT_MATTER = f"""\
---
language: {OPEN}
license: {OPEN}
library_name: transformers
pipeline_tag: fill-mask
tags:
- bert
- spanbert
- span-masking
"""

_USE = """\
## Use

The code is to be run in this directory; elsewhere its path, or the model's name on the
Hub, stands in the place of `"."`.

```python
from transformers import pipeline

fill = pipeline("fill-mask", model=".")
for guess in fill(f"Paris is the {fill.tokenizer.mask_token} of France."):
    print(f"{guess['score']:.3f} {guess['token_str']}")
```

The encoder is there to be fine-tuned where spans are selected. Every class of BERT in
transformers takes it; what it warns of as new is what fine-tuning trains.

```python
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
)

reader = AutoModelForQuestionAnswering.from_pretrained(".")
tagger = AutoModelForTokenClassification.from_pretrained(".", num_labels=9)
encoder = AutoModel.from_pretrained(".", add_pooling_layer=False)
```
"""

_HEAD = """\
## The span boundary head

{what}

```python
{module}```

What it makes of a span of masks:

```python
{usage}```
"""


def make_card(saved: Saved, tensors: Tensors, history: History) -> str:
    """The text of README.md.

    Args:
        saved: the model.
        tensors: its parameters as they are exported, see `names.to_tensors`.
        history: of the run, up to the model's step.

    Returns:
        Markdown. Code that it shows is Python to be run in the export's directory.
    """
    model = settings.model(saved.config, saved.origin.tokenizer.vocab_size)
    sections = [
        _introduction(saved, model, tensors),
        _USE,
        _data(saved),
        _recipe(saved, model),
        _results(history),
    ]
    if model.sbo:
        sections.append(_boundary_head(model))
    sections.append(_limits(saved))
    return "\n".join(sections)


def python_blocks(card: str) -> list[str]:
    """The Python code in a card, block by block."""
    return re.findall("^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)


def _introduction(saved: Saved, model: SpanBert, tensors: Tensors) -> str:
    geometry = model.geometry
    counts = dict.fromkeys(_PARTS.values(), 0)
    for name, array in tensors.items():
        part = next(part for begin, part in _PARTS.items() if name.startswith(begin))
        counts[part] += array.size
    sizes = ", ".join(f"{part} {count:,}" for part, count in counts.items() if count)
    tags = "- span-boundary-objective\n" if model.sbo else ""
    what = _paragraph(
        "An encoder of BERT's architecture, pretrained as in SpanBERT ([Joshi et al."
        " 2019](https://arxiv.org/abs/1907.10529)) with spanbert_jax, after"
        f" {saved.step:,} of {saved.config.train.steps:,} steps. Parameters: {sizes}."
        f" Vocabulary: {_describe_tokenizer(saved.origin.tokenizer)}. Texts of up to"
        f" {geometry.max_positions:,} tokens."
    )
    return f"""\
{_FRONT_MATTER}{tags}---

# SpanBERT (L = {geometry.num_layers}, H = {geometry.hidden_size})

{what}
"""


def _describe_tokenizer(tokenizer: Tokenizer) -> str:
    kind = {"wordpiece": "WordPiece", "sentencepiece": "SentencePiece"}[tokenizer.kind]
    case = "uncased" if tokenizer.normalisation.lowercase else "cased"
    accents = ", without accents" if tokenizer.normalisation.strip_accents else ""
    return f"{kind}, {case}{accents}, {tokenizer.vocab_size:,} tokens"


def _data(saved: Saved) -> str:
    rows = []
    for corpus in saved.origin.corpora:
        splits = corpus["splits"]
        counts = [
            f"{splits[split][key]:,}" if split in splits else "0"
            for split in ("train", "valid")
            for key in ("documents", "tokens")
        ]
        rows.append([corpus["name"], *counts, _sources(corpus["sources"])])
    columns = ["corpus", "documents", "tokens", "held-out documents", "held-out tokens"]
    table = _table([*columns, "read from"], rows)
    rest = f"What text this is, and on which terms it may be used: {OPEN}."
    return f"## Training data\n\n{table}\n{rest}\n"


def _sources(sources: Sequence[Mapping[str, Any]]) -> str:
    named = ", ".join(f"`{source['name']}`" for source in sources[:_MOST_SOURCES])
    more = len(sources) - _MOST_SOURCES
    return f"{named} and {more:,} more" if more > 0 else named


def _recipe(saved: Saved, model: SpanBert) -> str:
    config = saved.config
    data, optimizer = config.data, config.optimizer
    devices = saved.record["devices"]
    rows = {
        "started from": config.init_from or "random weights",
        **_text_rows(config),
        "masked": _masked(config),
        "replaced by": _replaced(config),
        "objective": _objective(config, model),
        "batch": f"{config.train.batch_size:,} rows of {data.block_length:,} tokens",
        "steps": f"{saved.step:,} of {config.train.steps:,}",
        "optimiser": f"AdamW; rate {optimizer.learning_rate:g}, reached in"
        f" {optimizer.warmup_steps:,} steps and then falling in a line to"
        f" {optimizer.end_learning_rate:g}; betas {optimizer.beta1:g} and"
        f" {optimizer.beta2:g}, epsilon {optimizer.epsilon:g}; weight decay"
        f" {optimizer.weight_decay:g} but on biases and LayerNorm; gradient norm"
        + (f" at most {optimizer.clip_norm:g}" if optimizer.clip_norm else " free"),
        "dropout": f"{config.model.dropout:g},"
        f" {config.model.attention_dropout:g} on attention",
        "computed in": f"{config.model.dtype}, weights float32",
        "computed on": f"{devices['devices']:,} x {devices['kind of device']}",
    }
    changes = [
        f"at step {change['step']:,} {change['name']} from {change['old']} to"
        f" {change['new']}"
        for change in saved.record["changes"]
        if change["name"].startswith(_TOLD_CHANGES)
    ]
    if changes:
        rows["changed on the way"] = "; ".join(changes)
    table = _table(["what", "how"], rows.items())
    return f"## Recipe\n\n{table}\nAll settings: `{DESCRIPTION}`.\n"


def _text_rows(config: ConfigDict) -> dict[str, str]:
    data = config.data
    text = "contiguous text of one document"
    if data.pairs:
        text = "pairs of segments, [CLS] A [SEP] B [SEP]"
    packing = "several blocks a row" if data.packing else "one block a row"
    rows = {"blocks": f"{text}, of up to {data.block_length:,} tokens; {packing}"}
    if data.weights:
        rows["weights of the corpora"] = f"{data.weights} ({data.weighting})"
    return rows


def _masked(config: ConfigDict) -> str:
    data, masking = config.data, settings.masking(config)
    tags = SCHEMES[data.masking].tags
    units = {
        "span": "spans of whole words, their number of words geometric with p ="
        f" {data.span_p:g}, at most {data.max_span_words}",
        "word": "whole words",
        "subword": "single tokens",
    }
    unit = units.get(data.masking)
    if tags:
        share = _percent(data.tag_share)
        unit = f"{tags.replace('_', ' ')} in {share} of the draws, words in the others"
    return f"{_percent(masking.ratio)} of the tokens: {unit}; anew in each epoch"


def _replaced(config: ConfigDict) -> str:
    data = config.data
    kept = 1 - data.mask_share - data.random_share
    odds = {"uniform": "all equally likely", "corpus": "as frequent as in the text"}
    return (
        f"[MASK] {_percent(data.mask_share)}, random tokens"
        f" {_percent(data.random_share)} ({odds[data.random_tokens]}), themselves"
        f" {_percent(kept)}; one draw for each"
        f" {settings.masking(config).replacement}"
    )


def _objective(config: ConfigDict, model: SpanBert) -> str:
    terms = ["MLM"]
    if model.sbo:
        form = model.sbo
        kind = "inner" if form.internal else "outer"
        edges = "" if config.sbo.edges == "use" else ", none at the edges of a block"
        terms.append(
            f"{config.sbo.weight:g} x span boundary objective ({kind}"
            f" {' and '.join(form.sides)}, {form.positions} positions of"
            f" {form.position_size}, {form.depth} layers{edges})"
        )
    if model.nsp:
        terms.append(f"{config.nsp.weight:g} x next sentence")
    return " + ".join(terms)


def _results(history: History) -> str:
    evaluation = last_evaluation(history)
    text = "The run looked at no held-out text.\n"
    if evaluation and "mlm_loss" in evaluation:
        text = _evaluation(evaluation)
    curves = f"\n![Losses by step]({CURVES})\n" if history else ""
    return f"## Results\n\n{text}{curves}"


def _evaluation(evaluation: Mapping[str, Any]) -> str:
    heads = {
        head: title
        for head, title in {
            "mlm": "MLM head, from the token's own state",
            "sbo": "SBO head, from the span's boundaries",
            "nsp": "next sentence",
        }.items()
        if f"{head}_loss" in evaluation
    }
    rows = [
        ["loss", *(f"{evaluation[f'{head}_loss']:.3f}" for head in heads)],
        ["targets right", *(f"{evaluation[f'{head}_accuracy']:.1%}" for head in heads)],
        ["targets", *(f"{evaluation[f'{head}_targets']:,}" for head in heads)],
        *_span_rows(evaluation, list(heads)),
    ]
    table = _table([f"at step {evaluation['step']:,}", *heads.values()], rows)
    rest = _paragraph(
        f"Perplexity of the MLM head: {evaluation['perplexity']:.2f}. A model that"
        " knows only how frequent each token is has a loss of"
        f" {evaluation['unigram_loss']:.3f}. Whole spans are those of which every token"
        " was put under [MASK], and predicted right."
    )
    return (
        "On the held-out text, under masks that are always the same; losses in nats."
        f"\n\n{table}\n{rest}\n"
    )


def _span_rows(evaluation: Mapping[str, Any], heads: list[str]) -> list[list[str]]:
    """Exact match of whole spans: of all, then by length."""
    every = list(evaluation["mlm_spans"])
    rows = []
    for label, lengths in {
        "whole spans right": every,
        **{f"... of length {length}": [length] for length in every},
    }.items():
        row = [_exact_match(evaluation, head, lengths) for head in heads]
        if any(row):
            rows.append([label, *row])
    return rows


def _exact_match(
    evaluation: Mapping[str, Any], head: str, lengths: Sequence[str]
) -> str:
    counts = evaluation.get(f"{head}_spans", {})
    shares = evaluation.get(f"{head}_span_exact", {})
    found = [length for length in lengths if counts.get(length)]
    count = sum(counts[length] for length in found)
    right = sum(counts[length] * shares[length] for length in found)
    return f"{right / count:.1%} of {count:,}" if count else ""


def _boundary_head(model: SpanBert) -> str:
    form, geometry = model.sbo, model.geometry
    sides = " and ".join(form.sides)
    boundaries = f"beside the span, {sides}"
    if form.internal:
        ends = [{"left": "first", "right": "last"}[side] for side in form.sides]
        boundaries = f"at the span's own {' and '.join(ends)} token"
    what = (
        "It predicts each token of a span from the final hidden states"
        f" {boundaries}, and from the token's number in the span. transformers has no"
        f" such head: it is `{SBO_WEIGHTS}`, read by the module below. It tells"
        f" {form.positions} places in a span apart; tokens further into one are not"
        " predicted."
    )
    return _HEAD.format(
        what=_paragraph(what),
        module=module_text(form, geometry.hidden_size, geometry.vocab_size),
        usage=usage_text(form, SBO_WEIGHTS),
    )


def _limits(saved: Saved) -> str:
    config = saved.config
    limits = [
        "What it fills in is likely by its training text, and no fact. Neither bias"
        f" nor any task beyond the tables above was measured: {OPEN}."
    ]
    if saved.step < config.train.steps:
        limits.append(
            f"Step {saved.step:,} of {config.train.steps:,}: the rate had not come"
            " down yet."
        )
    if config.data.block_length < config.model.max_positions:
        limits.append(
            f"No text of more than {config.data.block_length:,} tokens was read: the"
            " positions beyond were not trained here."
        )
    if not config.data.pairs and config.model.type_vocab_size > 1:
        limits.append(
            "Single texts only: the embedding of a second segment (token type 1) was"
            " not trained here; fine-tuning on pairs trains it."
        )
    if not config.data.pairs:
        limits.append(
            "No next-sentence head: where a class has a pooler, fine-tuning trains it"
            " from random weights."
        )
    items = [_paragraph(f"- {limit}", "  ") for limit in limits]
    return "## Limits\n\n" + "".join(f"{item}\n" for item in items)


def _percent(share: float | Fraction) -> str:
    return f"{float(100 * share):g}%"


def _paragraph(text: str, indent: str = "") -> str:
    """Wraps a text, all of whose lines but the first are indented."""
    return textwrap.fill(text, 88, subsequent_indent=indent, break_on_hyphens=False)


def _table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    """A text that ends neither its cell nor its row."""
    return " ".join(text.split()).replace("|", "\\|")
