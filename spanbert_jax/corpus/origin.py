"""The origin of a model: tokenizer and text of a run, kept beside what it makes.

So that a checkpoint can be used, exported and described where its corpus is not.
"""

from pathlib import Path
from typing import Any, NamedTuple

from spanbert_jax.corpus import store
from spanbert_jax.corpus.mixture import Mixture
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.errors import InputError, StorageError

FILE = "origin.json"


class Origin(NamedTuple):
    """What a model was trained on.

    Attributes:
        tokenizer: the tokenizer.
        corpora: for each corpus its "name", "fingerprint", "sources" and, by split, its
            "documents" and "tokens".
    """

    tokenizer: Tokenizer
    corpora: list[dict[str, Any]]


def describe(corpora: Mixture) -> Origin:
    """The origin of what is trained on some corpora."""
    return Origin(
        corpora.tokenizer,
        [
            {
                "name": name,
                "fingerprint": corpus.fingerprint,
                "sources": corpus.manifest["sources"],
                "splits": {
                    split: {key: entry[key] for key in ("documents", "tokens")}
                    for split, entry in corpus.manifest["splits"].items()
                },
            }
            for name, corpus in zip(corpora.names, corpora.corpora, strict=True)
        ],
    )


def write(origin: Origin, directory: Path) -> None:
    """Writes origin.json and, below tokenizer/, the tokenizer's file.

    Raises:
        StorageError: they cannot be written.
    """
    tokenizer = origin.tokenizer
    try:
        (directory / store.TOKENIZER).mkdir(exist_ok=True)
        tokenizer.save(directory / store.TOKENIZER)
    except OSError as error:
        raise StorageError(f"cannot write to {directory}: {error}") from error
    content = {**store.describe_tokenizer(tokenizer), "corpora": origin.corpora}
    store.write_json(directory / FILE, content)


def read(directory: Path, setting: str) -> Origin:
    """Reads what `write` wrote.

    Args:
        directory: where to.
        setting: the flag or config key that named it, for error messages.

    Raises:
        InputError: it is not there, or was changed since.
    """
    path = directory / FILE
    try:
        content = store.read_json(path)
        corpora = content["corpora"]
        tokenizer = store.open_tokenizer(directory, content, setting)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{setting}: {path} cannot be read: {error!r}") from error
    return Origin(tokenizer, corpora)
