"""Shards: the text cut into parts, and the token ids of each part on disk.

A finished shard has a report beside it, by which a build that was interrupted knows
what it need not do again.
"""

import hashlib
import json
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from spanbert_jax.corpus import store
from spanbert_jax.corpus.scan import Scan
from spanbert_jax.corpus.tokenizers import (
    VOCABULARY_FILE,
    Specials,
    Tokenizer,
    load_wordpiece,
)
from spanbert_jax.errors import StorageError

REPORT_SUFFIX = ".done.json"


@dataclass(frozen=True)
class Cut:
    """How a text becomes shards.

    Attributes:
        directory: where they go; the tokenizer lies in it.
        specials: how its vocabulary spells its special tokens.
        min_tokens: shorter documents are dropped and counted.
        characters: text per shard; the shard ends with the document that fills it.
        threshold: documents whose hash is below it are held out.
    """

    directory: Path
    specials: Specials
    min_tokens: int
    characters: int
    threshold: int


@dataclass(frozen=True)
class Report:
    """What became of one shard's documents.

    Attributes:
        name: the shard's.
        documents: that are stored.
        lines: that are stored.
        tokens: that are stored.
        unknown_tokens: how many of them are the unknown id.
        dropped_documents: shorter than the minimum.
        dropped_tokens: in them.
        counted_tokens: that the tokenizer made, stored or dropped.
        sha256: of the token file; empty where there is none.
    """

    name: str
    documents: int
    lines: int
    tokens: int
    unknown_tokens: int
    dropped_documents: int
    dropped_tokens: int
    counted_tokens: int
    sha256: str


@dataclass(frozen=True)
class _Task:
    """Documents to tokenise into one shard."""

    cut: Cut
    name: str
    documents: Sequence[Sequence[str]]

    @property
    def path(self) -> Path:
        """What the names of the shard's files begin with."""
        return self.cut.directory / self.name

    @property
    def report_path(self) -> Path:
        return self.path.with_name(self.name + REPORT_SUFFIX)


def write_shards(scan: Scan, cut: Cut, workers: int) -> list[Report]:
    """Tokenises what earlier builds left to do.

    Args:
        scan: the text.
        cut: how to cut it, and where the shards go.
        workers: processes. The tasks in flight are one more, so that memory is bounded.

    Returns:
        The reports of all shards, in the order of the text.

    Raises:
        BrokenProcessPool: a worker was killed.
        InputError: the text is not the scanned one.
        StorageError: a file could not be written.
    """
    single = scan.characters <= cut.characters
    pool = None if single or workers == 1 else _start_pool(workers)
    reports: list[Report] = []
    in_flight: deque[tuple[int, Future[Report]]] = deque()
    bar = tqdm(
        total=scan.characters,
        unit="char",
        unit_scale=True,
        disable=not sys.stderr.isatty(),
    )

    def collect() -> None:
        size, future = in_flight.popleft()
        reports.append(future.result())
        bar.update(size)
        if bar.disable:
            print(f"{reports[-1].name}: {reports[-1].tokens:,} tokens", flush=True)

    try:
        for task in _tasks(scan, cut):
            size = sum(map(len, chain.from_iterable(task.documents)))
            in_flight.append((size, _submit(pool, task)))
            if pool is None or len(in_flight) > workers:
                collect()
        while in_flight:
            collect()
    finally:
        bar.close()
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return reports


def summarise(reports: Sequence[Report]) -> dict[str, dict[str, Any]]:
    """Adds reports up, by split, as corpus.json has it.

    Raises:
        StorageError: the splits do not account for every token that was counted.
    """
    splits = {name: _summarise_split(name, reports) for name in store.SPLITS}
    counted = sum(report.counted_tokens for report in reports)
    stored = sum(split["tokens"] for split in splits.values())
    dropped = sum(split["dropped_tokens"] for split in splits.values())
    if stored + dropped != counted:
        raise StorageError(
            f"tokens were lost: the tokenizer counted {counted:,}, but {stored:,} are"
            f" stored and {dropped:,} dropped"
        )
    return splits


def _summarise_split(split: str, reports: Sequence[Report]) -> dict[str, Any]:
    own = [asdict(r) for r in reports if r.name.startswith(f"{split}-")]
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


def _tasks(scan: Scan, cut: Cut) -> Iterator[_Task]:
    """Cuts the text, in its order, with a shard of each split open at a time."""
    documents: dict[str, list[list[str]]] = {name: [] for name in store.SPLITS}
    characters = dict.fromkeys(store.SPLITS, 0)
    numbers = dict.fromkeys(store.SPLITS, 0)

    def close(split: str) -> _Task:
        task = _Task(cut, f"{split}-{numbers[split]:05d}", documents[split])
        documents[split], characters[split] = [], 0
        numbers[split] += 1
        return task

    for key, document in scan.documents():
        split = "valid" if key < cut.threshold else "train"
        documents[split].append(document)
        characters[split] += sum(map(len, document))
        if characters[split] >= cut.characters:
            yield close(split)
    for split in store.SPLITS:
        if documents[split]:
            yield close(split)


def _submit(pool: ProcessPoolExecutor | None, task: _Task) -> Future[Report]:
    """Hands a task to the pool, does it here, or finds it done by an earlier build."""
    done = task.report_path.exists()
    if pool is not None and not done:
        return pool.submit(_write_shard, task)
    future: Future[Report] = Future()
    future.set_result(
        Report(**json.loads(task.report_path.read_bytes()))
        if done
        else _write_shard(task)
    )
    return future


def _write_shard(task: _Task) -> Report:
    """Tokenises documents, writes their shard and its report; runs in a worker."""
    tokenizer = load_wordpiece(
        task.cut.directory / store.TOKENIZER / VOCABULARY_FILE, task.cut.specials
    )
    lines = list(chain.from_iterable(task.documents))
    tokens, line_lengths = _encode(tokenizer, lines)
    counted = len(tokens)
    document_lines = np.array([len(document) for document in task.documents])
    line_ends = _offsets(line_lengths)
    document_lengths = np.diff(line_ends[_offsets(document_lines)])
    kept = document_lengths >= task.cut.min_tokens
    tokens = tokens[np.repeat(kept, document_lengths)]
    line_lengths = line_lengths[np.repeat(kept, document_lines)]
    line_lengths = line_lengths[line_lengths > 0]
    arrays = {
        "documents": _offsets(document_lengths[kept]),
        "lines": _offsets(line_lengths),
        "tokens": tokens,
    }
    report = Report(
        name=task.name,
        documents=int(kept.sum()),
        lines=len(line_lengths),
        tokens=len(tokens),
        unknown_tokens=int((tokens == tokenizer.unk_id).sum()),
        dropped_documents=int((~kept).sum()),
        dropped_tokens=int(document_lengths[~kept].sum()),
        counted_tokens=counted,
        sha256=_write_arrays(task.path, arrays) if len(tokens) else "",
    )
    store.write_json(task.report_path, asdict(report))
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


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> str:
    """Writes a shard's arrays; returns the sha256 of its token file."""
    files = {kind: path.with_name(f"{path.name}.{kind}.npy") for kind in arrays}
    for kind, array in arrays.items():
        store.write_array(files[kind], array)
    with files["tokens"].open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
