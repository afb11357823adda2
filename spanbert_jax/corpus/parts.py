"""Parts: what one process reads at a time, whole small sources or pieces of large ones.

The cut depends on the sources alone, so that every way to build a corpus cuts alike.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spanbert_jax.corpus.cleaning import Dirt
from spanbert_jax.corpus.readers import Document, read_documents
from spanbert_jax.corpus.sources import Piece, Reading, Source, cut_into_parts

# A shard is up to five open files to its readers, a part makes up to two shards, and
# 1024 files are often all that a process may open.
_MOST_PARTS = 100
_LEAST_PART_SIZE = 16_000_000


@dataclass(frozen=True)
class Part:
    """Pieces of text that follow each other.

    Attributes:
        number: its place in the text, from 0.
        pieces: its pieces.
        sources: the source of each piece.
        reading: how to read them.
    """

    number: int
    pieces: tuple[Piece, ...]
    sources: tuple[Source, ...]
    reading: Reading

    @property
    def size(self) -> int:
        """Its share of the sources, in bytes on disk."""
        return sum(piece.size for piece in self.pieces)

    def documents(self, dirt: Dirt) -> Iterator[tuple[int, Document]]:
        """Reads the part.

        Args:
            dirt: counts what is cleaned.

        Yields:
            For each document its source's number, and its lines.

        Raises:
            InputError: a source cannot be read.
        """
        for piece, source in zip(self.pieces, self.sources, strict=True):
            for document in read_documents(source, piece, self.reading, dirt):
                yield piece.source, document


def cut(
    sources: Sequence[Source], reading: Reading, part_size: int | None
) -> list[Part]:
    """Cuts sources into parts.

    Args:
        sources: what to read.
        reading: how to read it.
        part_size: bytes on disk of a part, about; None chooses by the size of it all.
    """
    if part_size is None:
        whole = sum(source.size for source in sources)
        part_size = max(_LEAST_PART_SIZE, whole // _MOST_PARTS)
    return [
        Part(number, pieces, tuple(sources[p.source] for p in pieces), reading)
        for number, pieces in enumerate(cut_into_parts(sources, part_size, reading))
    ]


def hash_document(document: Document) -> int:
    """64 bits that equal documents have in common, and hardly any others."""
    digest = hashlib.blake2b("\n".join(document).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")
