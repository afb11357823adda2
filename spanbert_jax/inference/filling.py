"""Filling of masks: what the MLM head and the SBO head would put there.

Adjacent masks are a span. Each span is filled with the others left masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.inference import reading, search
from spanbert_jax.inference.reading import Tokens
from spanbert_jax.inference.scoring import Scorer
from spanbert_jax.inference.search import Best, Sequences

NO_HEAD = "the model has no SBO head"


@dataclass(frozen=True)
class Guess:
    """A token for one mask.

    Attributes:
        token: as the vocabulary has it.
        token_id: its id.
        probability: among all entries of the vocabulary.
    """

    token: str
    token_id: int
    probability: float


@dataclass(frozen=True)
class Filling:
    """Tokens for a span.

    Attributes:
        text: as running text.
        tokens: as the vocabulary has them.
        token_ids: their ids.
        log_probability: natural logarithm of the probability of all tokens together.
    """

    text: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    log_probability: float


@dataclass(frozen=True)
class MaskedToken:
    """One mask.

    Attributes:
        position: in the model's input, where [CLS] has 0.
        mlm: what the MLM head predicts, from the mask's own state; the likeliest first.
        sbo: what the SBO head predicts, from the states that the span's boundaries
            have; None if it does not.
    """

    position: int
    mlm: tuple[Guess, ...]
    sbo: tuple[Guess, ...] | None


@dataclass(frozen=True)
class MaskedSpan:
    """Adjacent masks.

    Attributes:
        begin: the first character of the first mask in the text.
        end: one beyond the last character of the last.
        masks: the masks.
        mlm: what the MLM head predicts, the likeliest first: token after token from the
            left, those found put in before the next, by beam search.
        sbo: what the SBO head predicts; given the boundaries it takes the tokens for
            independent, so that these are the likeliest of all. None if it predicts no
            sequence.
        no_sbo: why it does not; else empty.
    """

    begin: int
    end: int
    masks: tuple[MaskedToken, ...]
    mlm: tuple[Filling, ...]
    sbo: tuple[Filling, ...] | None
    no_sbo: str


@dataclass(frozen=True)
class Filled:
    """A text with masks, and what would stand there.

    Attributes:
        text: with the masks.
        num_tokens: with [CLS] and [SEP].
        unknown: what of it the vocabulary cannot spell; read as [UNK].
        spans: its masks.
    """

    text: str
    num_tokens: int
    unknown: tuple[str, ...]
    spans: tuple[MaskedSpan, ...]


@dataclass(frozen=True)
class Filler:
    """Fills the masks of texts.

    Attributes:
        scorer: the model.
        tokenizer: of the model.
        sbo_edges: whether the SBO head was trained with [CLS] and [SEP] as boundaries.
        top: predictions for each mask and each span, at least 1.
        beam: sequences that are kept at each length, at least `top`.
    """

    scorer: Scorer
    tokenizer: Tokenizer
    sbo_edges: bool
    top: int
    beam: int

    def fill(self, text: str, tokens: Tokens) -> Filled:
        """Fills the masks of a text, of which there is at least one."""
        ids = tokens.ids
        runs = reading.runs_of(ids, self.tokenizer.mask_id)
        mlm, sbo = self.scorer.predict_masks(ids, runs)
        borders = np.cumsum([end - begin for begin, end in runs])[:-1]
        of_mlm = np.split(mlm, borders)
        of_sbo = [None] * len(runs) if sbo is None else np.split(sbo, borders)
        return Filled(
            text,
            len(ids),
            reading.unknown_texts(tokens, text, self.tokenizer.unk_id),
            tuple(
                self._fill_span(tokens, run, *predicted)
                for run, *predicted in zip(runs, of_mlm, of_sbo, strict=True)
            ),
        )

    def _fill_span(
        self,
        tokens: Tokens,
        run: tuple[int, int],
        mlm: np.ndarray,
        sbo: np.ndarray | None,
    ) -> MaskedSpan:
        begin, end = run
        no_sbo, known = self._reach_of_sbo(run, len(tokens.ids))
        of_sbo: Sequence[tuple[Guess, ...] | None] = [None] * (end - begin)
        sbo_fillings = None
        if known:
            best = self._best(sbo[:known], self.top)
            of_sbo = [*self._guesses(best), *of_sbo[known:]]
            if not no_sbo:
                sbo_fillings = self._fillings(search.best_products(best, self.top))
        of_mlm = self._guesses(self._best(mlm, self.top))
        predicted = zip(range(begin, end), of_mlm, of_sbo, strict=True)
        return MaskedSpan(
            begin=int(tokens.begin[begin]),
            end=int(tokens.end[end - 1]),
            masks=tuple(MaskedToken(*one) for one in predicted),
            mlm=self._fillings(self._search(tokens.ids, run, mlm[:1])),
            sbo=sbo_fillings,
            no_sbo=no_sbo,
        )

    def _reach_of_sbo(self, run: tuple[int, int], length: int) -> tuple[str, int]:
        """Why the SBO head fills a span in part or not, and how many masks it does."""
        form = self.scorer.model.sbo
        begin, end = run
        if form is None:
            return NO_HEAD, 0
        if not self.sbo_edges and (begin == 1 or end == length - 1):
            return "trained without [CLS] and [SEP] as boundaries (sbo.edges='skip')", 0
        if end - begin > form.positions:
            why = f"the SBO head knows the first {form.positions} tokens of a span only"
            return why, form.positions
        return "", end - begin

    def _search(
        self, ids: np.ndarray, run: tuple[int, int], first: np.ndarray
    ) -> Sequences:
        """The likeliest sequences by the MLM head; `first`: of the run's first mask."""
        begin, end = run

        def extend(beginnings: np.ndarray) -> Best:
            count, size = beginnings.shape
            rows = np.tile(ids, (count, 1))
            rows[:, begin : begin + size] = beginnings
            predicted = self.scorer.predict_token(rows, begin + size)
            # Batch by batch: a wide beam times the vocabulary would take much memory.
            found = [self._best(log_probs, self.beam) for log_probs in predicted]
            return Best(*map(np.concatenate, zip(*found, strict=True)))

        best = self._best(first, self.beam)
        found = search.beam_search(best, extend, end - begin, self.beam)
        return Sequences(*(values[: self.top] for values in found))

    def _best(self, log_probs: np.ndarray, count: int) -> Best:
        return search.best_tokens(log_probs, self.tokenizer.replacement_ids, count)

    def _guesses(self, best: Best) -> list[tuple[Guess, ...]]:
        """The tokens for each mask."""
        names = self.tokenizer.tokens
        return [
            tuple(
                Guess(names[index], index, probability)
                for index, probability in zip(ids, probabilities, strict=True)
            )
            for ids, probabilities in zip(
                best.ids.tolist(), np.exp(best.log_probs).tolist(), strict=True
            )
        ]

    def _fillings(self, sequences: Sequences) -> tuple[Filling, ...]:
        names = self.tokenizer.tokens
        return tuple(
            Filling(
                running_text(self.tokenizer, ids),
                tuple(names[index] for index in ids),
                tuple(ids),
                log_prob,
            )
            for ids, log_prob in zip(
                sequences.ids.tolist(), sequences.log_probs.tolist(), strict=True
            )
        )


def running_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Tokens as a text, without a space before the first."""
    spelt = map(tokenizer.spell, ids)
    return "".join(" " * spaced + text for text, spaced in spelt).removeprefix(" ")
