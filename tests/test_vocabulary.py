"""Vocabulary: that of foreign weights is read, and compared with a corpus's."""

import json
from pathlib import Path

import pytest

from spanbert_jax.corpus.tokenizers import Normalisation, Tokenizer, load_tokenizer
from spanbert_jax.errors import InputError
from spanbert_jax.interop.vocabulary import (
    Vocabulary,
    check_vocabulary,
    read_vocabulary,
)

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##s", "\u2028", "é")
WHERE = "init_from=somewhere"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_bytes("".join(t + "\n" for t in TOKENS).encode())
    return tmp_path


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory / "vocab.txt")


def refusal(found: Vocabulary, tokenizer: Tokenizer) -> str:
    with pytest.raises(InputError, match="init_from=somewhere") as caught:
        check_vocabulary(found, tokenizer, WHERE)
    return str(caught.value)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_lines_are_tokens(tmp_path: Path, end: str, start: str) -> None:
    text = start + "".join(token + end for token in TOKENS)
    (tmp_path / "vocab.txt").write_bytes(text.encode())
    assert read_vocabulary(tmp_path) == Vocabulary(TOKENS, None)
    assert read_vocabulary(tmp_path / "pytorch_model.bin") == Vocabulary(TOKENS, None)


@pytest.mark.parametrize(
    "vocabulary",
    [
        {token: i for i, token in enumerate(TOKENS[:-1])},
        [[token, -1.5] for token in TOKENS[:-1]],
    ],
)
def test_a_fast_tokenizer_has_its_added_tokens_too(
    tmp_path: Path, vocabulary: object
) -> None:
    added = [{"content": TOKENS[4], "id": 4}, {"content": TOKENS[8], "id": 8}]
    content = {"model": {"vocab": vocabulary}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert read_vocabulary(tmp_path) == Vocabulary(TOKENS, None)


@pytest.mark.parametrize("lowercase", [False, True])
def test_the_case_is_what_the_config_says(directory: Path, lowercase: bool) -> None:
    content = {"do_lower_case": lowercase}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    assert read_vocabulary(directory) == Vocabulary(TOKENS, lowercase)


def test_there_may_be_none(tmp_path: Path) -> None:
    assert read_vocabulary(tmp_path) is None


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model": {}}', b"\xff"])
def test_a_broken_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"):
        read_vocabulary(tmp_path)


def test_equal_vocabularies_pass(tokenizer: Tokenizer) -> None:
    for lowercase in (None, False):
        check_vocabulary(Vocabulary(TOKENS, lowercase), tokenizer, WHERE)


def test_another_size_names_both(tokenizer: Tokenizer) -> None:
    message = refusal(Vocabulary(TOKENS[:7], None), tokenizer)
    assert "7 tokens" in message
    assert "has 9;" in message


def test_another_token_names_both_and_its_id(tokenizer: Tokenizer) -> None:
    tokens = (*TOKENS[:5], "The", *TOKENS[6:])
    message = refusal(Vocabulary(tokens, None), tokenizer)
    assert "token 5 of its vocabulary is 'The'" in message
    assert "'the'" in message


def test_another_case_is_an_error(directory: Path, tokenizer: Tokenizer) -> None:
    assert "not made lower case" in refusal(Vocabulary(TOKENS, True), tokenizer)
    lower = Normalisation(lowercase=True)
    folded = load_tokenizer(directory / "vocab.txt", normalisation=lower)
    check_vocabulary(Vocabulary(TOKENS, True), folded, WHERE)
    assert "was made lower case" in refusal(Vocabulary(TOKENS, False), folded)
