"""Text in many scripts and tokenizers learned from it, for the tests of tokenizers."""

import os
import random
import subprocess
import sys
from pathlib import Path

from spanbert_jax.corpus.sentencepiece import train_sentencepiece
from spanbert_jax.corpus.tokenizers import Normalisation, Tokenizer
from spanbert_jax.corpus.wordpiece import train_wordpiece

KINDS = ("wordpiece", "unigram", "bpe")
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcXYZéïİßñÅÀΣςΔжアがकि한"
MARKS = "\u0301\u0327"
CJK = "中文字𠀀"
PUNCTUATION = ".,'-_$“—[]("
ODD = "😀ﬁ½Ⅳ\u00ad\t\0\x01\ufffd\u2581\u2028\ufeff\u200b\u00a0\u3000"


def random_lines(count: int, seed: int = 0) -> list[str]:
    """Sentences over 150 invented words."""
    generator = random.Random(seed)
    words = [
        "".join(generator.choices("abcdefghijklmnoöp", k=generator.randint(1, 9)))
        for _ in range(150)
    ]
    return [" ".join(generator.choices(words, k=20)) + "." for _ in range(count)]


def tricky_lines(
    count: int, characters: str = LETTERS + MARKS + CJK + PUNCTUATION + ODD
) -> list[str]:
    """Strings over some characters and spaces, some empty, some with a word between."""
    generator = random.Random(7)
    pool = [*characters, *" " * (len(characters) // 4), "don't", " naïve ", "[MASK]"]
    return [
        "".join(generator.choices(pool, k=generator.randint(0, 30)))
        for _ in range(count)
    ]


def learn(
    kind: str, normalisation: Normalisation | None = None, vocab_size: int = 700
) -> Tokenizer:
    """Learns from both kinds of lines."""
    lines = [*random_lines(200), *tricky_lines(100)]
    if kind == "wordpiece":
        return train_wordpiece(lines, vocab_size, normalisation=normalisation)
    return train_sentencepiece(lines, vocab_size, kind, normalisation=normalisation)


def write_vocabulary(path: Path, tokens: list[str], end: str = "\n") -> Path:
    """Writes a WordPiece file."""
    path.write_bytes("".join(token + end for token in tokens).encode())
    return path


def spell(tokenizer: Tokenizer, line: str) -> list[str]:
    """The tokens of a line."""
    return [tokenizer.tokens[i] for i in tokenizer.encode([line])[0]]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, with this one's modules at hand."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
