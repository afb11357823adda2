"""Shows what is in a corpus and what its masked blocks look like.

python -m spanbert_jax.preview --corpus=corpora/mine
"""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from configs import default
from spanbert_jax import errors, settings
from spanbert_jax.corpus.store import SPLITS, Corpus
from spanbert_jax.data import describe
from spanbert_jax.data.batch import masked_blocks

_CORPUS = flags.DEFINE_string(
    "corpus", "", 'What spanbert_jax.prepare made, or "embedded".'
)
_SPLIT = flags.DEFINE_enum("split", "train", SPLITS, "Whose blocks.")
_BLOCKS = flags.DEFINE_integer("blocks", 3, "Blocks to show.", lower_bound=0)
_EPOCH = flags.DEFINE_integer("epoch", 0, "Whose masks, from 0.", lower_bound=0)
# Unset: as configs/default.py has it.
_BLOCK_LENGTH = flags.DEFINE_integer("block_length", None, "With [CLS] and [SEP].")
_PAIRS = flags.DEFINE_boolean(
    "pairs", None, "Pairs of segments, for next-sentence prediction."
)
_MASKING = flags.DEFINE_string(
    "masking", None, "span, word, subword, entity or noun_phrase."
)
_REPLACEMENT = flags.DEFINE_string(
    "replacement", None, "What one 80/10/10 draw covers: span, word, token or scheme."
)
_MASK_RATIO = flags.DEFINE_float("mask_ratio", None, "Share of a block to predict.")
_SEED = flags.DEFINE_integer(
    "seed", None, "Of the masks: train.seed or, for valid, data.eval_seed."
)

# What the rest of the package calls what these flags set.
_SETTINGS = {
    "data.corpus": _CORPUS,
    "data.block_length": _BLOCK_LENGTH,
    "data.pairs": _PAIRS,
    "data.masking": _MASKING,
    "data.replacement": _REPLACEMENT,
    "data.mask_ratio": _MASK_RATIO,
    "train.seed": _SEED,
    "data.eval_seed": _SEED,
}
_SAMPLE = 2000
_WIDTH = 100


def main(argv: Sequence[str]) -> None:
    """Prints the preview that the flags describe."""
    del argv  # Empty: errors.run refuses what is not a flag.
    if not _CORPUS.value:
        raise errors.InputError("--corpus is missing; it names the corpus to show")
    config = _config()
    # Whatever the terminal cannot show is spelt out.
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        settings.validate(config)
        for line in _preview(config, settings.open_corpus(config, config.data.corpus)):
            print(line)
        sys.stdout.flush()
    except errors.InputError as error:
        raise errors.InputError(_with_flags(str(error))) from error
    except BrokenPipeError:
        # The reader, "head" perhaps, has seen enough; nor can Python flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _config() -> ConfigDict:
    """The default recipe with the flags' values."""
    config = default.get_config()
    for name, flag in _SETTINGS.items():
        if flag.value is not None:
            block, key = name.split(".")
            config[block][key] = flag.value
    # No model is made that could have too few.
    config.model.max_positions = config.data.block_length
    return config


def _with_flags(message: str) -> str:
    """A message about a setting as one about the flag that sets it."""
    for name, flag in _SETTINGS.items():
        if message.startswith(name):
            return f"--{flag.name}{message.removeprefix(name)}"
    return message


def _preview(config: ConfigDict, corpus: Corpus) -> Iterator[str]:
    """Yields the lines of the preview."""
    plain = bool(os.environ.get("NO_COLOR")) or not sys.stdout.isatty()
    paint = describe.in_plain if plain else describe.in_colour
    width = min(shutil.get_terminal_size((_WIDTH, 0)).columns, _WIDTH)
    # First, so that an error comes before all else.
    feed = settings.feed(config, corpus, _SPLIT.value)
    yield from describe.describe_corpus(corpus, paint)
    yield ""
    if not feed.plan.num_blocks:
        yield f"{_SPLIT.value} makes no block: nothing to show"
        return
    config.data.packing = True
    packed = settings.feed(config, corpus, _SPLIT.value).plan
    yield from describe.describe_blocks(feed, packed, width, paint)
    yield ""
    sample = describe.sample_blocks(feed.plan, _SAMPLE, feed.seed)
    masked = masked_blocks(feed, sample, np.full(len(sample), _EPOCH.value))
    statistics = describe.mask_statistics(feed, masked)
    yield from describe.describe_masks(statistics, feed, _EPOCH.value, paint)
    shown = describe.sample_blocks(feed.plan, _BLOCKS.value, feed.seed)
    if len(shown):
        yield ""
        yield from describe.explain_spans(paint)
    for block in shown:
        yield ""
        one = masked_blocks(feed, np.array([block]), np.array([_EPOCH.value]))
        yield from describe.describe_block(
            feed, corpus.tokenizer, int(block), one, width, paint
        )


if __name__ == "__main__":
    errors.run(main)
