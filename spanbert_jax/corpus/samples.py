"""The sample: the training text that a vocabulary is learnt from."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spanbert_jax.corpus import store
from spanbert_jax.corpus.cleaning import Dirt
from spanbert_jax.corpus.parts import Part, hash_document
from spanbert_jax.corpus.runners import Job, Runner, Task
from spanbert_jax.corpus.scan import Scan


@dataclass(frozen=True)
class _Task(Task):
    """One part to take a sample of: the documents whose hash is at least `lowest`."""

    part: Part
    lowest: int

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
    """Yields the lines of a sample of the training documents.

    Args:
        scan: the text.
        characters: about how many to take; all of a smaller text.
        threshold: documents whose hash is below it are held out.
        runner: reads the parts.
        directory: keeps the sample of each part until the last line was taken.
        key: names all that decides what the sample holds.

    Raises:
        InputError: a source cannot be read.
        StorageError: a file cannot be written.
    """
    # The held-out documents have the smallest hashes: sample from the other end.
    share = min(1.0, characters / max(scan.characters, 1))
    lowest = max(threshold, int((1 - share) * 2**64))
    tasks = [_Task(part, lowest) for part in scan.parts]
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
    documents = (
        document
        for _, document in task.part.documents(Dirt())
        if hash_document(document) >= task.lowest
    )
    lines = (line + "\n" for document in documents for line in document)
    store.write_lines(directory / task.marker, lines)
