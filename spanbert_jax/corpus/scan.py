"""The first reading: what documents there are, which to hold out, which are repeated.

A build reads its text up to three times and keeps none of it. The first reading leaves
a hash of each document on disk, by which the later ones make sure that they see the
same text. Memory does not grow with the text: at most by a byte a document, where
repeated ones are looked for.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from spanbert_jax.corpus import store
from spanbert_jax.corpus.cleaning import Dirt
from spanbert_jax.corpus.parts import Part, hash_document
from spanbert_jax.corpus.runners import Job, Runner, Task
from spanbert_jax.corpus.sources import Source

# Hashes that are sorted at a time, to find the repeated ones: 64 MB of them.
_SORTED_AT_A_TIME = 8_000_000


@dataclass(frozen=True)
class _Task(Task):
    """One part to read."""

    part: Part
    key: str

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def marker(self) -> str:
        return f"{_name(self.part)}.json"


@dataclass(frozen=True)
class Scan:
    """What the first reading found; the hashes lie in a directory.

    Attributes:
        directory: where the hashes are.
        sources: what was read.
        parts: in which parts.
        documents: in each source.
        digests: of each source, over its documents' text.
        characters: in all documents.
        dirt: what was cleaned.
    """

    directory: Path
    sources: tuple[Source, ...]
    parts: tuple[Part, ...]
    documents: tuple[int, ...]
    digests: tuple[str, ...]
    characters: int
    dirt: Dirt

    def hashes(self) -> Iterator[np.ndarray]:
        """Yields the hashes of each part: uint64, memory-mapped."""
        for part in self.parts:
            yield load_hashes(part, self.directory)

    def describe(self) -> dict[str, Any]:
        """Returns the manifest's entries about the text, without any path."""
        columns = zip(self.sources, self.documents, self.digests, strict=True)
        return {
            "sources": [
                {
                    "name": source.name,
                    "bytes": source.size,
                    "format": source.format,
                    "documents": documents,
                    "digest": digest,
                }
                for source, documents, digest in columns
            ],
            "text": {
                "documents": sum(self.documents),
                "characters": self.characters,
                **asdict(self.dirt),
            },
        }


def scan(
    sources: Sequence[Source], parts: Sequence[Part], runner: Runner, directory: Path
) -> Scan:
    """Reads all text once, but for parts that an earlier start has read.

    Warns of sources without a document.

    Args:
        sources: what to read.
        parts: all of it, cut.
        runner: reads the parts.
        directory: takes the hashes.

    Raises:
        InputError: a source cannot be read.
        StorageError: a file cannot be written.
    """
    tasks = [_Task(part, _key(part)) for part in parts]
    key = hashlib.sha256("".join(task.key for task in tasks).encode()).hexdigest()[:16]
    left = [task for task in tasks if not _is_done(task, directory)]
    runner(Job("reading", scan_part, f"scan-{key}"), left, directory)
    documents = [0] * len(sources)
    digests = [hashlib.sha256() for _ in sources]
    characters, dirt = 0, Dirt()
    for task in tasks:
        record = store.read_json(directory / task.marker)
        hashes = load_hashes(task.part, directory)
        first = 0
        for number, count in record["documents"]:
            documents[number] += count
            digests[number].update(hashes[first : first + count].tobytes())
            first += count
        characters += record["characters"]
        dirt += Dirt(**record["dirt"])
    for source, count in zip(sources, documents, strict=True):
        if not count:
            where = source.location or source.name
            print(f"warning: {where} holds no text", file=sys.stderr, flush=True)
    return Scan(
        directory,
        tuple(sources),
        tuple(parts),
        tuple(documents),
        tuple(digest.hexdigest() for digest in digests),
        characters,
        dirt,
    )


def scan_part(task: _Task, directory: Path) -> None:
    """Reads a part; leaves its hashes and a record. Runs on any process."""
    hashes, characters, dirt = array("Q"), 0, Dirt()
    counts = {piece.source: 0 for piece in task.part.pieces}
    for source, document in task.part.documents(dirt):
        hashes.append(hash_document(document))
        counts[source] += 1
        characters += sum(map(len, document))
    path = directory / f"{_name(task.part)}.npy"
    store.write_array(path, np.frombuffer(hashes, np.uint64))
    record = {
        "key": task.key,
        "documents": list(counts.items()),
        "characters": characters,
        "dirt": asdict(dirt),
    }
    store.write_json(directory / task.marker, record)


def load_hashes(part: Part, directory: Path) -> np.ndarray:
    """The hash of each document of a part: uint64 [D], memory-mapped."""
    return np.load(directory / hashes_file(part), mmap_mode="r")


def hashes_file(part: Part) -> str:
    """The name of the file of a part's hashes."""
    return f"{_name(part)}.npy"


def _name(part: Part) -> str:
    return f"scan-{part.number:05d}"


def _key(part: Part) -> str:
    """What a part's hashes depend on: where the text is, and what it was when read."""
    stamps = [(source.location, source.stamp) for source in part.sources]
    reading = {
        field.name: getattr(part.reading, field.name) for field in fields(part.reading)
    }
    text = repr((reading, part.pieces, stamps))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_done(task: _Task, directory: Path) -> bool:
    path = directory / task.marker
    return path.exists() and store.read_json(path)["key"] == task.key


def held_out_threshold(
    hashes: Callable[[], Iterator[np.ndarray]], fraction: float
) -> int:
    """Chooses documents to hold out: those whose hash is below the number returned.

    They are round(fraction * D), at least one of two or more, never all. Equal
    documents have equal hashes and stay together, which can make it a few more, or
    none where all of the text is copies of one document.

    Args:
        hashes: yields the D hashes in arrays of uint64, in any order, at each call.
        fraction: share to hold out, in [0, 1).
    """
    # Radix selection: the wanted hash's upper 16 bits, then the wanted one itself.
    counts = np.zeros(2**16, np.int64)
    largest = 0
    for chunk in hashes():
        upper = (chunk >> np.uint64(48)).astype(np.int64)
        counts += np.bincount(upper, minlength=2**16)
        largest = max(largest, int(chunk.max(initial=0)))
    total = int(counts.sum())
    if fraction == 0 or total < 2:
        return 0
    wanted = min(max(round(fraction * total), 1), total - 1)
    ends = np.cumsum(counts)
    bucket = int(np.searchsorted(ends, wanted))
    inside = [chunk[chunk >> np.uint64(48) == bucket] for chunk in hashes()]
    rank = wanted - int(ends[bucket] - counts[bucket])
    last = int(np.sort(np.concatenate(inside))[rank - 1])
    return last if last == largest else last + 1


def repeated(
    hashes: Callable[[], Iterator[np.ndarray]],
    at_a_time: int = _SORTED_AT_A_TIME,
) -> list[np.ndarray]:
    """Finds the documents that an earlier one equals.

    Args:
        hashes: yields the hashes of each part, uint64, at each call.
        at_a_time: hashes to sort at a time, about; no influence on the result.

    Returns:
        bool, one array for each of `hashes`: whether the document is a repetition.
    """
    flags = [np.zeros(len(chunk), bool) for chunk in hashes()]
    total = sum(map(len, flags))
    # Equal hashes fall into the same range of values.
    shift = np.uint64(64 - max(total // at_a_time, 1).bit_length())
    for group in range(2 ** (64 - int(shift))):
        found, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        first = 0
        for chunk in hashes():
            own = np.flatnonzero(chunk >> shift == group)
            found.append(chunk[own])
            places.append(own + first)
            first += len(chunk)
        values, place = np.concatenate(found), np.concatenate(places)
        kept = np.zeros(len(values), bool)
        kept[np.unique(values, return_index=True)[1]] = True
        _set_flags(flags, place[~kept])
    return flags


def _set_flags(flags: list[np.ndarray], places: np.ndarray) -> None:
    """Sets places that are counted over all arrays."""
    ends = np.cumsum([len(part) for part in flags])
    owner = np.searchsorted(ends, places, side="right")
    for number in np.unique(owner):
        first = ends[number] - len(flags[number])
        flags[number][places[owner == number] - first] = True
