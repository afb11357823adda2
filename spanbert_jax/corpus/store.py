"""The corpus directory: token ids on disk, opened as memory maps.

corpus.json                  what is in it; written last, so it marks a whole corpus
tokenizer/vocab.txt          or tokenizer.model
unigram.npy                  int64 [V]: how often each token is in the training split
train-00000.tokens.npy       uint16 or uint32 [T]: the ids of all documents in a row
train-00000.documents.npy    int64 [D+1]: document d is tokens[x[d]:x[d+1]]
train-00000.lines.npy        int64 [S+1]: the same for its lines
train-00000.entities.npy     int64 [N, 2]: named entities, tokens x[n, 0]:x[n, 1]
train-00000.noun_phrases.npy the same for noun phrases; both only where asked for
valid-00000...
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from spanbert_jax.corpus.tokenizers import (
    Normalisation,
    Specials,
    Tokenizer,
    load_tokenizer,
)
from spanbert_jax.errors import InputError, StorageError

FORMAT_VERSION = 2
MANIFEST = "corpus.json"
TOKENIZER = "tokenizer"
UNIGRAM = "unigram.npy"
SPLITS = ("train", "valid")

_PREPARE = "python -m spanbert_jax.prepare --input=FILES --output={}"


@dataclass(frozen=True)
class Shard:
    """One part of a split.

    Attributes:
        name: such as "train-00000".
        tokens: uint16 or uint32 [T], a memory map.
        documents: int64 [D+1], a memory map: offsets into `tokens`, rising, 0 to T.
        lines: int64 [S+1], a memory map: the same; documents start at line starts.
        tags: by kind, such as "entities", int64 [N, 2], memory maps: first token and
            one past the last, rising, not overlapping.
    """

    name: str
    tokens: np.ndarray
    documents: np.ndarray
    lines: np.ndarray
    tags: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """The training or the held-out documents; `shards` may be empty."""

    name: str
    shards: tuple[Shard, ...]

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return sum(len(shard.documents) - 1 for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(len(shard.tokens) for shard in self.shards)


@dataclass(frozen=True)
class Corpus:
    """An opened corpus directory.

    Attributes:
        directory: where it lies.
        manifest: the content of its corpus.json.
    """

    directory: Path
    manifest: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Names the content: equal files, order and options give it on any machine."""
        return self.manifest["fingerprint"]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that lies in the directory.

        Raises:
            InputError: it is missing, or not the one that the corpus was made with.
        """
        return open_tokenizer(self.directory, self.manifest, "data.corpus")

    @functools.cached_property
    def unigram_counts(self) -> np.ndarray:
        """int64 [V]: how often each token is in the training split."""
        return _open_array(
            self.directory / UNIGRAM, self.manifest["tokenizer"]["vocabulary_size"]
        )

    def split(self, name: str) -> Split:
        """Opens a split, "train" or "valid".

        Raises:
            InputError: there is no such split, or a file of it is missing, cut short
                or at odds with corpus.json.
        """
        if name not in self._splits:
            known = ", ".join(self._splits)
            raise InputError(f"{self.directory} has no split {name!r}, only {known}")
        return self._splits[name]

    @functools.cached_property
    def _splits(self) -> dict[str, Split]:
        size = self.manifest["tokenizer"]["vocabulary_size"]
        return {
            name: Split(
                name,
                tuple(
                    _open_shard(self.directory, entry, token_dtype(size))
                    for entry in recorded["shards"]
                ),
            )
            for name, recorded in self.manifest["splits"].items()
        }


def open_corpus(directory: str | os.PathLike[str]) -> Corpus:
    """Opens a corpus and checks that all of it is there.

    Args:
        directory: what `python -m spanbert_jax.prepare` wrote.

    Raises:
        InputError: there is no corpus, it is of another format version, or a file is
            missing, cut short or at odds with corpus.json.
    """
    directory = Path(directory)
    manifest = _read_manifest(directory)
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise InputError(
            f"data.corpus={directory} has format version {version}, this program reads"
            f" {FORMAT_VERSION}; prepare it again"
        )
    if manifest.get("fingerprint") != fingerprint(manifest):
        raise InputError(
            f"data.corpus: {directory / MANIFEST} was changed after the corpus was made"
        )
    corpus = Corpus(directory, manifest)
    _ = corpus.tokenizer, corpus.unigram_counts
    for name, recorded in manifest["splits"].items():
        split = corpus.split(name)
        counted = {"documents": split.num_documents, "tokens": split.num_tokens}
        for key, count in counted.items():
            if count != recorded[key]:
                raise InputError(
                    f"data.corpus={directory}: split {name} has {count} {key},"
                    f" corpus.json says {recorded[key]}"
                )
    return corpus


def fingerprint(manifest: dict[str, Any]) -> str:
    """Returns the sha256 of a manifest's canonical JSON, its fingerprint left out."""
    content = {key: item for key, item in manifest.items() if key != "fingerprint"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the narrowest dtype of the two that tokens are stored in."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def describe_tokenizer(
    tokenizer: Tokenizer, directory: str = TOKENIZER
) -> dict[str, Any]:
    """Returns the manifest's entries about the tokenizer, whose file is in a directory.

    The directory is relative to that of the manifest.
    """
    ids = zip(asdict(tokenizer.specials), tokenizer.special_ids, strict=True)
    return {
        "tokenizer": {
            "kind": tokenizer.kind,
            "file": str(PurePosixPath(directory, tokenizer.file_name)),
            "sha256": tokenizer.sha256,
            "vocabulary_size": tokenizer.vocab_size,
            "special_tokens": {
                role: {"token": tokenizer.tokens[i], "id": i} for role, i in ids
            },
        },
        "normalisation": asdict(tokenizer.normalisation),
    }


def open_tokenizer(
    directory: Path, content: Mapping[str, Any], setting: str
) -> Tokenizer:
    """Opens the tokenizer that `describe_tokenizer` described.

    Args:
        directory: that the file's path is relative to.
        content: with the entries of the description.
        setting: the flag or config key that named the directory, for error messages.

    Raises:
        InputError: the file is missing, or was changed since.
    """
    recorded = content["tokenizer"]
    specials = {
        role: entry["token"] for role, entry in recorded["special_tokens"].items()
    }
    path = directory / recorded["file"]
    tokenizer = load_tokenizer(
        path, Specials(**specials), Normalisation(**content["normalisation"]), setting
    )
    if tokenizer.sha256 != recorded["sha256"]:
        raise InputError(
            f"{setting}: {path} was changed since it was written: its sha256 is"
            f" {tokenizer.sha256}, not {recorded['sha256']}"
        )
    return tokenizer


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that gets its name when it is there in full.

    Raises:
        StorageError: it could not be written.
    """
    # The process id keeps a worker that outlived a killed build off our files.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def write_array(path: Path, array: np.ndarray) -> None:
    """Writes a .npy file that is there in full or not at all.

    Raises:
        StorageError: it could not be written.
    """
    with replacing(path) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


@contextlib.contextmanager
def appending(
    path: Path, dtype: np.dtype | type, *columns: int
) -> Iterator[Callable[[np.ndarray], None]]:
    """Writes a .npy file bit by bit, so that it need not fit into memory.

    Args:
        path: the file; it is there in full in the end, or not at all.
        dtype: of its elements.
        columns: the shape of a row.

    Yields:
        A function that appends rows.

    Raises:
        StorageError: it could not be written.
    """
    rows = 0

    def header(file: BinaryIO) -> None:
        # NumPy leaves room in it for any number of rows.
        content = {
            "descr": np.dtype(dtype).str,
            "fortran_order": False,
            "shape": (rows, *columns),
        }
        np.lib.format.write_array_header_1_0(file, content)

    with replacing(path) as file:
        header(file)
        begin = file.tell()

        def append(array: np.ndarray) -> None:
            nonlocal rows
            rows += len(array)
            file.write(np.ascontiguousarray(array, dtype).tobytes())

        yield append
        file.seek(0)
        header(file)
        assert file.tell() == begin, "the header outgrew its place"


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes a text file that is there in full or not at all.

    Args:
        path: the file.
        lines: each with its line end.

    Raises:
        StorageError: it could not be written.
    """
    with replacing(path) as file:
        for line in lines:
            file.write(line.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that is there in full or not at all.

    Raises:
        StorageError: it could not be written.
    """
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Reads what `write_json` wrote."""
    return json.loads(path.read_bytes())


def sync(path: Path) -> None:
    """Makes a file, or the names in a directory, last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"data.corpus={directory} is no corpus, there is no {path.name} in it; make"
            f" one with: {_PREPARE.format(directory)}"
        ) from error
    except OSError as error:
        raise InputError(f"data.corpus={directory}: {error}") from error
    except ValueError as error:
        raise InputError(f"data.corpus: {path} is not JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise InputError(f"data.corpus: {path} is not a JSON object")
    return manifest


def _open_shard(directory: Path, entry: dict[str, Any], dtype: np.dtype) -> Shard:
    name = entry["name"]
    tokens = _open_array(directory / f"{name}.tokens.npy", entry["tokens"], dtype)
    documents = directory / f"{name}.documents.npy"
    lines = directory / f"{name}.lines.npy"
    shard = Shard(
        name,
        tokens,
        _open_array(documents, entry["documents"] + 1),
        _open_array(lines, entry["lines"] + 1),
        {
            kind: _open_array(directory / f"{name}.{kind}.npy", count, columns=2)
            for kind, count in entry["tags"].items()
        },
    )
    for path, offsets in ((documents, shard.documents), (lines, shard.lines)):
        if offsets[0] != 0 or offsets[-1] != len(tokens):
            raise InputError(
                f"data.corpus: {path} runs from {offsets[0]} to {offsets[-1]}, its"
                f" {len(tokens)} tokens from 0 to {len(tokens)}"
            )
    return shard


def _open_array(
    path: Path, length: int, dtype: Any = np.int64, columns: int = 0
) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise InputError(f"data.corpus: {path} is missing") from error
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"data.corpus: {path} is cut short or broken: {error}"
        ) from error
    shape = (length, columns) if columns else (length,)
    if array.shape != shape or array.dtype != dtype:
        raise InputError(
            f"data.corpus: {path} holds {array.dtype} {array.shape}, corpus.json says"
            f" {np.dtype(dtype)} {shape}"
        )
    return array
