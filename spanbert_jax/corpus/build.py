"""From text to a corpus directory: scan, vocabulary, shards.

A build works in `<output>.partial`, keeps each finished shard there through a kill, and
renames the directory when corpus.json, its last file, is written.
"""

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from spanbert_jax.corpus import store
from spanbert_jax.corpus.sources import (
    FORMATS,
    Format,
    Replaced,
    Source,
    find_sources,
    read_documents,
)
from spanbert_jax.corpus.tokenizers import (
    VOCABULARY_FILE,
    Specials,
    Tokenizer,
    load_wordpiece,
    train_wordpiece,
)
from spanbert_jax.errors import InputError, StorageError

DEFAULT_VOCAB_SIZE = 8192

_STATE = "build.json"
_DONE = ".done.json"
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
class ShardTask:
    """Documents to tokenise into one shard, and where to put it."""

    directory: Path
    name: str
    documents: list[list[str]]
    specials: Specials
    min_tokens: int


@dataclass(frozen=True)
class _Scan:
    """What a first reading found.

    Attributes:
        hashes: uint64 [D], one per document.
        characters: in all documents.
        digests: per source, over its documents' text.
        replaced: what was not UTF-8.
    """

    hashes: np.ndarray
    characters: int
    digests: list[str]
    replaced: Replaced


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
    sources = find_sources(options.input, options.format)
    vocabulary = options.vocab and load_wordpiece(options.vocab, options.specials)
    partial = options.output.with_name(options.output.name + ".partial")
    try:
        _check_output(options.output)
        scan = _scan(sources, options)
        identity = _identity(options, sources, scan, vocabulary)
        if finished := _find_finished(options.output, identity):
            return finished
        with _lock(partial, wait):
            if finished := _find_finished(options.output, identity):
                partial.rmdir()
                return finished
            if _recorded(partial / store.MANIFEST) != identity:
                _fill(partial, options, sources, scan, identity, vocabulary)
            _publish(partial, options.output)
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
    sources = find_sources((), options.format)
    identity = _identity(options, sources, _scan(sources, options), None)
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
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
        "shard_characters": options.shard_characters,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"--{name}={count} is not at least 1")


def held_out_threshold(hashes: np.ndarray, fraction: float) -> int:
    """Chooses documents to hold out: those whose hash is below the number returned.

    They are round(fraction * D), at least one of two or more, never all. Equal
    documents have equal hashes and stay together, which can make it a few more, or
    none where all of the text is copies of one document.

    Args:
        hashes: uint64 [D], in any order.
        fraction: share to hold out, in [0, 1).
    """
    count = len(hashes)
    if fraction == 0 or count < 2:
        return 0
    wanted = min(max(round(fraction * count), 1), count - 1)
    ordered = np.sort(hashes)
    last = ordered[wanted - 1]
    return int(last) if last == ordered[-1] else int(last) + 1


def write_shard(task: ShardTask) -> dict[str, Any]:
    """Tokenises documents and writes their shard; runs in a worker.

    Args:
        task: the documents. The tokenizer lies in the task's directory.

    Returns:
        The shard's name and counts, as they are also recorded beside it.

    Raises:
        StorageError: a file could not be written.
    """
    tokenizer = load_wordpiece(
        task.directory / store.TOKENIZER / VOCABULARY_FILE, task.specials
    )
    lines = list(chain.from_iterable(task.documents))
    tokens, line_lengths = _encode(tokenizer, lines)
    document_lines = np.array([len(document) for document in task.documents])
    line_ends = np.concatenate([[0], np.cumsum(line_lengths)])
    document_ends = line_ends[np.concatenate([[0], np.cumsum(document_lines)])]
    document_lengths = np.diff(document_ends)
    kept = document_lengths >= task.min_tokens
    dropped = int(document_lengths[~kept].sum())
    counted = len(tokens)
    tokens = tokens[np.repeat(kept, document_lengths)]
    line_lengths = line_lengths[np.repeat(kept, document_lines)]
    report = {
        "name": task.name,
        "documents": int(kept.sum()),
        "lines": int((line_lengths > 0).sum()),
        "tokens": len(tokens),
        "unknown_tokens": int((tokens == tokenizer.unk_id).sum()),
        "dropped_documents": int((~kept).sum()),
        "dropped_tokens": dropped,
        "counted_tokens": counted,
        "sha256": "",
    }
    if len(tokens):
        arrays = {
            "documents": _offsets(document_lengths[kept]),
            "lines": _offsets(line_lengths[line_lengths > 0]),
            "tokens": tokens,
        }
        for kind, content in arrays.items():
            store.write_array(task.directory / f"{task.name}.{kind}.npy", content)
        with (task.directory / f"{task.name}.tokens.npy").open("rb") as file:
            report["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    store.write_json(task.directory / f"{task.name}{_DONE}", report)
    return report


def _encode(tokenizer: Tokenizer, lines: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of all lines in a row, and each line's length."""
    dtype = store.token_dtype(tokenizer.vocab_size)
    parts, lengths = [np.zeros(0, dtype)], []
    # Lists of Python integers take 20 times an array's memory: never hold many.
    for start in range(0, len(lines), 1000):
        ids = tokenizer.encode(lines[start : start + 1000])
        lengths.extend(map(len, ids))
        parts.append(np.fromiter(chain.from_iterable(ids), dtype))
    return np.concatenate(parts), np.array(lengths, np.int64)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _check_output(output: Path) -> None:
    """Refuses an output that could only be refused after hours of work."""
    if (output / store.MANIFEST).exists():
        return
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"--output={output} exists and is not a corpus; nothing done")
    parent = next(path for path in output.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise StorageError(f"cannot write {output}: {parent} takes no new files")


def _documents(
    sources: list[Source], options: BuildOptions, scan: _Scan
) -> Iterator[tuple[int, list[str]]]:
    """Yields (hash, document) again, and makes sure that they are the scanned ones."""
    position = 0
    for source in sources:
        for document in read_documents(source, options.text_field, Replaced()):
            key = _hash(document)
            if position >= len(scan.hashes) or key != int(scan.hashes[position]):
                raise InputError(f"--input: {source.path} changed while it was read")
            position += 1
            yield key, document
    if position != len(scan.hashes):
        raise InputError("--input: the text changed while it was read")


def _hash(document: list[str]) -> int:
    digest = hashlib.blake2b("\n".join(document).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


def _scan(sources: list[Source], options: BuildOptions) -> _Scan:
    """Reads all text once; warns of files without a document."""
    hashes, digests, characters = array("Q"), [], 0
    replaced = Replaced()
    for source in sources:
        first = len(hashes)
        for document in read_documents(source, options.text_field, replaced):
            hashes.append(_hash(document))
            characters += sum(map(len, document))
        if len(hashes) == first:
            print(f"warning: {source.path} holds no text", file=sys.stderr, flush=True)
        digests.append(hashlib.sha256(hashes[first:].tobytes()).hexdigest())
    if not hashes:
        raise InputError(
            f"--input={','.join(options.input)}: no document in any of {len(sources)}"
            " files"
        )
    return _Scan(np.frombuffer(hashes, np.uint64), characters, digests, replaced)


def _identity(
    options: BuildOptions,
    sources: list[Source],
    scan: _Scan,
    vocabulary: Tokenizer | None,
) -> dict[str, Any]:
    """Returns what makes two builds the same; holds no path and no machine's trait."""
    return {
        "format_version": store.FORMAT_VERSION,
        "sources": [
            {
                "name": source.name,
                "bytes": source.size,
                "format": source.format,
                "digest": digest,
            }
            for source, digest in zip(sources, scan.digests, strict=True)
        ],
        "text": {
            "documents": len(scan.hashes),
            "characters": scan.characters,
            "replaced_documents": scan.replaced.documents,
            "replaced_characters": scan.replaced.characters,
        },
        "options": {
            "text_field": options.text_field,
            "vocabulary": vocabulary and vocabulary.sha256,
            "vocab_size": None if vocabulary else _vocab_size(options),
            "special_tokens": asdict(options.specials),
            "valid_fraction": float(options.valid_fraction),
            "min_tokens": options.min_tokens,
            "shard_characters": options.shard_characters,
        },
    }


def _vocab_size(options: BuildOptions) -> int:
    return DEFAULT_VOCAB_SIZE if options.vocab_size is None else options.vocab_size


def _recorded(path: Path) -> dict[str, Any] | None:
    """Returns the identity that a build wrote down, None if it wrote none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    keys = ("format_version", "sources", "text", "options")
    return {key: content.get(key) for key in keys}


def _find_finished(output: Path, identity: dict[str, Any]) -> store.Corpus | None:
    if not (output / store.MANIFEST).exists():
        return None
    if _recorded(output / store.MANIFEST) != identity:
        raise InputError(
            f"--output={output} holds a corpus of other text or options; it was left"
            " as it is: choose another name or remove it"
        )
    corpus = store.open_corpus(output)
    print(f"{output} is finished already, with this text and these options")
    return corpus


@contextlib.contextmanager
def _lock(partial: Path, wait: bool) -> Iterator[None]:
    """Creates the directory and keeps other builds out of it; a kill ends that."""
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Whoever held it may have renamed it meanwhile; then this is another one.
            if _is_open_as(descriptor, partial):
                yield
                return
        except BlockingIOError as error:
            raise InputError(f"another process is building {partial}") from error
        finally:
            os.close(descriptor)


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _fill(
    partial: Path,
    options: BuildOptions,
    sources: list[Source],
    scan: _Scan,
    identity: dict[str, Any],
    vocabulary: Tokenizer | None,
) -> None:
    """Makes all files of the corpus in `partial`, corpus.json last."""
    _prepare_partial(partial, identity)
    threshold = held_out_threshold(scan.hashes, options.valid_fraction)
    print(
        f"{len(scan.hashes):,} documents, {scan.characters:,} characters,"
        f" {int((scan.hashes < threshold).sum()):,} documents held out",
        flush=True,
    )
    tokenizer = _settle_vocabulary(
        partial, options, sources, scan, threshold, vocabulary
    )
    reports = _write_shards(partial, options, sources, scan, threshold)
    splits = {name: _summarise(name, reports) for name in store.SPLITS}
    if not splits["train"]["documents"]:
        raise InputError(
            "no training document is left: all of"
            f" {splits['train']['dropped_documents']} have fewer than"
            f" --min_tokens={options.min_tokens} tokens"
        )
    _check_conservation(reports, splits)
    counts = _count_tokens(partial, splits, tokenizer.vocab_size)
    store.write_array(partial / store.UNIGRAM, counts)
    manifest = {**identity, **store.describe_tokenizer(tokenizer), "splits": splits}
    manifest["fingerprint"] = store.fingerprint(manifest)
    store.sync(partial)
    store.write_json(partial / store.MANIFEST, manifest)


def _prepare_partial(partial: Path, identity: dict[str, Any]) -> None:
    """Empties the directory unless it holds the beginnings of this very build."""
    recorded = _recorded(partial / _STATE) or _recorded(partial / store.MANIFEST)
    leftovers = [path for path in partial.iterdir() if path.suffix != ".tmp"]
    if recorded == identity:
        print(f"going on with {partial}", flush=True)
        return
    if leftovers and recorded is None:
        raise InputError(
            f"{partial} is in the way: it is not from an earlier build, so it was left"
            " as it is; remove it or choose another --output"
        )
    if leftovers:
        print(f"{partial} is of other text or options; starting anew", flush=True)
    # The record goes last: as long as it is there, the rest is known to be a build's.
    for path in sorted(partial.iterdir(), key=lambda path: path.name == _STATE):
        _remove(path)
    store.write_json(partial / _STATE, identity)


def _settle_vocabulary(
    partial: Path,
    options: BuildOptions,
    sources: list[Source],
    scan: _Scan,
    threshold: int,
    vocabulary: Tokenizer | None,
) -> Tokenizer:
    """Puts the vocabulary into `partial`, learning it from the training documents."""
    directory = partial / store.TOKENIZER
    if directory.exists():
        return load_wordpiece(directory / VOCABULARY_FILE, options.specials)
    if vocabulary is None:
        # The held-out documents have the smallest hashes: sample from the other end.
        share = min(1.0, _VOCABULARY_CHARACTERS / scan.characters)
        lowest = max(threshold, int((1 - share) * 2**64))
        size = _vocab_size(options)
        print(f"learning a vocabulary of {size:,} tokens", flush=True)
        lines = chain.from_iterable(
            document
            for key, document in _documents(sources, options, scan)
            if key >= lowest
        )
        vocabulary = train_wordpiece(lines, size, options.specials)
        if vocabulary.vocab_size < size:
            print(f"the text gave {vocabulary.vocab_size:,} tokens, no more")
    temporary = partial / f"{store.TOKENIZER}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    store.sync(vocabulary.save(temporary))
    temporary.rename(directory)
    return vocabulary


def _tasks(
    partial: Path,
    options: BuildOptions,
    sources: list[Source],
    scan: _Scan,
    threshold: int,
) -> Iterator[ShardTask]:
    """Cuts the text into shards, in the order of the text."""
    limit = _shard_characters(options, scan)
    documents: dict[str, list[list[str]]] = {name: [] for name in store.SPLITS}
    characters = dict.fromkeys(store.SPLITS, 0)
    numbers = dict.fromkeys(store.SPLITS, 0)

    def cut(split: str) -> ShardTask:
        name = f"{split}-{numbers[split]:05d}"
        task = ShardTask(
            partial, name, documents[split], options.specials, options.min_tokens
        )
        documents[split], characters[split] = [], 0
        numbers[split] += 1
        return task

    for key, document in _documents(sources, options, scan):
        split = "valid" if key < threshold else "train"
        documents[split].append(document)
        characters[split] += sum(map(len, document))
        if characters[split] >= limit:
            yield cut(split)
    for split in store.SPLITS:
        if documents[split]:
            yield cut(split)


def _shard_characters(options: BuildOptions, scan: _Scan) -> int:
    if options.shard_characters is not None:
        return options.shard_characters
    return max(_LEAST_SHARD_CHARACTERS, scan.characters // _MOST_SHARDS)


def _write_shards(
    partial: Path,
    options: BuildOptions,
    sources: list[Source],
    scan: _Scan,
    threshold: int,
) -> list[dict[str, Any]]:
    """Tokenises what earlier builds left to do; returns all shards' reports, in order.

    The tasks in flight are one more than the workers, so that memory is bounded.
    """
    single = scan.characters <= _shard_characters(options, scan)
    pool = None if single or options.workers == 1 else _start_pool(options.workers)
    bar = tqdm(
        total=scan.characters,
        unit="char",
        unit_scale=True,
        disable=not sys.stderr.isatty(),
    )
    reports: list[dict[str, Any]] = []
    in_flight: deque[tuple[int, Future[dict[str, Any]]]] = deque()

    def collect() -> None:
        size, future = in_flight.popleft()
        reports.append(future.result())
        bar.update(size)
        if bar.disable:
            print(
                f"{reports[-1]['name']}: {reports[-1]['tokens']:,} tokens", flush=True
            )

    try:
        for task in _tasks(partial, options, sources, scan, threshold):
            size = sum(map(len, chain.from_iterable(task.documents)))
            in_flight.append((size, _submit(pool, task)))
            if pool is None or len(in_flight) > options.workers:
                collect()
        while in_flight:
            collect()
    finally:
        bar.close()
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return reports


def _submit(pool: ProcessPoolExecutor | None, task: ShardTask) -> Future[Any]:
    """Hands a task to the pool, does it here, or finds it done by an earlier build."""
    done = task.directory / f"{task.name}{_DONE}"
    if pool is not None and not done.exists():
        return pool.submit(write_shard, task)
    future: Future[Any] = Future()
    future.set_result(
        json.loads(done.read_bytes()) if done.exists() else write_shard(task)
    )
    return future


def _start_pool(workers: int) -> ProcessPoolExecutor:
    # Spawn: a fork would copy the locks of the threads that libraries have started.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, initializer=_start_worker)


def _start_worker() -> None:
    # One process per core is all the parallelism that there is to gain.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed; it would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _summarise(split: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds the reports of one split up, as corpus.json has it."""
    own = [report for report in reports if report["name"].startswith(f"{split}-")]
    totals = (
        "documents",
        "tokens",
        "unknown_tokens",
        "dropped_documents",
        "dropped_tokens",
    )
    entry = ("name", "documents", "lines", "tokens", "sha256")
    return {
        **{key: sum(report[key] for report in own) for key in totals},
        "shards": [
            {key: report[key] for key in entry} for report in own if report["tokens"]
        ],
    }


def _check_conservation(
    reports: list[dict[str, Any]], splits: dict[str, dict[str, Any]]
) -> None:
    counted = sum(report["counted_tokens"] for report in reports)
    stored = sum(split["tokens"] for split in splits.values())
    dropped = sum(split["dropped_tokens"] for split in splits.values())
    if stored + dropped != counted:
        raise StorageError(
            f"tokens were lost: the tokenizer counted {counted:,}, but {stored:,} are"
            f" stored and {dropped:,} dropped"
        )


def _count_tokens(
    partial: Path, splits: dict[str, dict[str, Any]], size: int
) -> np.ndarray:
    """Returns int64 [V]: how often each token is in the training split."""
    counts = np.zeros(size, np.int64)
    for shard in splits["train"]["shards"]:
        tokens = np.load(partial / f"{shard['name']}.tokens.npy", mmap_mode="r")
        counts += np.bincount(tokens, minlength=size)
    return counts


def _publish(partial: Path, output: Path) -> None:
    """Removes what only builds need and gives the directory its name."""
    for path in partial.iterdir():
        if path.name.endswith((".tmp", _DONE)) or path.name == _STATE:
            _remove(path)
    store.sync(partial)
    partial.rename(output)
    store.sync(output.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


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
