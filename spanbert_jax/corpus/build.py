"""From text to a corpus directory: a first reading, a vocabulary, shards, a manifest.

Each step finds what an earlier build that was interrupted has finished; corpus.json is
the last file to be written.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data import topics
from typing import Any, Literal

import numpy as np

from spanbert_jax.corpus import parts, shards, store, workspace
from spanbert_jax.corpus.runners import Beam, Local, Runner
from spanbert_jax.corpus.samples import sample_lines
from spanbert_jax.corpus.scan import Scan, held_out_threshold, repeated, scan
from spanbert_jax.corpus.sentencepiece import train_sentencepiece
from spanbert_jax.corpus.sources import FORMATS, Reading, Source, find_sources
from spanbert_jax.corpus.tags import DEFAULT_MODEL, Tagging, make_tagging
from spanbert_jax.corpus.tokenizers import (
    Normalisation,
    Specials,
    Tokenizer,
    check_spellings,
    load_saved,
    load_tokenizer,
)
from spanbert_jax.corpus.wordpiece import train_wordpiece
from spanbert_jax.errors import InputError, StorageError

Kind = Literal["wordpiece", "unigram", "bpe"]
KINDS: tuple[Kind, ...] = ("wordpiece", "unigram", "bpe")
DEFAULT_VOCAB_SIZE = 8192

# A vocabulary learns nothing new from more text; SentencePiece takes some 20 bytes of
# memory for each character of it, and half a minute for all of these.
_SAMPLE_CHARACTERS: dict[Kind, int] = {
    "wordpiece": 100_000_000,
    "unigram": 25_000_000,
    "bpe": 25_000_000,
}
_COUNTED_AT_A_TIME = 10_000_000
# More unknown tokens than this share of a source deserve a warning: a vocabulary that
# fits its text has a tenth of it, or less.
_MUCH_UNKNOWN = 0.01


@dataclass(frozen=True)
class BuildOptions:
    """What to build. All but the runner and the paths is part of its identity.

    Attributes:
        output: the corpus directory to make.
        input: paths, globs, URLs or "tfds:NAME"; none for the embedded text.
        reading: how to read it.
        tokenizer: the kind of vocabulary to learn; None means WordPiece. Not together
            with `vocab`.
        vocab: a WordPiece vocabulary or a SentencePiece model, or None: learn one.
        vocab_size: tokens to learn; None means 8192. Not together with `vocab`.
        byte_fallback: SentencePiece that is learnt: spell unknown characters by bytes.
        lowercase: uncased text.
        strip_accents: text without accents.
        specials: how the vocabulary spells its special tokens.
        valid_fraction: share of the documents to hold out, in [0, 1).
        min_tokens: shorter documents are dropped and counted.
        dedup: drop documents that equal an earlier one, and count them.
        tags: of tags.KINDS: what to tag.
        spacy_model: the tagger.
        runner: does the work; no influence on the result.
        part_size: bytes on disk that are read at a time; None chooses by the size of
            the text.
    """

    output: Path
    input: tuple[str, ...] = ()
    reading: Reading = field(default_factory=Reading)
    tokenizer: Kind | None = None
    vocab: Path | None = None
    vocab_size: int | None = None
    byte_fallback: bool = True
    lowercase: bool = False
    strip_accents: bool = False
    specials: Specials = field(default_factory=Specials)
    valid_fraction: float = 0.02
    min_tokens: int = 1
    dedup: bool = False
    tags: tuple[str, ...] = ()
    spacy_model: str = DEFAULT_MODEL
    runner: Runner = field(default_factory=lambda: Local(os.cpu_count() or 1))
    part_size: int | None = None

    @property
    def kind(self) -> Kind:
        """The kind of vocabulary to learn."""
        return self.tokenizer or "wordpiece"

    @property
    def size(self) -> int:
        """Tokens to learn."""
        return DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    @property
    def normalisation(self) -> Normalisation:
        """What becomes of the text before it is tokenised."""
        return Normalisation(
            lowercase=self.lowercase,
            strip_accents=self.strip_accents,
            unicode=self.reading.unicode,
        )


@dataclass(frozen=True)
class _Job:
    """A build whose text has been read once.

    Attributes:
        options: what to build.
        directory: where it is made.
        scan: the text.
        given: the vocabulary that the options name; None: learn one.
        tagging: what is tagged.
    """

    options: BuildOptions
    directory: Path
    scan: Scan
    given: Tokenizer | None
    tagging: Tagging

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two builds the same; holds no path and no machine's trait."""
        return {
            "format_version": store.FORMAT_VERSION,
            **self.scan.describe(),
            "options": _describe_options(self.options, self.given, self.tagging),
        }


def _describe_options(
    options: BuildOptions, given: Tokenizer | None, tagging: Tagging
) -> dict[str, Any]:
    """The options that decide what a corpus holds."""
    learnt = {"tokenizer": options.kind, "vocab_size": options.size}
    if options.kind != "wordpiece":
        learnt["byte_fallback"] = options.byte_fallback
    return {
        "text_field": options.reading.text_field,
        "invalid": options.reading.invalid,
        "vocabulary": given.sha256 if given else learnt,
        "normalisation": asdict(options.normalisation),
        "special_tokens": asdict(options.specials),
        "valid_fraction": float(options.valid_fraction),
        "min_tokens": options.min_tokens,
        "dedup": options.dedup,
        "tags": list(tagging.kinds),
        "tagger": tagging.version,
        "part_size": options.part_size,
    }


def build(options: BuildOptions, wait: bool = False) -> store.Corpus:
    """Builds a corpus, goes on with one that was interrupted, or finds it finished.

    Args:
        options: what to build.
        wait: if another process builds the same directory, wait for it; else refuse.

    Raises:
        InputError: an option or the text is at fault, or `output` holds another corpus.
        StorageError: the corpus could not be written.
    """
    start = time.monotonic()
    check_options(options)
    workspace.check_output(options.output)
    partial = options.output.with_name(options.output.name + ".partial")
    sources = find_sources(options.input, options.reading)
    tagging = make_tagging(options.tags, options.spacy_model)
    given = options.vocab and load_tokenizer(
        options.vocab, options.specials, options.normalisation
    )
    _refuse_other(options, sources, _describe_options(options, given, tagging))
    try:
        with workspace.lock(partial, wait):
            workspace.claim(partial)
            cut = parts.cut(sources, options.reading, options.part_size)
            found = scan(sources, cut, options.runner, partial)
            job = _Job(options, partial, found, given, tagging)
            _check_text(job)
            if finished := _find_finished(job):
                workspace.abandon(partial)
                return finished
            if workspace.recorded_identity(partial) != job.identity:
                _fill(job)
            store.open_corpus(partial)  # Whatever is amiss shows before the renaming.
            workspace.publish(partial, options.output)
    except BrokenProcessPool as error:
        raise StorageError(
            f"a worker was killed, for lack of memory perhaps; {partial} keeps the"
            " finished shards: run the same command again, with fewer --workers"
        ) from error
    except BrokenPipeError:
        raise  # Of our standard output: it says nothing about the corpus.
    except OSError as error:
        raise StorageError(f"cannot write {options.output}: {error}") from error
    corpus = store.open_corpus(options.output)
    _print_summary(corpus, time.monotonic() - start)
    return corpus


def embedded_corpus(cache_dir: Path, vocab_size: int, valid_fraction: float) -> Path:
    """Returns the corpus of Python's own help texts; the first use builds it.

    Safe to call from several processes at once: one builds, the others wait.

    Args:
        cache_dir: the corpus goes to `corpora/embedded-...` in it, a name by content.
        vocab_size: tokens of the vocabulary to learn.
        valid_fraction: share of the documents to hold out, in [0, 1).
    """
    settings = [store.FORMAT_VERSION, vocab_size, valid_fraction]
    content = json.dumps([settings, topics.topics], sort_keys=True)
    name = hashlib.sha256(content.encode()).hexdigest()[:16]
    options = BuildOptions(
        output=cache_dir / "corpora" / f"embedded-{name}",
        reading=Reading(format="embedded"),
        vocab_size=vocab_size,
        valid_fraction=valid_fraction,
        runner=Local(1),
    )
    if not (options.output / store.MANIFEST).exists():
        build(options, wait=True)
    return options.output


def check_options(options: BuildOptions) -> None:
    """Checks what can be known without reading any text.

    Raises:
        InputError: an option is out of range or contradicts another.
    """
    if not options.output.name:
        raise InputError("--output is missing; it names the corpus directory to make")
    reading = options.reading
    for name, value, known in (
        ("format", reading.format, FORMATS),
        ("tokenizer", options.kind, KINDS),
        ("invalid", reading.invalid, ("replace", "strict")),
        ("unicode", reading.unicode, ("none", "nfc", "nfkc")),
    ):
        if value not in known:
            raise InputError(f"--{name}={value} is none of {', '.join(known)}")
    if reading.format == "embedded" and options.input:
        raise InputError("--format=embedded reads no file; leave --input out")
    for name in ("vocab_size", "tokenizer"):
        value = getattr(options, name)
        if options.vocab is not None and value is not None:
            raise InputError(
                f"--vocab={options.vocab} and --{name}={value} exclude each other: use"
                " a vocabulary or learn one"
            )
    check_spellings(options.specials)
    if "," in str(options.output):
        raise InputError(
            f"--output={options.output} has a comma, which parts corpora in data.corpus"
        )
    if not 0 <= options.valid_fraction < 1:
        raise InputError(f"--valid_fraction={options.valid_fraction} is not in [0, 1)")
    counts = {
        "vocab_size": options.vocab_size,
        "min_tokens": options.min_tokens,
        "part_size": options.part_size,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"--{name}={count} is not at least 1")
    if isinstance(options.runner, Beam):
        options.runner.check()
    elif isinstance(options.runner, Local) and options.runner.workers < 1:
        raise InputError(f"--workers={options.runner.workers} is not at least 1")


def _check_text(job: _Job) -> None:
    if not sum(job.scan.documents):
        raise InputError(
            f"--input={','.join(job.options.input)}: no document in any of"
            f" {len(job.scan.sources)} sources"
        )


def _refuse_other(
    options: BuildOptions, sources: Sequence[Source], described: dict[str, Any]
) -> None:
    """Refuses, before an hour of reading, what is known without any."""
    recorded = workspace.recorded_identity(options.output)
    if recorded is None:
        return
    names = [(source.name, source.size, source.format) for source in sources]
    keys = ("name", "bytes", "format")
    known = [tuple(entry[key] for key in keys) for entry in recorded["sources"]]
    if names != known or described != recorded["options"]:
        raise _other(options.output)


def _other(output: Path) -> InputError:
    return InputError(
        f"--output={output} holds a corpus of other text or options; it was left as it"
        " is: choose another name or remove it"
    )


def _find_finished(job: _Job) -> store.Corpus | None:
    output = job.options.output
    if not (output / store.MANIFEST).exists():
        return None
    if workspace.recorded_identity(output) != job.identity:
        workspace.abandon(job.directory)
        raise _other(output)
    corpus = store.open_corpus(output)
    print(f"{output} is finished already, with this text and these options")
    return corpus


def _fill(job: _Job) -> None:
    """Makes all files of the corpus, corpus.json last."""
    directory, options = job.directory, job.options
    workspace.begin(directory, job.identity)
    threshold = held_out_threshold(job.scan.hashes, options.valid_fraction)
    print(
        f"{sum(job.scan.documents):,} documents, {job.scan.characters:,} characters",
        flush=True,
    )
    tokenizer = _settle_vocabulary(job, threshold)
    if options.dedup:
        _write_repeated(job)
    recipe = shards.Recipe(
        tokenizer_sha256=tokenizer.sha256,
        specials=options.specials,
        normalisation=options.normalisation,
        min_tokens=options.min_tokens,
        threshold=threshold,
        drops_repeated=options.dedup,
        tagging=job.tagging,
    )
    key = _digest([job.identity, tokenizer.sha256])
    reports = shards.write_shards(job.scan, recipe, options.runner, directory, key)
    splits = shards.summarise(reports)
    if not splits["train"]["documents"]:
        raise InputError(
            "no training document is left: all of"
            f" {splits['train']['dropped_documents']} have fewer than"
            f" --min_tokens={options.min_tokens} tokens"
        )
    counts = _count_tokens(directory, splits["train"], tokenizer.vocab_size)
    store.write_array(directory / store.UNIGRAM, counts)
    totals = shards.summarise_sources(reports, len(job.scan.sources)).tolist()
    manifest = {
        **job.identity,
        **store.describe_tokenizer(tokenizer),
        "splits": splits,
        "source_tokens": [
            {"tokens": tokens, "unknown_tokens": unknown} for tokens, unknown in totals
        ],
    }
    manifest["fingerprint"] = store.fingerprint(manifest)
    store.sync(directory)
    store.write_json(directory / store.MANIFEST, manifest)


def _write_repeated(job: _Job) -> None:
    flags = repeated(job.scan.hashes)
    for part, own in zip(job.scan.parts, flags, strict=True):
        store.write_array(job.directory / shards.repeated_file(part), own)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _settle_vocabulary(job: _Job, threshold: int) -> Tokenizer:
    """Puts the vocabulary where the shards' writers look for it."""
    directory = job.directory / store.TOKENIZER
    if directory.exists():
        return load_saved(
            directory, job.options.specials, job.options.normalisation, "--output"
        )
    vocabulary = job.given or _learn_vocabulary(job, threshold)
    temporary = directory.with_name(f"{store.TOKENIZER}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    store.sync(vocabulary.save(temporary))
    temporary.rename(directory)
    return vocabulary


def _learn_vocabulary(job: _Job, threshold: int) -> Tokenizer:
    """Learns from the training documents, or from as many of them as are enough."""
    options = job.options
    characters = _SAMPLE_CHARACTERS[options.kind]
    lines = sample_lines(
        job.scan,
        characters,
        threshold,
        options.runner,
        job.directory,
        _digest(job.identity),
    )
    print(f"learning {options.kind}, {options.size:,} tokens", flush=True)
    if options.kind == "wordpiece":
        vocabulary = train_wordpiece(
            lines, options.size, options.specials, options.normalisation
        )
    else:
        vocabulary = train_sentencepiece(
            lines,
            options.size,
            options.kind,
            options.specials,
            options.normalisation,
            options.byte_fallback,
        )
    if vocabulary.vocab_size < options.size:
        print(f"the text gave {vocabulary.vocab_size:,} tokens, no more")
    return vocabulary


def _count_tokens(partial: Path, split: dict[str, Any], size: int) -> np.ndarray:
    """Returns int64 [V]: how often each token is in a split."""
    counts = np.zeros(size, np.int64)
    for shard in split["shards"]:
        tokens = np.load(partial / f"{shard['name']}.tokens.npy", mmap_mode="r")
        # NumPy counts int64, eight bytes a token.
        for begin in range(0, len(tokens), _COUNTED_AT_A_TIME):
            part = tokens[begin : begin + _COUNTED_AT_A_TIME]
            counts += np.bincount(part, minlength=size)
    return counts


def _print_summary(corpus: store.Corpus, seconds: float) -> None:
    manifest = corpus.manifest
    train, valid = manifest["splits"]["train"], manifest["splits"]["valid"]
    tokens = train["tokens"] + valid["tokens"]
    unknown = train["unknown_tokens"] + valid["unknown_tokens"]
    dropped = {
        key: train[key] + valid[key]
        for key in ("dropped_documents", "dropped_tokens", "repeated_documents")
    }
    print(
        f"documents: {train['documents']:,} to train on, {valid['documents']:,} held"
        f" out, {dropped['dropped_documents']:,} dropped"
        f" ({dropped['repeated_documents']:,} of them repeated)\n"
        f"tokens: {train['tokens']:,} to train on, {valid['tokens']:,} held out,"
        f" {dropped['dropped_tokens']:,} dropped; {unknown / tokens:.3%} unknown\n"
        f"vocabulary: {corpus.tokenizer.vocab_size:,} tokens\n"
        f"cleaned: {_describe_dirt(manifest['text'])}\n"
        f"{corpus.directory}: done in {seconds:.1f} s",
        flush=True,
    )
    _warn_of_unknown(manifest["sources"], manifest["source_tokens"])


def _describe_dirt(text: dict[str, int]) -> str:
    counts = [
        f"{count:,} {name.replace('_', ' ')}"
        for name, count in text.items()
        if name not in ("documents", "characters") and count
    ]
    return ", ".join(counts) or "nothing"


def _warn_of_unknown(
    sources: Sequence[dict[str, Any]], tokens: Sequence[dict[str, int]]
) -> None:
    for source, counts in zip(sources, tokens, strict=True):
        share = counts["unknown_tokens"] / max(counts["tokens"], 1)
        if share > _MUCH_UNKNOWN:
            print(
                f"warning: {share:.1%} of the tokens of {source['name']} are unknown to"
                " the vocabulary, which may be of another language; words that hold"
                " one are never masked",
                file=sys.stderr,
                flush=True,
            )
