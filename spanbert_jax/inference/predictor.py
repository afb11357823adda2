"""The predictor: a trained model with its tokenizer, from texts to what it says."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.errors import InputError
from spanbert_jax.inference import reading
from spanbert_jax.inference.filling import Filled, Filler
from spanbert_jax.inference.reading import Tokens
from spanbert_jax.inference.scoring import Scorer
from spanbert_jax.interop.pretrained import portable_model, read_pretrained

# More than the default `top`, so that the search has a choice.
_BEAM = 8


@dataclass(frozen=True, eq=False)
class EncodedText:
    """A text as the model sees it: T tokens, [CLS] first and [SEP] last.

    Attributes:
        text: the text.
        token_ids: int32 [T].
        begin: int64 [T], each token's first character in the text; [CLS] has an empty
            range at the text's begin, [SEP] one at its end.
        end: int64 [T], one beyond its last character.
        hidden: float32 [T, D], the final hidden states.
    """

    text: str
    token_ids: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    hidden: np.ndarray

    def span_embeddings(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """What the model knows of spans by their boundaries: [x_{s-1}; x_{e+1}].

        A boundary is the token next to the span; at the text's ends it is [CLS] or
        [SEP].

        Args:
            spans: half-open ranges of characters. One that cuts a token takes all of
                it.

        Returns:
            float32 [n, 2D].

        Raises:
            InputError: a span is empty, beyond the text, or holds no token.
        """
        tokens = Tokens(self.token_ids, self.begin, self.end)
        places = [reading.places_of(tokens, self.text, *span) for span in spans]
        first, beyond = np.array(places, np.int64).reshape(-1, 2).T
        return np.concatenate([self.hidden[first - 1], self.hidden[beyond]], axis=1)


@dataclass(frozen=True, eq=False)
class Predictor:
    """A trained model, computed in float32, without dropout.

    In texts, the vocabulary's own spelling of [MASK] stands for the mask; the other
    special tokens are text like any other.

    Attributes:
        config: all settings that it was trained with.
        step: updates done.
        tokenizer: its tokenizer.
        scorer: the model and its parameters.
    """

    config: ConfigDict = field(repr=False)
    step: int
    tokenizer: Tokenizer = field(repr=False)
    scorer: Scorer = field(repr=False)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encodes texts, each by itself, batch by batch.

        Args:
            texts: of at most `max_positions` tokens each.

        Returns:
            For each text its tokens and their states.

        Raises:
            InputError: a text is longer, or `texts` is a string.
        """
        if isinstance(texts, str):
            raise InputError("texts is a string; it must be a list of strings")
        tokens = reading.read(self.tokenizer, texts)
        for text, one in zip(texts, tokens, strict=True):
            reading.check_length(one, text, self.max_positions)
        hidden = self.scorer.hidden_states([one.ids for one in tokens])
        return [
            EncodedText(text, *one, states)
            for text, one, states in zip(texts, tokens, hidden, strict=True)
        ]

    def span_embeddings(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """The embeddings of some spans of one text, float32 [n, 2D].

        For many texts, `encode` them all and ask each for its spans.

        Args:
            text: of at most `max_positions` tokens.
            spans: as for `EncodedText.span_embeddings`.

        Raises:
            InputError: as `encode` and `EncodedText.span_embeddings`.
        """
        return self.encode([text])[0].span_embeddings(spans)

    def fill(self, text: str, top: int = 5, beam: int | None = None) -> Filled:
        """Predicts what stands in a text's masks.

        Neither special nor unused tokens are predicted, nor what no text can hold.

        Args:
            text: with at least one mask, of at most `max_positions` tokens. What the
                vocabulary cannot spell is read as [UNK] and named in the result.
            top: predictions for each mask and for each span.
            beam: sequences of the MLM head that are kept at each length: more find
                likelier ones, in more time. None means 8, or `top` if that is more.

        Returns:
            The predictions of both heads.

        Raises:
            InputError: there is no mask, or nothing else that is known; the text is too
                long; `beam` is less than `top`, or that less than 1.
        """
        beam = max(_BEAM, top) if beam is None else beam
        if top < 1:
            raise InputError(f"top is {top}; it must be at least 1")
        if beam < top:
            raise InputError(
                f"beam is {beam}, less than top, which is {top}: it holds all that can"
                " be found"
            )
        reading.check_masks(self.tokenizer, text)
        [tokens] = reading.read(self.tokenizer, [text])
        reading.check_length(tokens, text, self.max_positions)
        self._check_known(tokens, text)
        edges = self.config.sbo.edges == "use"
        return Filler(self.scorer, self.tokenizer, edges, top, beam).fill(text, tokens)

    @property
    def max_positions(self) -> int:
        """Tokens of a text at most, with [CLS] and [SEP]."""
        return self.scorer.model.geometry.max_positions

    def _check_known(self, tokens: Tokens, text: str) -> None:
        others = tokens.ids[1:-1][tokens.ids[1:-1] != self.tokenizer.mask_id]
        if others.size and (others == self.tokenizer.unk_id).all():
            raise InputError(
                f"the text {reading.quoted(text)} has nothing beside its masks that the"
                " vocabulary of this model can spell"
            )


def load(path: Path, setting: str, step: int | None = None) -> Predictor:
    """Reads a model.

    Args:
        path: work directory of a run, which may be going on, or an export.
        setting: the flag or argument that named it, for error messages.
        step: of a run, which one; None means the newest that can be read.

    Raises:
        InputError: it is neither, or has no such step, or cannot be read.
        StorageError: no step of the run can be read.

    Warns:
        UserWarning: newer steps of the run cannot be read.
    """
    config, params, tokenizer, step, broken = read_pretrained(path, setting, step)
    for number, reason in broken.items():
        warnings.warn(f"step {number} of {path} cannot be read: {reason}", stacklevel=3)
    # The next-sentence head has no say here.
    model = portable_model(config, tokenizer.vocab_size).clone(nsp=False)
    return Predictor(config, step, tokenizer, Scorer(model, jax.device_put(params)))
