"""The mixture: the corpora of a run, one or several with the same vocabulary."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanbert_jax.corpus.store import Corpus
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.errors import InputError


@dataclass(frozen=True)
class Mixture:
    """Opened corpora, in the order of the settings.

    Attributes:
        corpora: at least one, with the same vocabulary.
    """

    corpora: tuple[Corpus, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all of them."""
        return self.corpora[0].tokenizer

    @property
    def fingerprint(self) -> str:
        """Names the content of all; that of the corpus itself if there is one."""
        names = [corpus.fingerprint for corpus in self.corpora]
        if len(names) == 1:
            return names[0]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    @property
    def unigram_counts(self) -> np.ndarray:
        """int64 [V]: how often each token is in the training splits, unweighted."""
        return np.sum([corpus.unigram_counts for corpus in self.corpora], axis=0)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Short names, none twice."""
        short = [corpus.directory.resolve().name for corpus in self.corpora]
        if len(set(short)) == len(short):
            return tuple(short)
        return tuple(f"{number}-{name}" for number, name in enumerate(short, start=1))


def mix(corpora: Sequence[Corpus]) -> Mixture:
    """Makes a mixture of corpora.

    Raises:
        InputError: their tokenizers differ, or a corpus is there twice.
    """
    first = corpora[0]
    for place, corpus in enumerate(corpora[1:], start=1):
        for key in ("tokenizer", "normalisation"):
            if corpus.manifest[key] != first.manifest[key]:
                raise InputError(
                    f"data.corpus: {corpus.directory} and {first.directory} differ in"
                    f" their {key}; prepare one with the options of the other and"
                    f" --vocab={first.directory / first.manifest['tokenizer']['file']}"
                )
        if corpus.fingerprint in {c.fingerprint for c in corpora[:place]}:
            raise InputError(
                f"data.corpus: {corpus.directory} is there twice; data.weights says how"
                " often to read it"
            )
    return Mixture(tuple(corpora))
