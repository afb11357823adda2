"""Makes a corpus directory from text.

python -m spanbert_jax.prepare --input='texts/*.txt' --output=corpora/mine
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from spanbert_jax import errors
from spanbert_jax.corpus.build import DEFAULT_VOCAB_SIZE, BuildOptions, build
from spanbert_jax.corpus.sources import FORMATS
from spanbert_jax.corpus.tokenizers import Specials

_INPUT = flags.DEFINE_list("input", [], "Files or globs; a name in .gz is unpacked.")
_OUTPUT = flags.DEFINE_string("output", "", "The corpus directory to make.")
_FORMAT = flags.DEFINE_enum(
    "format",
    BuildOptions.format,
    FORMATS,
    "text: documents with blank lines between them, a paragraph or sentence a line;"
    " jsonl: an object a line; embedded: the help texts of Python, no --input.",
)
_TEXT_FIELD = flags.DEFINE_string(
    "text_field", BuildOptions.text_field, "jsonl: the key of the text."
)
_VOCAB = flags.DEFINE_string("vocab", None, "A WordPiece vocabulary, cased.")
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size",
    None,
    f"Tokens to learn without --vocab: {DEFAULT_VOCAB_SIZE} if unset.",
)
_VALID_FRACTION = flags.DEFINE_float(
    "valid_fraction", BuildOptions.valid_fraction, "Share of documents to hold out."
)
_MIN_TOKENS = flags.DEFINE_integer(
    "min_tokens", BuildOptions.min_tokens, "Shorter documents are dropped and counted."
)
_WORKERS = flags.DEFINE_integer("workers", None, "Processes; one per core if unset.")
_SPECIALS = {
    role: flags.DEFINE_string(f"{role}_token", spelling, f"Spelling of {spelling}.")
    for role, spelling in vars(Specials()).items()
}


def main(argv: Sequence[str]) -> None:
    """Builds the corpus that the flags describe and says what to do with it."""
    del argv  # Empty: errors.run refuses what is not a flag.
    workers = {} if _WORKERS.value is None else {"workers": _WORKERS.value}
    options = BuildOptions(
        output=Path(_OUTPUT.value),
        input=tuple(_INPUT.value),
        format=_FORMAT.value,
        text_field=_TEXT_FIELD.value,
        vocab=None if _VOCAB.value is None else Path(_VOCAB.value),
        vocab_size=_VOCAB_SIZE.value,
        specials=Specials(**{role: flag.value for role, flag in _SPECIALS.items()}),
        valid_fraction=_VALID_FRACTION.value,
        min_tokens=_MIN_TOKENS.value,
        **workers,
    )
    build(options)
    print(
        "next: python -m spanbert_jax.main --config=configs/small.py"
        f" --config.data.corpus={options.output} --workdir=runs/first"
    )


if __name__ == "__main__":
    errors.run(main)
