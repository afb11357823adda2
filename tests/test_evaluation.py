"""Evaluation against slow counting, and the same in whatever batches."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import reference
import text
import toy
from pairs import as_pairs
from spanbert_jax import settings
from spanbert_jax.data.batch import Batch, BatchShape, Feed, empty_batch, make_batch
from spanbert_jax.data.plan import ordered_rows
from spanbert_jax.model.losses import Prediction
from spanbert_jax.training.evaluation import (
    LENGTH_NAMES,
    Scores,
    SpanMatches,
    evaluate,
    evaluation_step,
    span_matches,
    unigram_log_probs,
)

MASK = text.SPECIAL.mask


def count_spans(
    batch: Batch, hits: np.ndarray, weights: np.ndarray
) -> tuple[list[int], list[int]]:
    """Span by span: a span is what has the same two boundaries in the same row."""
    spans: dict[tuple[int, int, int], list[int]] = {}
    for row, slot in np.argwhere(batch["target_weights"]).tolist():
        left, right = (
            int(batch[f"{side}_positions"][row, slot]) for side in ("left", "right")
        )
        spans.setdefault((row, left, right), []).append(slot)
    right_ones, counted = Counter(), Counter()
    for (row, left, right), slots in spans.items():
        places = batch["target_positions"][row, slots].tolist()
        assert places == list(range(left + 1, right))
        is_masked = all(batch["token_ids"][row, place] == MASK for place in places)
        if is_masked and weights[row, slots].all():
            length = min(len(slots), 11)
            counted[length] += 1
            right_ones[length] += int(hits[row, slots].all())
    lengths = range(1, 12)
    return [right_ones[n] for n in lengths], [counted[n] for n in lengths]


def on_device(batch: Batch) -> dict[str, jax.Array]:
    return {key: jnp.asarray(array) for key, array in batch.items()}


def match(batch: Batch, hits: np.ndarray) -> SpanMatches:
    return span_matches(on_device(batch), hits, batch["target_weights"], MASK)


def make_feed(replacement: str, scheme: str = "span") -> Feed:
    masking = dataclasses.replace(text.PAPER, replacement=replacement, scheme=scheme)
    lengths = [126, 60, 60, 1, 2, 40, 90, 126, 126, 7, 33, 126] * 3
    split = text.random_split(7, lengths, most_pieces=4)
    # Words of several pieces: spans of up to 20 tokens, some beyond the SBO table.
    return text.make_feed(split, 128, masking=masking, sbo_positions=6)


def all_rows(feed: Feed) -> Batch:
    rows = np.append(np.arange(feed.plan.num_rows), -1)
    return make_batch(feed, rows, np.zeros_like(rows))


@pytest.mark.parametrize("scheme", ["span", "word", "subword"])
@pytest.mark.parametrize("replacement", ["span", "word", "token"])
@pytest.mark.parametrize("weights", ["target_weights", "sbo_weights"])
def test_spans_are_matched_as_one_by_one(
    weights: str, replacement: str, scheme: str
) -> None:
    batch = all_rows(make_feed(replacement, scheme))
    rng = np.random.default_rng(8)
    hits = rng.random(batch["target_ids"].shape) < 0.8
    right, counted = span_matches(on_device(batch), hits, batch[weights], MASK)
    assert [right.tolist(), counted.tolist()] == [
        *count_spans(batch, hits, batch[weights])
    ]
    assert 0 < right.sum() < counted.sum()


def make_spans(spans: Sequence[tuple[int, int]]) -> Batch:
    """One row of spans from their first to their last place, all [MASK]."""
    batch = empty_batch(BatchShape(1, 64, 32))
    slot = 0
    for begin, end in spans:
        for place in range(begin, end + 1):
            batch["target_positions"][0, slot] = place
            batch["left_positions"][0, slot] = begin - 1
            batch["right_positions"][0, slot] = end + 1
            batch["span_offsets"][0, slot] = place - begin + 1
            batch["target_weights"][0, slot] = batch["sbo_weights"][0, slot] = 1
            batch["token_ids"][0, place] = MASK
            slot += 1
    return batch


def test_each_length_up_to_10_is_counted_by_itself_and_longer_ones_together() -> None:
    for length in range(1, 16):
        batch = make_spans([(3, 2 + length), (30, 30)])
        hits = np.ones((1, 32), bool)
        right, counted = match(batch, hits)
        expected = np.zeros(11, int)
        expected[min(length, 11) - 1] += 1
        expected[0] += 1
        assert right.tolist() == counted.tolist() == expected.tolist()
    assert [*LENGTH_NAMES] == [*map(str, range(1, 11)), "11+"]


def test_one_wrong_token_makes_a_span_wrong() -> None:
    batch = make_spans([(3, 6), (8, 10)])
    hits = np.ones((1, 32), bool)
    hits[0, 2] = False
    right, counted = match(batch, hits)
    assert counted.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert right.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]


def test_spans_at_the_same_place_of_two_rows_are_two() -> None:
    one = make_spans([(3, 6)])
    batch = {key: np.concatenate([array, array]) for key, array in one.items()}
    hits = np.ones((2, 32), bool)
    hits[0, 2] = False
    right, counted = match(batch, hits)
    assert counted.tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]
    assert right.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def test_a_span_that_is_not_all_mask_does_not_count() -> None:
    batch = make_spans([(3, 6), (8, 10)])
    batch["token_ids"][0, 9] = 77
    hits = np.ones((1, 32), bool)
    _, counted = match(batch, hits)
    assert counted.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def test_a_batch_without_targets_has_no_spans() -> None:
    batch = empty_batch(BatchShape(2, 64, 8))
    hits = np.ones((2, 8), bool)
    right, counted = match(batch, hits)
    assert right.tolist() == counted.tolist() == [0] * 11


def test_unigram_log_probs_are_smoothed_frequencies() -> None:
    tokens = ["to", "be", "or", "not", "to", "be", "that", "is", "the", "question"]
    vocabulary = [*sorted(set(tokens)), "slings", "arrows"]
    counted = Counter(tokens)
    counts = np.array([counted[token] for token in vocabulary])
    found = unigram_log_probs(counts)
    for token, log_prob in zip(vocabulary, found, strict=True):
        share = (tokens.count(token) + 1) / (len(tokens) + len(vocabulary))
        assert log_prob == pytest.approx(math.log(share), rel=1e-12)
    assert np.exp(found).sum() == pytest.approx(1, rel=1e-12)


@pytest.fixture(scope="module")
def feed() -> Feed:
    return make_feed("span")


def cut(feed: Feed, size: int) -> list[Batch]:
    """All rows once, in batches of some size."""
    count = feed.plan.num_rows
    return [
        make_batch(feed, *ordered_rows(step, size, count))
        for step in range(-(-count // size))
    ]


UNIGRAM = np.log(np.random.default_rng(9).dirichlet(np.ones(text.VOCAB_SIZE)))


def made_up_look(batch: Batch) -> tuple[Scores, bool]:
    """Losses and hits that follow from the targets, by arithmetic."""
    heads, spans = {}, {}
    for head, (ids, weights) in reference.TARGETS.items():
        if weights not in batch:
            continue
        hits = batch[ids] % 3 > 0
        losses = 1 + batch[ids] % 7
        heads[head] = Prediction(
            *(
                np.float32((numbers * batch[weights]).sum())
                for numbers in (losses, hits, np.ones(losses.shape))
            )
        )
        if head != "nsp":
            right, count = count_spans(batch, hits, batch[weights])
            spans[head] = SpanMatches(np.array(right), np.array(count))
    unigram = (UNIGRAM[batch["target_ids"]] * batch["target_weights"]).sum()
    return Scores(heads, spans, np.float32(-unigram)), False


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_size_of_the_batches_changes_no_metric(feed: Feed, size: int) -> None:
    found = evaluate(made_up_look, map(as_pairs, cut(feed, size)))
    whole = as_pairs(all_rows(feed))
    assert feed.plan.num_rows % 7
    hits = whole["target_ids"] % 3 > 0
    expected: dict[str, Any] = {}
    for head, key in (("mlm", "target_weights"), ("sbo", "sbo_weights")):
        counted = whole[key] > 0
        losses = 1 + whole["target_ids"][counted] % 7
        expected[f"{head}_loss"] = pytest.approx(losses.mean())
        expected[f"{head}_accuracy"] = pytest.approx(hits[counted].mean())
        expected[f"{head}_targets"] = counted.sum()
        right, spans = count_spans(whole, hits, whole[key])
        expected[f"{head}_spans"] = dict(zip(LENGTH_NAMES, spans, strict=True))
        expected[f"{head}_span_exact"] = {
            name: pytest.approx(r / n)
            for name, r, n in zip(LENGTH_NAMES, right, spans, strict=True)
            if n
        }
    labels = whole["nsp_labels"][whole["nsp_weights"] > 0]
    assert 0 < labels.mean() < 1
    expected["nsp_loss"] = pytest.approx(1 + labels.mean())
    expected["nsp_accuracy"] = pytest.approx(labels.mean())
    expected["nsp_targets"] = len(labels)
    targets = whole["target_ids"][whole["target_weights"] > 0]
    expected["unigram_loss"] = pytest.approx(-UNIGRAM[targets].mean())
    expected["perplexity"] = pytest.approx(math.exp(found["mlm_loss"]))
    assert found == expected


def test_a_head_without_targets_is_left_out() -> None:
    batch = make_spans([(3, 5)])
    batch["sbo_weights"][:] = 0
    for each in (batch, as_pairs(batch)):
        found = evaluate(made_up_look, [each])
        assert found["mlm_targets"] == 3
        assert not any(name.startswith(("sbo", "nsp")) for name in found)


def test_a_run_that_is_to_stop_has_no_result() -> None:
    batch = make_spans([(3, 5)])
    seen = []

    def look(batch: Batch) -> tuple[Scores, bool]:
        seen.append(batch)
        return made_up_look(batch)[0], len(seen) == 2

    assert evaluate(look, [batch] * 4) is None
    assert len(seen) == 2


@pytest.mark.parametrize("internal", [False, True])
def test_a_model_is_scored_as_plain_numpy_does(internal: bool) -> None:
    config = toy.make_config(Path())
    config.data.pairs = True
    config.sbo.internal = internal
    config.model.num_layers = 1
    model = settings.model(config, text.VOCAB_SIZE)
    feed = text.make_feed(text.random_split(10, [30, 8, 30, 17, 1, 12]), 32)
    size, heads = 2, config.model.num_heads
    batches = list(map(as_pairs, cut(feed, size)))
    assert len(batches) > 1
    init = functools.partial(model.init, deterministic=True)
    shapes = jax.eval_shape(init, jax.random.key(0), batches[0])["params"]
    params = reference.rough_params(nn.unbox(shapes), seed=11)
    # The likeliest token by its bias is a target: some hits, some misses.
    common = int(batches[0]["target_ids"][0, 0])
    for head in ("mlm_head", "sbo_head"):
        params[head]["projection"]["bias"][common] = 6
    step = jax.jit(functools.partial(evaluation_step, model=model))
    unigram, mask_id = jnp.asarray(UNIGRAM, jnp.float32), jnp.int32(MASK)
    found = evaluate(
        lambda batch: (step(params, batch, unigram, mask_id), False), batches
    )
    exact = reference.double(params)
    encoded = [reference.encode(exact, batch, heads) for batch in batches]
    for head in ("mlm", "sbo", "nsp"):
        sums = [
            reference.head_sums(exact, hidden, batch, head, internal=internal)
            for hidden, batch in zip(encoded, batches, strict=True)
        ]
        loss, correct, count = map(sum, zip(*sums, strict=True))
        assert found[f"{head}_targets"] == count
        assert found[f"{head}_loss"] == pytest.approx(loss / count, rel=1e-5)
        assert found[f"{head}_accuracy"] == pytest.approx(correct / count)
        assert 0 < correct < count
    # Spans are the same whatever the head reads of them.
    counted = [
        count_spans(batch, np.zeros_like(batch["target_ids"]), batch["sbo_weights"])[1]
        for batch in batches
    ]
    assert sum(map(sum, counted)) > 0
    assert [*found["sbo_spans"].values()] == np.sum(counted, axis=0).tolist()
    assert "nsp_spans" not in found
    assert found["perplexity"] == pytest.approx(math.exp(found["mlm_loss"]))
    targets = [batch["target_ids"][batch["target_weights"] > 0] for batch in batches]
    expected = -UNIGRAM[np.concatenate(targets)].mean()
    assert found["unigram_loss"] == pytest.approx(expected, rel=1e-6)
