"""Makes a corpus directory from text.

python -m spanbert_jax.prepare --input='texts/*.txt' --output=corpora/mine
"""

import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from spanbert_jax import errors
from spanbert_jax.corpus.build import DEFAULT_VOCAB_SIZE, KINDS, BuildOptions, build
from spanbert_jax.corpus.runners import Beam, Local, Runner
from spanbert_jax.corpus.sources import FORMATS, Reading
from spanbert_jax.corpus.tokenizers import Specials

_INPUT = flags.DEFINE_multi_string(
    "input",
    [],
    "Files, globs, URLs such as gs://bucket/*.jsonl.gz, or tfds:NAME/CONFIG; names in"
    " .gz, .zst, .bz2, .xz are unpacked.",
)
_OUTPUT = flags.DEFINE_string("output", "", "The corpus directory to make.")
_FORMAT = flags.DEFINE_enum(
    "format",
    Reading.format,
    FORMATS,
    "text: documents with blank lines between them, a paragraph or sentence a line;"
    " jsonl: an object a line; parquet: a row a document; tfds: an example a document;"
    " embedded: the help texts of Python, no --input.",
)
_TEXT_FIELD = flags.DEFINE_string(
    "text_field", Reading.text_field, "jsonl, parquet, tfds: the field of the text."
)
_INVALID = flags.DEFINE_enum(
    "invalid",
    Reading.invalid,
    ("replace", "strict"),
    "Bytes that are not UTF-8: leave them out and count them, or refuse them.",
)
_UNICODE = flags.DEFINE_enum(
    "unicode", Reading.unicode, ("none", "nfc", "nfkc"), "Normal form of all text."
)
_TFDS_SPLIT = flags.DEFINE_string(
    "tfds_split", Reading.tfds_split, "tfds: the split to read."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", Reading.data_dir, "tfds: where its data sets are."
)
_TOKENIZER = flags.DEFINE_enum(
    "tokenizer",
    BuildOptions.tokenizer,
    KINDS,
    "What to learn without --vocab: wordpiece, or SentencePiece's unigram or bpe;"
    " wordpiece if unset.",
)
_VOCAB = flags.DEFINE_string(
    "vocab", None, "A WordPiece vocabulary, or a SentencePiece .model."
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size",
    None,
    f"Tokens to learn without --vocab: {DEFAULT_VOCAB_SIZE} if unset.",
)
_BYTE_FALLBACK = flags.DEFINE_boolean(
    "byte_fallback",
    BuildOptions.byte_fallback,
    "SentencePiece that is learnt: spell characters it has not seen by their bytes.",
)
_LOWERCASE = flags.DEFINE_boolean(
    "lowercase", BuildOptions.lowercase, "Uncased: an uncased vocabulary needs it."
)
_STRIP_ACCENTS = flags.DEFINE_boolean(
    "strip_accents",
    BuildOptions.strip_accents,
    "Without accents: BERT's uncased vocabularies need it.",
)
_VALID_FRACTION = flags.DEFINE_float(
    "valid_fraction", BuildOptions.valid_fraction, "Share of documents to hold out."
)
_MIN_TOKENS = flags.DEFINE_integer(
    "min_tokens", BuildOptions.min_tokens, "Shorter documents are dropped and counted."
)
_DEDUP = flags.DEFINE_boolean(
    "dedup", BuildOptions.dedup, "Drop documents that equal an earlier one."
)
_TAGS = flags.DEFINE_list(
    "tags",
    [],
    "entities, noun_phrases or both: tag them with spaCy, for --config.data.masking="
    "entity and noun_phrase.",
)
_SPACY_MODEL = flags.DEFINE_string(
    "spacy_model", BuildOptions.spacy_model, "--tags: an installed spaCy model."
)
_WORKERS = flags.DEFINE_integer("workers", None, "Processes; one per core if unset.")
_RUNNER = flags.DEFINE_string(
    "runner",
    None,
    "Work on Apache Beam: DirectRunner, DataflowRunner, FlinkRunner, SparkRunner.",
)
_BEAM_OPTIONS = flags.DEFINE_multi_string(
    "beam_option", [], "--runner: an option of the pipeline, such as --project=mine."
)
_STAGE = flags.DEFINE_string(
    "stage",
    "",
    "--runner: a directory, such as gs://bucket/stage, that this machine and the"
    " workers can write to; needed where they do not share --output.",
)
_SPECIALS = {
    role: flags.DEFINE_string(f"{role}_token", spelling, f"Spelling of {spelling}.")
    for role, spelling in vars(Specials()).items()
}


def main(argv: Sequence[str]) -> None:
    """Builds the corpus that the flags describe and says what to do with it."""
    del argv  # Empty: errors.run refuses what is not a flag.
    _refuse_idle_flags()
    options = BuildOptions(
        output=Path(_OUTPUT.value),
        input=tuple(_INPUT.value),
        reading=Reading(
            format=_FORMAT.value,
            text_field=_TEXT_FIELD.value,
            invalid=_INVALID.value,
            unicode=_UNICODE.value,
            tfds_split=_TFDS_SPLIT.value,
            data_dir=_DATA_DIR.value,
        ),
        tokenizer=_TOKENIZER.value,
        vocab=None if _VOCAB.value is None else Path(_VOCAB.value),
        vocab_size=_VOCAB_SIZE.value,
        byte_fallback=_BYTE_FALLBACK.value,
        lowercase=_LOWERCASE.value,
        strip_accents=_STRIP_ACCENTS.value,
        specials=Specials(**{role: flag.value for role, flag in _SPECIALS.items()}),
        valid_fraction=_VALID_FRACTION.value,
        min_tokens=_MIN_TOKENS.value,
        dedup=_DEDUP.value,
        tags=tuple(_TAGS.value),
        spacy_model=_SPACY_MODEL.value,
        runner=_runner(),
    )
    build(options)
    print(
        "next: python -m spanbert_jax.main --config=configs/small.py"
        f" --config.data.corpus={options.output} --workdir=runs/first"
    )


def _refuse_idle_flags() -> None:
    """Refuses flags that others leave without any effect."""
    is_tfds = _FORMAT.value == "tfds" or any("tfds:" in text for text in _INPUT.value)
    has_fields = is_tfds or _FORMAT.value in ("jsonl", "parquet")
    learns_pieces = _TOKENIZER.value in ("unigram", "bpe")
    for flag, has_effect, needed in (
        (_TEXT_FIELD, has_fields, "--format=jsonl, parquet or tfds"),
        (_TFDS_SPLIT, is_tfds, "--input=tfds:NAME"),
        (_DATA_DIR, is_tfds, "--input=tfds:NAME"),
        (_BYTE_FALLBACK, learns_pieces, "--tokenizer=unigram or bpe"),
        (_SPACY_MODEL, bool(_TAGS.value), "--tags"),
    ):
        if flag.present and not has_effect:
            raise errors.InputError(
                f"--{flag.name}={flag.value} has no effect without {needed}"
            )


def _runner() -> Runner:
    if _RUNNER.value is None:
        if _BEAM_OPTIONS.value or _STAGE.value:
            raise errors.InputError("--beam_option and --stage need --runner")
        return Local(os.cpu_count() or 1 if _WORKERS.value is None else _WORKERS.value)
    if _WORKERS.value is not None:
        raise errors.InputError(
            f"--workers={_WORKERS.value} is for local processes; tell"
            f" --runner={_RUNNER.value} by --beam_option"
        )
    return Beam(_RUNNER.value, tuple(_BEAM_OPTIONS.value), _STAGE.value)


if __name__ == "__main__":
    errors.run(main)
