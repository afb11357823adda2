"""From text to a corpus directory: a first reading, a vocabulary, shards, a manifest.

Each step finds what an earlier build that was interrupted has finished; corpus.json is
the last file to be written.
"""

import functools
import hashlib
import json
import os
import shutil
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from spanbert_jax.corpus import shards, store, workspace
from spanbert_jax.corpus.scan import Scan, held_out_threshold, scan
from spanbert_jax.corpus.sources import FORMATS, Format, find_sources
from spanbert_jax.corpus.tokenizers import (
    VOCABULARY_FILE,
    Specials,
    Tokenizer,
    load_wordpiece,
    train_wordpiece,
)
from spanbert_jax.errors import InputError, StorageError

DEFAULT_VOCAB_SIZE = 8192

# A shard is three open files to its readers, and 1024 are often all a process may have:
# a large text is cut into about this many shards, a small one into shards of this size.
_MOST_SHARDS = 200
_LEAST_SHARD_CHARACTERS = 4_000_000
# A vocabulary learns nothing new from more text, and the count of its words would not
# fit into memory.
_VOCABULARY_CHARACTERS = 500_000_000


@dataclass(frozen=True)
class BuildOptions:
    """What to build. All but `workers` and the paths is part of the corpus's identity.

    Attributes:
        output: the corpus directory to make.
        input: paths and globs; none for the embedded text.
        format: "text" (blank lines between documents), "jsonl" or "embedded".
        text_field: JSON Lines: the key of the text.
        vocab: a WordPiece vocabulary file, or None: learn one.
        vocab_size: tokens to learn; None means 8192. Not together with `vocab`.
        specials: how the vocabulary spells its special tokens.
        valid_fraction: share of the documents to hold out, in [0, 1).
        min_tokens: shorter documents are dropped and counted.
        workers: processes that tokenise; no influence on the result.
        shard_characters: text per shard; None chooses by the size of the text.
    """

    output: Path
    input: tuple[str, ...] = ()
    format: Format = "text"
    text_field: str = "text"
    vocab: Path | None = None
    vocab_size: int | None = None
    specials: Specials = field(default_factory=Specials)
    valid_fraction: float = 0.02
    min_tokens: int = 1
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    shard_characters: int | None = None


@dataclass(frozen=True)
class _Job:
    """A build whose text has been read once.

    Attributes:
        options: what to build.
        scan: the text.
        given: the vocabulary that the options name; None: learn one.
    """

    options: BuildOptions
    scan: Scan
    given: Tokenizer | None

    @property
    def vocab_size(self) -> int:
        """Tokens to learn."""
        size = self.options.vocab_size
        return DEFAULT_VOCAB_SIZE if size is None else size

    @functools.cached_property
    def cut(self) -> shards.Cut:
        """How the text becomes shards."""
        characters = self.options.shard_characters
        if characters is None:
            characters = self.scan.characters // _MOST_SHARDS
            characters = max(_LEAST_SHARD_CHARACTERS, characters)
        output = self.options.output
        return shards.Cut(
            directory=output.with_name(output.name + ".partial"),
            specials=self.options.specials,
            min_tokens=self.options.min_tokens,
            characters=characters,
            threshold=held_out_threshold(self.scan.hashes, self.options.valid_fraction),
        )

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What makes two builds the same; holds no path and no machine's trait."""
        options = self.options
        return {
            "format_version": store.FORMAT_VERSION,
            **self.scan.describe(),
            "options": {
                "text_field": options.text_field,
                "vocabulary": self.given and self.given.sha256,
                "vocab_size": None if self.given else self.vocab_size,
                "special_tokens": asdict(options.specials),
                "valid_fraction": float(options.valid_fraction),
                "min_tokens": options.min_tokens,
                "shard_characters": options.shard_characters,
            },
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
    job = _read(options)
    partial = job.cut.directory
    try:
        if finished := _find_finished(job):
            return finished
        with workspace.lock(partial, wait):
            if finished := _find_finished(job):
                partial.rmdir()
                return finished
            if workspace.recorded_identity(partial) != job.identity:
                _fill(job)
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
    options = BuildOptions(
        output=cache_dir / "corpora" / "embedded",
        format="embedded",
        vocab_size=vocab_size,
        valid_fraction=valid_fraction,
        workers=1,
    )
    check_options(options)
    identity = json.dumps(_read(options).identity)
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    output = options.output.with_name(f"embedded-{name}")
    if not (output / store.MANIFEST).exists():
        build(replace(options, output=output), wait=True)
    return output


def check_options(options: BuildOptions) -> None:
    """Checks what can be known without reading any text.

    Raises:
        InputError: an option is out of range or contradicts another.
    """
    if not options.output.name:
        raise InputError("--output is missing; it names the corpus directory to make")
    if options.format not in FORMATS:
        raise InputError(f"--format={options.format} is none of {', '.join(FORMATS)}")
    if options.format == "embedded" and options.input:
        raise InputError("--format=embedded reads no file; leave --input out")
    if options.vocab is not None and options.vocab_size is not None:
        raise InputError(
            f"--vocab={options.vocab} and --vocab_size={options.vocab_size} exclude"
            " each other: use a vocabulary or learn one"
        )
    if not 0 <= options.valid_fraction < 1:
        raise InputError(f"--valid_fraction={options.valid_fraction} is not in [0, 1)")
    counts = {
        "vocab_size": options.vocab_size,
        "min_tokens": options.min_tokens,
        "workers": options.workers,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"--{name}={count} is not at least 1")


def _read(options: BuildOptions) -> _Job:
    sources = find_sources(options.input, options.format)
    given = options.vocab and load_wordpiece(options.vocab, options.specials)
    found = scan(sources, options.text_field)
    if not found.hashes.size:
        raise InputError(
            f"--input={','.join(options.input)}: no document in any of {len(sources)}"
            " files"
        )
    return _Job(options, found, given)


def _find_finished(job: _Job) -> store.Corpus | None:
    output = job.options.output
    if not (output / store.MANIFEST).exists():
        return None
    if workspace.recorded_identity(output) != job.identity:
        raise InputError(
            f"--output={output} holds a corpus of other text or options; it was left"
            " as it is: choose another name or remove it"
        )
    corpus = store.open_corpus(output)
    print(f"{output} is finished already, with this text and these options")
    return corpus


def _fill(job: _Job) -> None:
    """Makes all files of the corpus, corpus.json last."""
    partial, hashes = job.cut.directory, job.scan.hashes
    workspace.begin(partial, job.identity)
    print(
        f"{len(hashes):,} documents, {job.scan.characters:,} characters,"
        f" {int((hashes < job.cut.threshold).sum()):,} documents held out",
        flush=True,
    )
    tokenizer = _settle_vocabulary(job)
    splits = shards.summarise(
        shards.write_shards(job.scan, job.cut, job.options.workers)
    )
    if not splits["train"]["documents"]:
        raise InputError(
            "no training document is left: all of"
            f" {splits['train']['dropped_documents']} have fewer than"
            f" --min_tokens={job.options.min_tokens} tokens"
        )
    counts = _count_tokens(partial, splits["train"], tokenizer.vocab_size)
    store.write_array(partial / store.UNIGRAM, counts)
    manifest = {**job.identity, **store.describe_tokenizer(tokenizer), "splits": splits}
    manifest["fingerprint"] = store.fingerprint(manifest)
    store.sync(partial)
    store.write_json(partial / store.MANIFEST, manifest)


def _settle_vocabulary(job: _Job) -> Tokenizer:
    """Puts the vocabulary where the shards' writers look for it."""
    directory = job.cut.directory / store.TOKENIZER
    if directory.exists():
        return load_wordpiece(directory / VOCABULARY_FILE, job.options.specials)
    vocabulary = job.given or _learn_vocabulary(job)
    temporary = directory.with_name(f"{store.TOKENIZER}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    store.sync(vocabulary.save(temporary))
    temporary.rename(directory)
    return vocabulary


def _learn_vocabulary(job: _Job) -> Tokenizer:
    """Learns from the training documents, or from as many of them as are enough."""
    # The held-out documents have the smallest hashes: sample from the other end.
    share = min(1.0, _VOCABULARY_CHARACTERS / job.scan.characters)
    lowest = max(job.cut.threshold, int((1 - share) * 2**64))
    print(f"learning a vocabulary of {job.vocab_size:,} tokens", flush=True)
    lines = chain.from_iterable(
        document for key, document in job.scan.documents() if key >= lowest
    )
    vocabulary = train_wordpiece(lines, job.vocab_size, job.options.specials)
    if vocabulary.vocab_size < job.vocab_size:
        print(f"the text gave {vocabulary.vocab_size:,} tokens, no more")
    return vocabulary


def _count_tokens(partial: Path, split: dict[str, Any], size: int) -> np.ndarray:
    """Returns int64 [V]: how often each token is in a split."""
    counts = np.zeros(size, np.int64)
    for shard in split["shards"]:
        tokens = np.load(partial / f"{shard['name']}.tokens.npy", mmap_mode="r")
        counts += np.bincount(tokens, minlength=size)
    return counts


def _print_summary(corpus: store.Corpus, seconds: float) -> None:
    splits = corpus.manifest["splits"]
    text = corpus.manifest["text"]
    train, valid = splits["train"], splits["valid"]
    tokens = train["tokens"] + valid["tokens"]
    unknown = train["unknown_tokens"] + valid["unknown_tokens"]
    dropped = {
        key: train[f"dropped_{key}"] + valid[f"dropped_{key}"]
        for key in ("documents", "tokens")
    }
    print(
        f"documents: {train['documents']:,} to train on, {valid['documents']:,} held"
        f" out, {dropped['documents']:,} dropped\n"
        f"tokens: {train['tokens']:,} to train on, {valid['tokens']:,} held out,"
        f" {dropped['tokens']:,} dropped; {unknown / tokens:.3%} unknown\n"
        f"vocabulary: {corpus.tokenizer.vocab_size:,} tokens\n"
        f"replaced: {text['replaced_characters']:,} characters that were not UTF-8,"
        f" in {text['replaced_documents']:,} documents\n"
        f"{corpus.directory}: done in {seconds:.1f} s",
        flush=True,
    )
