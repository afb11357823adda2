"""Predicts what stands in the masks of texts, by the MLM head and the SBO head.

python -m spanbert_jax.fill --model=runs/mine "The [MASK] [MASK] won the game ."

Without a text, or for the text "-", each line of the standard input is one. A text that
begins with a dash comes behind "--". It works on the CPU, unless JAX_PLATFORMS says
otherwise.
"""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from absl import flags

from spanbert_jax import errors
from spanbert_jax.data import describe
from spanbert_jax.inference import predictor
from spanbert_jax.inference.filling import NO_HEAD, Filled
from spanbert_jax.inference.predictor import Predictor
from spanbert_jax.inference.table import describe_filled

_MODEL = flags.DEFINE_string(
    "model", None, "Work directory of a run, which may be going on, or an export."
)
_STEP = flags.DEFINE_integer("step", None, "Of a run; its newest if unset.")
_TOP = flags.DEFINE_integer(
    "top", 5, "Predictions for each mask and each span.", lower_bound=1
)
_BEAM = flags.DEFINE_integer(
    "beam",
    None,
    "Sequences that the MLM head's search keeps at each length; 8, or --top if that is"
    " more, if unset.",
    lower_bound=1,
)
_JSON = flags.DEFINE_boolean("json", False, "Print one object a line for each text.")
flags.mark_flag_as_required("model")

_INPUT = "-"
_WIDTH = 100
# Of a narrower terminal, lines are broken.
_LEAST_WIDTH = 60


def main(argv: Sequence[str]) -> None:
    """Prints what the masks of each text are filled with."""
    # Whatever the terminal cannot show is spelt out.
    sys.stdout.reconfigure(errors="backslashreplace")
    # A run that is going on holds the accelerator, of which a text has no need.
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    model = predictor.load(Path(_MODEL.value), "--model", _STEP.value)
    show = _as_json if _JSON.value else _as_table
    try:
        if not _JSON.value:
            print(_headline(model), flush=True)
        for text in _texts(argv[1:]):
            filled = model.fill(text, _TOP.value, _BEAM.value)
            for warning in _warnings(model, filled):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
            print(*show(model, filled), sep="\n", flush=True)
    except BrokenPipeError:
        # The reader, "head" perhaps, has seen enough; nor can Python flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _texts(arguments: Sequence[str]) -> Iterator[str]:
    """Yields the texts: the arguments, or lines of the standard input in their place.

    Lines are read as they come, so that one can ask and be answered in turn.
    """
    for argument in arguments or [_INPUT]:
        if argument != _INPUT:
            yield argument
        else:
            # What is not UTF-8 is left out, as in a corpus.
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
            yield from (line.strip() for line in sys.stdin if line.strip())


def _headline(model: Predictor) -> str:
    size = model.scorer.model.geometry
    without = "" if model.scorer.model.sbo else f"; {NO_HEAD}"
    return (
        f"{_MODEL.value}, step {model.step:,}: {size.num_layers} layers of"
        f" {size.hidden_size:,}, {size.vocab_size:,} tokens{without}"
    )


def _warnings(model: Predictor, filled: Filled) -> Iterator[str]:
    if filled.unknown:
        unknown = ", ".join(map(repr, filled.unknown))
        spelling = model.tokenizer.specials.unk
        yield f"the vocabulary cannot spell {unknown}: read as {spelling}"
    trained = model.config.data.block_length
    if filled.num_tokens > trained:
        yield (
            f"the text has {filled.num_tokens:,} tokens, but the model was trained on"
            f" blocks of {trained:,} (data.block_length)"
        )


def _as_json(model: Predictor, filled: Filled) -> Iterator[str]:
    source = {"model": _MODEL.value, "step": model.step}
    yield json.dumps(source | dataclasses.asdict(filled))


def _as_table(model: Predictor, filled: Filled) -> Iterator[str]:
    del model  # The headline has told it.
    plain = bool(os.environ.get("NO_COLOR")) or not sys.stdout.isatty()
    paint = describe.in_plain if plain else describe.in_colour
    width = min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDTH)
    yield ""
    yield from describe_filled(filled, max(width, _LEAST_WIDTH), paint)


if __name__ == "__main__":
    errors.run(main, takes_arguments=True)
