"""The sample: the training text that a vocabulary is learnt from.

It is drawn by lines, not by documents: a text may be few and long ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spanbert_jax.corpus import store
from spanbert_jax.corpus.cleaning import Dirt
from spanbert_jax.corpus.parts import Part, hash_document
from spanbert_jax.corpus.runners import Job, Runner, Task
from spanbert_jax.corpus.scan import Scan
from spanbert_jax.corpus.tokenizers import cut

# Longer lines are drawn, and handed on, in pieces.
_LONGEST_LINE = 10_000
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64


@dataclass(frozen=True)
class _Task(Task):
    """One part to take a sample of.

    Attributes:
        part: the part.
        threshold: documents whose hash is below it are held out.
        share: of the lines, to draw.
    """

    part: Part
    threshold: int
    share: float

    @property
    def size(self) -> int:
        return self.part.size

    @property
    def marker(self) -> str:
        return f"sample-{self.part.number:05d}.txt"


def sample_lines(
    scan: Scan,
    characters: int,
    threshold: int,
    runner: Runner,
    directory: Path,
    key: str,
) -> Iterator[str]:
    """Yields a sample of the lines of the training documents.

    Args:
        scan: the text.
        characters: about how many to draw; all of a smaller text.
        threshold: documents whose hash is below it are held out.
        runner: reads the parts.
        directory: keeps the sample of each part until the last line was taken.
        key: names all that decides what the sample holds.

    Raises:
        InputError: a source cannot be read.
        StorageError: a file cannot be written.
    """
    share = min(1.0, characters / max(scan.characters, 1))
    tasks = [_Task(part, threshold, share) for part in scan.parts]
    left = [task for task in tasks if not (directory / task.marker).exists()]
    runner(Job("sampling", sample_part, f"sample-{key}"), left, directory)
    for task in tasks:
        with (directory / task.marker).open(encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.removesuffix("\n")
    for task in tasks:
        (directory / task.marker).unlink()


def sample_part(task: _Task, directory: Path) -> None:
    """Writes the sample of a part. Runs on any process."""
    store.write_lines(directory / task.marker, _draw(task))


def _draw(task: _Task) -> Iterator[str]:
    limit = int(task.share * _WORD)
    for _, document in task.part.documents(Dirt()):
        key = hash_document(document)
        if key < task.threshold:
            continue
        pieces = (piece for line in document for _, piece in cut(line, _LONGEST_LINE))
        for number, piece in enumerate(pieces):
            # Multiples of the golden ratio spread evenly over the range, from a start
            # that the document's content decides.
            if (key + number * _GOLDEN) % _WORD < limit:
                yield piece + "\n"
