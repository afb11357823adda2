"""The first reading: what documents there are, and which of them are held out.

A build reads its text up to three times and keeps none of it. The first reading notes a
hash of each document, by which the later ones make sure that they see the same text.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spanbert_jax.corpus.sources import Replaced, Source, read_documents
from spanbert_jax.errors import InputError


@dataclass(frozen=True)
class Scan:
    """What the first reading found.

    Attributes:
        sources: what was read.
        text_field: JSON Lines: the key of the text.
        hashes: uint64 [D], one per document, in the order of the text.
        characters: in all documents.
        digests: per source, over its documents' text.
        replaced: what was not UTF-8.
    """

    sources: Sequence[Source]
    text_field: str
    hashes: np.ndarray
    characters: int
    digests: Sequence[str]
    replaced: Replaced

    def documents(self) -> Iterator[tuple[int, list[str]]]:
        """Reads again: yields each document's hash and lines.

        Raises:
            InputError: the text is not what it was, or can no longer be read.
        """
        position = 0
        for source in self.sources:
            for document in read_documents(source, self.text_field, Replaced()):
                key = _hash(document)
                if position >= len(self.hashes) or key != int(self.hashes[position]):
                    raise InputError(
                        f"--input: {source.path} changed while it was read"
                    )
                position += 1
                yield key, document
        if position != len(self.hashes):
            raise InputError("--input: the text changed while it was read")

    def describe(self) -> dict[str, Any]:
        """Returns the manifest's entries about the text, without any path."""
        return {
            "sources": [
                {
                    "name": source.name,
                    "bytes": source.size,
                    "format": source.format,
                    "digest": digest,
                }
                for source, digest in zip(self.sources, self.digests, strict=True)
            ],
            "text": {
                "documents": len(self.hashes),
                "characters": self.characters,
                "replaced_documents": self.replaced.documents,
                "replaced_characters": self.replaced.characters,
            },
        }


def scan(sources: Sequence[Source], text_field: str) -> Scan:
    """Reads all text once; warns of files without a document.

    Args:
        sources: what to read.
        text_field: JSON Lines: the key of the text.

    Raises:
        InputError: a file cannot be read.
    """
    hashes, digests, characters = array("Q"), [], 0
    replaced = Replaced()
    for source in sources:
        first = len(hashes)
        for document in read_documents(source, text_field, replaced):
            hashes.append(_hash(document))
            characters += sum(map(len, document))
        if len(hashes) == first:
            print(f"warning: {source.path} holds no text", file=sys.stderr, flush=True)
        digests.append(hashlib.sha256(hashes[first:].tobytes()).hexdigest())
    found = np.frombuffer(hashes, np.uint64)
    return Scan(sources, text_field, found, characters, digests, replaced)


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


def _hash(document: list[str]) -> int:
    digest = hashlib.blake2b("\n".join(document).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")
