"""The vocabulary that lies beside foreign weights, to be compared with a corpus's."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from spanbert_jax.corpus.tokenizers import VOCABULARY_FILE, Tokenizer
from spanbert_jax.corpus.wordpiece import parse_lines
from spanbert_jax.errors import InputError

_FAST = "tokenizer.json"
_CONFIG = "tokenizer_config.json"


class Vocabulary(NamedTuple):
    """What weights were trained with, as far as it is known.

    Attributes:
        tokens: by id.
        lowercase: whether text was made lower case; None if nobody says so.
    """

    tokens: tuple[str, ...]
    lowercase: bool | None


def read_vocabulary(path: Path) -> Vocabulary | None:
    """Reads vocab.txt, or tokenizer.json, as Hugging Face and BERT leave them.

    Args:
        path: of the weights: their directory, or a file in it.

    Returns:
        The vocabulary; None if there is none.

    Raises:
        InputError: a file cannot be read.
    """
    directory = path if path.is_dir() else path.parent
    try:
        if (directory / VOCABULARY_FILE).exists():
            tokens = tuple(parse_lines((directory / VOCABULARY_FILE).read_bytes()))
        elif (directory / _FAST).exists():
            tokens = _read_fast(directory / _FAST)
        else:
            return None
        lowercase = None
        if (directory / _CONFIG).exists():
            lowercase = _read_json(directory / _CONFIG).get("do_lower_case")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"init_from={path}: its vocabulary cannot be read: {error!r}"
        ) from error
    return Vocabulary(tokens, lowercase)


def check_vocabulary(found: Vocabulary, tokenizer: Tokenizer, where: str) -> None:
    """Checks that ids mean the same to weights and to a corpus.

    Args:
        found: of the weights.
        tokenizer: of the corpus.
        where: the setting and the path of the weights, for error messages.

    Raises:
        InputError: they differ in size, in a token, or in the case of the text.
    """
    hint = "prepare the corpus with --vocab and the vocabulary of the weights"
    if len(found.tokens) != tokenizer.vocab_size:
        raise InputError(
            f"{where} has {len(found.tokens)} tokens in its vocabulary, data.corpus has"
            f" {tokenizer.vocab_size}; {hint}"
        )
    pairs = zip(found.tokens, tokenizer.tokens, strict=True)
    for index, (theirs, ours) in enumerate(pairs):
        if theirs != ours:
            raise InputError(
                f"{where}: token {index} of its vocabulary is {theirs!r}, of that of"
                f" data.corpus {ours!r}; {hint}"
            )
    if found.lowercase not in (None, tokenizer.normalisation.lowercase):
        raise InputError(
            f"{where} has do_lower_case={found.lowercase} in {_CONFIG}, but the text of"
            " data.corpus was"
            f" {'' if tokenizer.normalisation.lowercase else 'not '}made lower case;"
            " prepare it again, or mend that file if it is wrong"
        )


def _read_fast(path: Path) -> tuple[str, ...]:
    """A dict of WordPiece and BPE, a list of pairs of unigram; and what was added."""
    content = _read_json(path)
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
    by_id = {i: token for token, i in (vocabulary | added).items()}
    return tuple(by_id[i] for i in range(len(by_id)))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())
