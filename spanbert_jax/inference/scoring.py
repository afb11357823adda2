"""Scores of texts: hidden states and log probabilities, in batches of few shapes.

A program is compiled for each shape, and so lengths and numbers of rows are rounded up.
Whatever a text shares a batch with, its scores are the same, up to the rounding of
float32: rows do not see each other, and a text's padding depends on its own length.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spanbert_jax.data.batch import Batch
from spanbert_jax.model.encoder import Encoder, Geometry
from spanbert_jax.model.spanbert import SpanBert

_TOKEN_KEYS = ("token_ids", "segment_ids", "position_ids", "type_ids")
_SLOT_KEYS = ("target_positions", "left_positions", "right_positions", "span_offsets")
_LENGTH_STEP = 32
_SLOT_STEP = 8
_MOST_ROWS = 32


class LogProbs(NamedTuple):
    """What the heads say of some masks.

    Attributes:
        mlm: float32 [n, V].
        sbo: float32 [n, V]; None if the model has no such head.
    """

    mlm: np.ndarray
    sbo: np.ndarray | None


class Scorer(NamedTuple):
    """A model with its parameters.

    Attributes:
        model: without a next-sentence head.
        params: of the model, and perhaps of more.
    """

    model: SpanBert
    params: Any

    def hidden_states(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The final hidden states of texts.

        Args:
            texts: int32 [T], tokens of each.

        Returns:
            float32 [T, D] for each text.
        """
        found: dict[int, np.ndarray] = {}
        for numbers in _groups(list(map(len, texts))):
            hidden = np.asarray(self._encode([texts[number] for number in numbers]))
            for number, states in zip(numbers, hidden, strict=False):
                # A copy: a view would keep the whole batch alive.
                found[number] = states[: len(texts[number])].copy()
        return [found[number] for number in range(len(texts))]

    def predict_masks(
        self, ids: np.ndarray, runs: Sequence[tuple[int, int]]
    ) -> LogProbs:
        """What both heads say of all masks of a text.

        Args:
            ids: int32 [T], tokens of the text.
            runs: half-open ranges of places, at least one, inside of the text.

        Returns:
            The log probabilities of every token, run by run.
        """
        slots = [
            (place, begin - 1, end, place - begin + 1)
            for begin, end in runs
            for place in range(begin, end)
        ]
        table = np.zeros((len(_SLOT_KEYS), 1, _up(len(slots), _SLOT_STEP)), np.int32)
        table[:, 0, : len(slots)] = np.transpose(slots)
        batch = dict(zip(_SLOT_KEYS, table, strict=True))
        mlm, sbo = _predict(self.model, self.params, self._encode([ids]), batch)
        return LogProbs(
            np.asarray(mlm)[0, : len(slots)],
            None if sbo is None else np.asarray(sbo)[0, : len(slots)],
        )

    def predict_token(self, texts: np.ndarray, place: int) -> Iterator[np.ndarray]:
        """What the MLM head says of one place in some texts.

        Args:
            texts: int32 [B, T], their tokens.
            place: the place.

        Yields:
            The log probabilities of every token, float32 [n, V], for the next n texts.
        """
        model = self.model.clone(sbo=None)
        for start in range(0, len(texts), _MOST_ROWS):
            rows = texts[start : start + _MOST_ROWS]
            hidden = self._encode(rows)
            batch = {"target_positions": np.full((len(hidden), 1), place, np.int32)}
            mlm, _ = _predict(model, self.params, hidden, batch)
            yield np.asarray(mlm)[: len(rows), 0]

    def _encode(self, texts: Sequence[np.ndarray]) -> jax.Array:
        """Hidden states of texts, at least one, and of padding: [R, L, D]."""
        encoder = self.params["encoder"]
        return _encode(self.model.geometry, encoder, _make_rows(texts))


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields numbers of texts that make a batch, given their lengths."""
    padded = [_up(length, _LENGTH_STEP) for length in lengths]
    for length in sorted(set(padded)):
        group = [number for number, own in enumerate(padded) if own == length]
        for start in range(0, len(group), _MOST_ROWS):
            yield group[start : start + _MOST_ROWS]


def _make_rows(texts: Sequence[np.ndarray]) -> Batch:
    """What the encoder needs of a batch, of one text a row."""
    rows = 1 << (len(texts) - 1).bit_length()
    length = _up(max(map(len, texts)), _LENGTH_STEP)
    batch = {key: np.zeros((rows, length), np.int32) for key in _TOKEN_KEYS}
    for row, ids in enumerate(texts):
        batch["token_ids"][row, : len(ids)] = ids
        batch["segment_ids"][row, : len(ids)] = 1
        batch["position_ids"][row, : len(ids)] = np.arange(len(ids))
    return batch


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@functools.partial(jax.jit, static_argnums=0)
def _encode(geometry: Geometry, params: Any, batch: Batch) -> jax.Array:
    return Encoder(geometry).apply({"params": params}, **batch, deterministic=True)


@functools.partial(jax.jit, static_argnums=0)
def _predict(
    model: SpanBert, params: Any, hidden: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array | None]:
    """Log probabilities by the MLM head and by the SBO head, [R, M, V] each."""
    variables = {"params": params}
    logits = model.apply(variables, hidden, batch, method="predict")
    size = model.geometry.vocab_size
    mlm, sbo, _ = jax.tree.map(lambda x: jax.nn.log_softmax(x)[..., :size], logits)
    return mlm, sbo
