"""Mixing: the rows of a run over its corpora, one or several.

As all of the data, a pure function of its arguments: the rows come in cycles, each
corpus has its fixed number of places in a cycle, and a keyed permutation says where.
"""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from spanbert_jax.data import counter
from spanbert_jax.data.batch import Batch, Feed, empty_batch, make_batch
from spanbert_jax.data.plan import ordered_rows, shuffled_rows
from spanbert_jax.errors import InputError

# Places of a cycle where weights are shares: a share is exact to 1/10,000.
_CYCLE = 10_000
# Where weights count epochs: the finest part of a row that is told apart.
_FINEST = 1_000_000


def places_by_share(weights: Sequence[Fraction]) -> np.ndarray:
    """Places of a cycle for weights that are shares of the rows.

    Args:
        weights: of each of C corpora, above 0; only their ratios count.

    Returns:
        int64 [C], adding up to 10,000: the largest remainders are rounded up.

    Raises:
        InputError: a share is too small for a single place.
    """
    total = sum(weights)
    exact = [weight * _CYCLE / total for weight in weights]
    places = np.array([int(share) for share in exact], np.int64)
    remainders = [share - int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda c: (-remainders[c], c))
    places[order[: _CYCLE - int(places.sum())]] += 1
    if not places.all():
        c = int(np.flatnonzero(places == 0)[0])
        raise InputError(
            f"data.weights: {float(weights[c])} of {float(total)} is less than one row"
            f" in {_CYCLE:,}"
        )
    return places


def places_by_epochs(
    weights: Sequence[Fraction], num_rows: Sequence[int]
) -> np.ndarray:
    """Places of a cycle for weights that say how often each corpus is read.

    Args:
        weights: of each of C corpora, above 0; only their ratios count.
        num_rows: rows of each, at least 1.

    Returns:
        int64 [C]: weight times rows, all times the least number that makes them whole,
        or times a million, rounded.

    Raises:
        InputError: a weight is too small for that.
    """
    exact = [weight * rows for weight, rows in zip(weights, num_rows, strict=True)]
    scale = min(math.lcm(*(number.denominator for number in exact)), _FINEST)
    places = np.array([round(number * scale) for number in exact], np.int64)
    if not places.all():
        c = int(np.flatnonzero(places == 0)[0])
        raise InputError(
            f"data.weights: {float(weights[c])} is less than a row is worth"
        )
    return places


def _locate(index: np.ndarray, places: np.ndarray, seed: int) -> tuple[np.ndarray, ...]:
    """The corpus of each row of the run, and the number of the row there: int64."""
    ends = np.cumsum(places)
    size = int(ends[-1])
    cycle = index // size
    key = counter.fold(counter.root_key(seed), counter.MIXING)
    place = counter.permute(index % size, size, counter.fold(key, cycle))
    corpus = np.searchsorted(ends, place, side="right")
    # Places of a corpus in a cycle are consecutive numbers, and each comes up once.
    number = cycle * places[corpus] + place - (ends - places)[corpus]
    return corpus, number


class Rows(NamedTuple):
    """Rows of corpora, int64 [R] each.

    Attributes:
        corpus: the corpus's number.
        row: the row of its plan, -1 for an empty one.
        epoch: whose masks it gets.
    """

    corpus: np.ndarray
    row: np.ndarray
    epoch: np.ndarray

    def part(self, numbers: np.ndarray) -> "Rows":
        """Those of some numbers, from 0."""
        return Rows(*(column[numbers] for column in self))


@dataclasses.dataclass(frozen=True)
class Mix:
    """The feeds of a run.

    Attributes:
        feeds: of each of C corpora.
        places: int64 [C], places of each in a cycle; matters if there are several.
        seed: of the order.
    """

    feeds: tuple[Feed, ...]
    places: np.ndarray
    seed: int

    @property
    def num_rows(self) -> int:
        """Rows of all plans."""
        return sum(feed.plan.num_rows for feed in self.feeds)

    def training_rows(self, step: int, batch_size: int) -> Rows:
        """The rows of the global batch of one training step.

        Of one corpus as `plan.shuffled_rows` orders them. Of several: row i of step t
        is row t * B + i of the run. The rows that a corpus gives have numbers of their
        own, those of a cycle before those of the next, within a cycle in no order; row
        n of a corpus of N rows is place n mod N of its epoch n div N, and an epoch is a
        permutation of the corpus's rows.

        Args:
            step: t, from 0.
            batch_size: B, rows of the global batch.

        Returns:
            B rows.
        """
        sizes = [feed.plan.num_rows for feed in self.feeds]
        if len(sizes) == 1:
            row, epoch = shuffled_rows(step, batch_size, sizes[0], self.seed)
            return Rows(np.zeros_like(row), row, epoch)
        index = step * batch_size + np.arange(batch_size, dtype=np.int64)
        corpus, number = _locate(index, self.places, self.seed)
        row, epoch = np.zeros_like(index), np.zeros_like(index)
        key = counter.fold(counter.root_key(self.seed), counter.ROWS)
        for c, size in enumerate(sizes):
            mine = np.flatnonzero(corpus == c)
            epoch[mine] = number[mine] // size
            keys = counter.fold(counter.fold(key, c), epoch[mine])
            row[mine] = counter.permute(number[mine] % size, size, keys)
        return Rows(corpus, row, epoch)

    def evaluation_rows(self, step: int, batch_size: int) -> Rows:
        """The rows of one evaluation batch: of all corpora, each once, then empty ones.

        Args:
            step: from 0.
            batch_size: B, rows of the global batch.

        Returns:
            B rows, all of epoch 0.
        """
        row, epoch = ordered_rows(step, batch_size, self.num_rows)
        ends = np.cumsum([feed.plan.num_rows for feed in self.feeds])
        corpus = np.searchsorted(ends, row, side="right")
        begins = np.append(0, ends[:-1])
        return Rows(corpus, np.where(row < 0, row, row - begins[corpus]), epoch)

    def make_batch(self, rows: Rows) -> Batch:
        """Makes the batch of some rows: a pure function of its arguments.

        Raises:
            InputError: a token id is outside the vocabulary; names shard and document.
        """
        if len(self.feeds) == 1:
            return make_batch(self.feeds[0], rows.row, rows.epoch)
        batch = self.empty_batch(len(rows.row))
        for c, feed in enumerate(self.feeds):
            mine = np.flatnonzero(rows.corpus == c)
            if mine.size:
                part = make_batch(feed, rows.row[mine], rows.epoch[mine])
                for key, array in part.items():
                    batch[key][mine] = array
        return batch

    def empty_batch(self, rows: int) -> Batch:
        """A batch of weight 0; also tells the shapes and dtypes of all batches."""
        return empty_batch(self.feeds[0].shape(rows))

    def shares(self, rows: range) -> np.ndarray:
        """Which share of some training rows of the run each corpus gave.

        Args:
            rows: of the run, such as those of one log interval; not empty.

        Returns:
            float64 [C], adding up to 1.
        """
        corpus, _ = _locate(
            np.arange(rows.start, rows.stop, dtype=np.int64), self.places, self.seed
        )
        return np.bincount(corpus, minlength=len(self.places)) / len(rows)
