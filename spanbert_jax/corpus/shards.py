"""Shards: the token ids of a part of the text on disk.

A part gives a shard to each split that has documents in it. When both are there, a
report lies beside them, by which a build that was interrupted knows what it need not do
again.
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from spanbert_jax.corpus import store
from spanbert_jax.corpus.cleaning import Dirt
from spanbert_jax.corpus.parts import Part, hash_document
from spanbert_jax.corpus.readers import Document
from spanbert_jax.corpus.runners import Job, Runner, Task
from spanbert_jax.corpus.scan import Scan, hashes_file, load_hashes
from spanbert_jax.corpus.tags import Tagging, find_tags, to_tokens
from spanbert_jax.corpus.tokenizers import (
    Normalisation,
    Specials,
    Tokenizer,
    load_saved,
)
from spanbert_jax.errors import InputError, StorageError

REPORT_PREFIX = "report-"

# Text that is tokenised at a time, in characters: lists of Python integers take twenty
# times an array's memory.
_CHUNK_CHARACTERS = 500_000
# What is counted for each split, in this order.
_COUNTS = (
    "documents",
    "lines",
    "tokens",
    "unknown_tokens",
    "dropped_documents",
    "dropped_tokens",
    "repeated_documents",
)


@dataclass(frozen=True)
class Recipe:
    """What becomes of the documents.

    Attributes:
        tokenizer_sha256: of the file in the directory of the tokenizer.
        specials: how its vocabulary spells its special tokens.
        normalisation: what it does to the text.
        min_tokens: shorter documents are dropped and counted.
        threshold: documents whose hash is below it are held out.
        drops_repeated: whether documents that equal an earlier one are dropped.
        tagging: what is tagged.
    """

    tokenizer_sha256: str
    specials: Specials
    normalisation: Normalisation
    min_tokens: int
    threshold: int
    drops_repeated: bool
    tagging: Tagging


@dataclass(frozen=True)
class _Task(Task):
    """A part to tokenise."""

    part: Part
    recipe: Recipe

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def inputs(self) -> tuple[str, ...]:
        files = (store.TOKENIZER, hashes_file(self.part))
        repeated = (repeated_file(self.part),) if self.recipe.drops_repeated else ()
        return files + repeated

    @property
    def marker(self) -> str:
        return f"{REPORT_PREFIX}{self.part.number:05d}.json"


@dataclass(frozen=True)
class _Chunk:
    """Some documents as tokens.

    Attributes:
        tokens: of all of them in a row.
        lines: int64, tokens of each line.
        documents: int64, tokens of each document.
        document_lines: int64, lines of each document.
        tags: by kind, int64 [N, 2], places in `tokens`.
        sources: int64, the source of each document.
        held_out: bool, whether each is held out.
        repeated: bool, whether each equals an earlier one and is dropped for it.
    """

    tokens: np.ndarray
    lines: np.ndarray
    documents: np.ndarray
    document_lines: np.ndarray
    tags: dict[str, np.ndarray]
    sources: np.ndarray
    held_out: np.ndarray
    repeated: np.ndarray


def repeated_file(part: Part) -> str:
    """The name of the file that says which documents of a part are repetitions."""
    return f"repeated-{part.number:05d}.npy"


def write_shards(
    scan: Scan, recipe: Recipe, runner: Runner, directory: Path, key: str
) -> list[dict[str, Any]]:
    """Tokenises what earlier builds left to do.

    Args:
        scan: the text.
        recipe: what becomes of it.
        runner: does the parts.
        directory: takes the shards; it has the tokenizer and the hashes.
        key: names all that decides what the shards hold.

    Returns:
        The reports of all parts, in the order of the text.

    Raises:
        BrokenProcessPool: a worker was killed.
        InputError: the text is not the scanned one, or is at fault.
        StorageError: a file could not be written.
    """
    tasks = [_Task(part, recipe) for part in scan.parts]
    left = [task for task in tasks if not (directory / task.marker).exists()]
    if len(left) < len(tasks):
        print(f"{len(tasks) - len(left)} of {len(tasks)} parts are there", flush=True)
    runner(Job("tokenising", write_part, f"shards-{key}"), left, directory)
    return [store.read_json(directory / task.marker) for task in tasks]


def write_part(task: _Task, directory: Path) -> None:
    """Tokenises a part; leaves its shards and a report. Runs on any process."""
    recipe = task.recipe
    tokenizer = _load_tokenizer(
        directory / store.TOKENIZER,
        recipe.tokenizer_sha256,
        recipe.specials,
        recipe.normalisation,
    )
    counts = {split: dict.fromkeys(_COUNTS, 0) for split in store.SPLITS}
    sources = {piece.source: np.zeros(2, np.int64) for piece in task.part.pieces}
    counted = 0
    with contextlib.ExitStack() as stack:
        shards = {
            split: _ShardWriter(
                directory / f"{split}-{task.part.number:05d}", tokenizer, recipe, stack
            )
            for split in store.SPLITS
        }
        for chunk in _chunks(task, directory, tokenizer):
            counted += len(chunk.tokens)
            for split, shard in shards.items():
                mine = chunk.held_out == (split == "valid")
                kept = mine & ~chunk.repeated & (chunk.documents >= recipe.min_tokens)
                part = _select(chunk, kept)
                shard.append(part)
                _count(counts[split], chunk, mine, part, tokenizer.unk_id)
                _count_sources(sources, part, tokenizer.unk_id)
    report = {
        "counted_tokens": counted,
        "splits": {
            split: counts[split] | shard.describe() for split, shard in shards.items()
        },
        "sources": [[number, *totals.tolist()] for number, totals in sources.items()],
    }
    store.write_json(directory / task.marker, report)


# A tokenizer gathers speed as it goes: a worker keeps its own from part to part.
@functools.lru_cache(maxsize=1)
def _load_tokenizer(
    directory: Path, sha256: str, specials: Specials, normalisation: Normalisation
) -> Tokenizer:
    tokenizer = load_saved(directory, specials, normalisation)
    if tokenizer.sha256 != sha256:
        raise StorageError(f"{directory} does not hold what was written there")
    return tokenizer


def _chunks(task: _Task, directory: Path, tokenizer: Tokenizer) -> Iterator[_Chunk]:
    """Reads a part and tokenises it bit by bit."""
    hashes = load_hashes(task.part, directory)
    repeated = np.zeros(len(hashes), bool)
    if task.recipe.drops_repeated:
        repeated = np.load(directory / repeated_file(task.part))
    first = last = characters = 0
    documents: list[Document] = []
    sources: list[int] = []

    def tokenise() -> _Chunk:
        return _tokenise(
            documents,
            np.array(sources, np.int64),
            hashes[first:last] < task.recipe.threshold,
            repeated[first:last],
            tokenizer,
            task.recipe.tagging,
        )

    for source, document in task.part.documents(Dirt()):
        if last >= len(hashes) or hash_document(document) != int(hashes[last]):
            raise _changed(task.part, source)
        documents.append(document)
        sources.append(source)
        last += 1
        characters += sum(map(len, document))
        if characters >= _CHUNK_CHARACTERS:
            yield tokenise()
            first, characters, documents, sources = last, 0, [], []
    if last < len(hashes):
        raise _changed(task.part, task.part.pieces[-1].source)
    if documents:
        yield tokenise()


def _changed(part: Part, number: int) -> InputError:
    (location, *_) = (
        source.location
        for piece, source in zip(part.pieces, part.sources, strict=True)
        if piece.source == number
    )
    return InputError(f"--input: {location} changed while it was read")


def _tokenise(
    documents: Sequence[Document],
    sources: np.ndarray,
    held_out: np.ndarray,
    repeated: np.ndarray,
    tokenizer: Tokenizer,
    tagging: Tagging,
) -> _Chunk:
    lines = list(chain.from_iterable(documents))
    tags = {kind: np.zeros((0, 2), np.int64) for kind in tagging.kinds}
    if tagging.kinds:
        encoded = tokenizer.encode_with_offsets(lines)
        ids = [line.ids for line in encoded]
        lengths = np.array([len(line) for line in ids], np.int64)
        begins = _offsets(lengths)[:-1]
        found = find_tags(lines, tagging)
        for kind in tagging.kinds:
            ranges = [
                to_tokens(tag[kind], line.begin, line.end) + begin
                for tag, line, begin in zip(found, encoded, begins, strict=True)
            ]
            tags[kind] = np.concatenate(ranges)
    else:
        ids = tokenizer.encode(lines)
        lengths = np.array([len(line) for line in ids], np.int64)
    document_lines = np.array([len(document) for document in documents], np.int64)
    dtype = store.token_dtype(tokenizer.vocab_size)
    return _Chunk(
        tokens=np.fromiter(chain.from_iterable(ids), dtype, int(lengths.sum())),
        lines=lengths,
        documents=np.diff(_offsets(lengths)[_offsets(document_lines)]),
        document_lines=document_lines,
        tags=tags,
        sources=sources,
        held_out=held_out,
        repeated=repeated,
    )


def _select(chunk: _Chunk, kept: np.ndarray) -> _Chunk:
    """The documents that are kept, and of their lines those that have tokens."""
    kept_tokens = np.repeat(kept, chunk.documents)
    kept_lines = np.repeat(kept, chunk.document_lines) & (chunk.lines > 0)
    place = _offsets(kept_tokens)
    # A tag lies in one document: its first token tells whether it stays.
    tags = {
        kind: place[ranges[kept_tokens[ranges[:, 0]]]]
        for kind, ranges in chunk.tags.items()
    }
    return _Chunk(
        tokens=chunk.tokens[kept_tokens],
        lines=chunk.lines[kept_lines],
        documents=chunk.documents[kept],
        document_lines=chunk.document_lines[kept],
        tags=tags,
        sources=chunk.sources[kept],
        held_out=chunk.held_out[kept],
        repeated=chunk.repeated[kept],
    )


def _count(
    counts: dict[str, int], chunk: _Chunk, mine: np.ndarray, kept: _Chunk, unk_id: int
) -> None:
    """Counts what became of the documents of a split."""
    counts["documents"] += len(kept.documents)
    counts["lines"] += len(kept.lines)
    counts["tokens"] += len(kept.tokens)
    counts["unknown_tokens"] += int((kept.tokens == unk_id).sum())
    counts["dropped_documents"] += int(mine.sum()) - len(kept.documents)
    counts["dropped_tokens"] += int(chunk.documents[mine].sum()) - len(kept.tokens)
    counts["repeated_documents"] += int((mine & chunk.repeated).sum())


def _count_sources(sources: dict[int, np.ndarray], kept: _Chunk, unk_id: int) -> None:
    """Adds the tokens, and the unknown ones, of each source."""
    owner = np.repeat(kept.sources, kept.documents)
    unknown = kept.tokens == unk_id
    for number in np.unique(kept.sources):
        own = owner == number
        sources[int(number)] += [int(own.sum()), int((own & unknown).sum())]


class _ShardWriter:
    """Appends documents to a shard's files; makes none where there is no document."""

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        recipe: Recipe,
        stack: contextlib.ExitStack,
    ) -> None:
        self._path, self._stack = path, stack
        self._kinds = recipe.tagging.kinds
        self._dtype = store.token_dtype(tokenizer.vocab_size)
        self._append: dict[str, Any] = {}
        self._tokens = 0
        self._tags = dict.fromkeys(self._kinds, 0)

    def append(self, chunk: _Chunk) -> None:
        """Appends the documents of a chunk."""
        if not len(chunk.documents):
            return
        if not self._append:
            self._open()
        self._append["tokens"](chunk.tokens)
        for name, lengths in (("documents", chunk.documents), ("lines", chunk.lines)):
            self._append[name](self._tokens + np.cumsum(lengths))
        for kind, ranges in chunk.tags.items():
            self._append[kind](self._tokens + ranges)
            self._tags[kind] += len(ranges)
        self._tokens += len(chunk.tokens)

    def _open(self) -> None:
        for name, dtype in (
            ("tokens", self._dtype),
            ("documents", np.int64),
            ("lines", np.int64),
        ):
            file = store.appending(self._file(name), dtype)
            self._append[name] = self._stack.enter_context(file)
        for kind in self._kinds:
            file = store.appending(self._file(kind), np.int64, 2)
            self._append[kind] = self._stack.enter_context(file)
        for name in ("documents", "lines"):
            self._append[name](np.zeros(1, np.int64))

    def describe(self) -> dict[str, Any]:
        """The report's entries about the shard; its files are closed."""
        if not self._append:
            return {"name": self._path.name, "tags": self._tags, "sha256": ""}
        with self._file("tokens").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"name": self._path.name, "tags": self._tags, "sha256": digest}

    def _file(self, kind: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{kind}.npy")


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def summarise(reports: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Adds reports up, by split, as corpus.json has it.

    Raises:
        StorageError: the splits do not account for every token that was counted.
    """
    splits = {name: _summarise_split(name, reports) for name in store.SPLITS}
    counted = sum(report["counted_tokens"] for report in reports)
    stored = sum(split["tokens"] for split in splits.values())
    dropped = sum(split["dropped_tokens"] for split in splits.values())
    if stored + dropped != counted:
        raise StorageError(
            f"tokens were lost: the tokenizer counted {counted:,}, but {stored:,} are"
            f" stored and {dropped:,} dropped"
        )
    return splits


def _summarise_split(split: str, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = [report["splits"][split] for report in reports]
    entry = ("name", "documents", "lines", "tokens", "tags", "sha256")
    return {
        **{key: sum(shard[key] for shard in own) for key in _COUNTS if key != "lines"},
        "shards": [
            {key: shard[key] for key in entry} for shard in own if shard["tokens"]
        ],
    }


def summarise_sources(reports: Sequence[dict[str, Any]], count: int) -> np.ndarray:
    """Returns int64 [count, 2]: tokens and unknown tokens that each source gave."""
    totals = np.zeros((count, 2), np.int64)
    for report in reports:
        for number, *row in report["sources"]:
            totals[number] += row
    return totals
