"""The predictor against plain NumPy: states, spans, and what masks are filled with."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

import reference
import toy
from spanbert_jax.corpus.tokenizers import Tokenizer
from spanbert_jax.corpus.wordpiece import load_wordpiece
from spanbert_jax.errors import InputError
from spanbert_jax.inference import scoring
from spanbert_jax.inference.filling import Filling, Guess, running_text
from spanbert_jax.inference.predictor import Predictor
from spanbert_jax.inference.scoring import Scorer
from spanbert_jax.interop.pretrained import parameter_shapes, portable_model
from vocabularies import SPECIALS, learn, random_lines, write_vocabulary

WORDS = ("ab", "b", "c", "##b")
HEADS = 2
# Of float32 against float64, for log probabilities.
TOLERANCE = 2e-4
FORMS = [
    {"sbo.boundaries": boundaries, "sbo.internal": internal, "sbo.depth": depth}
    for boundaries, internal, depth in (
        ("both", False, 2),
        ("both", True, 1),
        ("left", True, 2),
        ("right", False, 3),
    )
]
Sequence_ = tuple[int, ...]


def make_predictor(
    tokenizer: Tokenizer, changes: dict[str, Any] | None = None
) -> Predictor:
    """The toy of one layer with rough parameters, some settings changed."""
    config = toy.make_config(Path())
    config.model.num_layers = 1
    config.update_from_flattened_dict(changes or {})
    model = portable_model(config, tokenizer.vocab_size)
    shapes = parameter_shapes(config, tokenizer.vocab_size)
    params = reference.rough_params(shapes, seed=1)
    return Predictor(config, 7, tokenizer, Scorer(model.clone(nsp=False), params))


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory) -> Tokenizer:
    """Four words, and an unused one."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    return load_wordpiece(write_vocabulary(path, [*SPECIALS, "[unused1]", *WORDS]))


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer) -> Predictor:
    return make_predictor(tiny_tokenizer, {"model.max_positions": 100})


@pytest.fixture(
    scope="module",
    params=FORMS,
    ids=lambda form: "-".join(map(str, form.values())),
)
def formed(request, tiny_tokenizer) -> Predictor:
    return make_predictor(tiny_tokenizer, request.param)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """One whose vocabulary holds bytes and pieces with spaces."""
    return make_predictor(learn("unigram"))


def true_params(predictor: Predictor) -> reference.Tree:
    return reference.double(predictor.scorer.params)


def true_states(predictor: Predictor, ids: Sequence[int]) -> np.ndarray:
    """The hidden states of a text's tokens, [T, D], in float64."""
    places = np.arange(len(ids))
    encoder = true_params(predictor)["encoder"]
    types = np.zeros_like(places)
    return reference.encode_block(np.array(ids), places, types, encoder, HEADS)


def true_mlm(predictor: Predictor, ids: Sequence[int], place: int) -> np.ndarray:
    """The MLM head's log probabilities at a place, [V]."""
    states = true_states(predictor, ids)
    return log_softmax(reference.mlm_logits(states[place], true_params(predictor)))


def true_sbo(
    predictor: Predictor, ids: Sequence[int], begin: int, end: int
) -> np.ndarray:
    """The SBO head's log probabilities for a span of places, [n, V]."""
    form, states = predictor.config.sbo, true_states(predictor, ids)
    left, right = (begin, end - 1) if form.internal else (begin - 1, end)
    both = {"left": [left], "right": [right], "both": [left, right]}
    read = [states[place] for place in both[form.boundaries]]
    params = true_params(predictor)
    return np.stack(
        [
            log_softmax(reference.sbo_logits(read, offset, params))
            for offset in range(1, end - begin + 1)
        ]
    )


def assert_guesses(
    guesses: Sequence[Guess], log_probs: np.ndarray, tokenizer: Tokenizer, top: int
) -> None:
    """They are the likeliest of the allowed tokens, with their probabilities."""
    order = sorted(tokenizer.replacement_ids.tolist(), key=lambda i: -log_probs[i])
    assert [guess.token_id for guess in guesses] == order[:top]
    for guess in guesses:
        assert guess.token == tokenizer.tokens[guess.token_id]
        expected = np.exp(log_probs[guess.token_id])
        assert guess.probability == pytest.approx(expected, rel=TOLERANCE)


def assert_fillings(
    fillings: Sequence[Filling],
    score: Callable[[Sequence_], float],
    tokenizer: Tokenizer,
    length: int,
    top: int,
) -> None:
    """They are the likeliest of all sequences, each with its score."""
    sequences = itertools.product(tokenizer.replacement_ids.tolist(), repeat=length)
    order = sorted(sequences, key=score, reverse=True)[:top]
    assert [filling.token_ids for filling in fillings] == order
    for filling, sequence in zip(fillings, order, strict=True):
        assert filling.log_probability == pytest.approx(score(sequence), abs=TOLERANCE)
        assert filling.tokens == tuple(tokenizer.tokens[i] for i in sequence)
        assert filling.text == running_text(tokenizer, sequence)


def token_ids(predictor: Predictor, text: str) -> list[int]:
    return predictor.encode([text])[0].token_ids.tolist()


def make_texts() -> list[str]:
    """Words of the tiny vocabulary; of one padded length, more than a batch holds."""
    generator = random.Random(9)
    lengths = [*generator.choices(range(31), k=40), 70, 31, 98]
    return [" ".join(generator.choices(WORDS[:3], k=length)) for length in lengths]


@pytest.mark.parametrize("name", ["tiny", "predictor"])
def test_states_are_those_of_the_plain_model(name, request):
    predictor = request.getfixturevalue(name)
    texts = ["", "[MASK]", "c [MASK], b", "naïve 中文", "abc . " * 4]
    for text, encoded in zip(texts, predictor.encode(texts), strict=True):
        assert encoded.text == text
        expected = true_states(predictor, encoded.token_ids)
        assert encoded.hidden.dtype == np.float32
        np.testing.assert_allclose(encoded.hidden, expected, atol=1e-4)


def test_company_changes_nothing(tiny):
    texts = make_texts()
    together = tiny.encode(texts)
    for number in (0, 7, 42):
        [alone] = tiny.encode([texts[number]])
        np.testing.assert_array_equal(alone.token_ids, together[number].token_ids)
        np.testing.assert_allclose(alone.hidden, together[number].hidden, atol=1e-5)
    again = tiny.encode(texts[::-1])[::-1]
    for one, other in zip(again, together, strict=True):
        np.testing.assert_allclose(one.hidden, other.hidden, atol=1e-5)


def test_the_same_again_has_the_same_bits(tiny):
    one, other = (tiny.encode(make_texts()) for _ in range(2))
    assert [text.hidden.tobytes() for text in one] == [
        text.hidden.tobytes() for text in other
    ]
    text = "c [MASK] [MASK] b"
    assert tiny.fill(text) == tiny.fill(text)


def test_few_programs_are_compiled(tiny_tokenizer):
    predictor = make_predictor(tiny_tokenizer, {"model.max_positions": 50})
    before = scoring._encode._cache_size()
    for length in range(31):
        predictor.encode(["c " * length])
    for count in range(1, 5):
        predictor.encode(["c"] * count)
    # Of 1, 2 and 4 rows of 32.
    assert scoring._encode._cache_size() - before == 3


def test_spans_are_embedded_by_their_boundaries(predictor):
    text = "naïve kind, 中文 don't"
    [encoded] = predictor.encode([text])
    begins, ends = encoded.begin, encoded.end
    tokens = range(1, len(begins) - 1)
    spans = [
        (int(begins[first]), int(ends[last]))
        for first, last in itertools.combinations_with_replacement(tokens, 2)
    ]
    embeddings = encoded.span_embeddings(spans)
    assert embeddings.shape == (len(spans), 2 * encoded.hidden.shape[1])
    for (begin, end), embedding in zip(spans, embeddings, strict=True):
        # Tokens that one character became share its range: both sides are beyond all.
        left = np.flatnonzero(ends <= begin)[-1]
        right = np.flatnonzero(begins >= end)[0]
        expected = np.concatenate([encoded.hidden[left], encoded.hidden[right]])
        np.testing.assert_array_equal(embedding, expected)


def test_a_span_that_cuts_a_token_takes_all_of_it(tiny):
    text = "abb c ab"
    [encoded] = tiny.encode([text])
    assert encoded.begin.tolist() == [0, 0, 2, 4, 6, 8]
    snapped = tiny.span_embeddings(text, [(1, 5), (0, 1), (3, 7)])
    exact = tiny.span_embeddings(text, [(0, 5), (0, 2), (4, 8)])
    np.testing.assert_array_equal(snapped, exact)
    hidden = encoded.hidden
    np.testing.assert_array_equal(exact[0], np.concatenate([hidden[0], hidden[4]]))
    np.testing.assert_array_equal(exact[2], np.concatenate([hidden[2], hidden[5]]))
    assert tiny.span_embeddings(text, []).shape == (0, 128)


def test_each_mask_by_both_heads(formed):
    predictor, tokenizer = formed, formed.tokenizer
    text, places = "[MASK] b [MASK][MASK] c", [(1, 2), (3, 5)]
    ids = token_ids(predictor, text)
    filled = predictor.fill(text, top=3)
    assert [(span.begin, span.end) for span in filled.spans] == [(0, 6), (9, 21)]
    assert (filled.num_tokens, filled.unknown) == (len(ids), ())
    for span, (begin, end) in zip(filled.spans, places, strict=True):
        assert [mask.position for mask in span.masks] == list(range(begin, end))
        by_sbo = true_sbo(predictor, ids, begin, end)
        for mask, log_probs in zip(span.masks, by_sbo, strict=True):
            by_mlm = true_mlm(predictor, ids, mask.position)
            assert_guesses(mask.mlm, by_mlm, tokenizer, 3)
            assert_guesses(mask.sbo, log_probs, tokenizer, 3)


def test_the_likeliest_products_by_the_sbo_head(formed):
    text = "c [MASK] [MASK] [MASK] b"
    log_probs = true_sbo(formed, token_ids(formed, text), 2, 5)
    [span] = formed.fill(text, top=20).spans
    assert span.no_sbo == ""

    def score(sequence: Sequence_) -> float:
        return log_probs[range(3), sequence].sum()

    assert_fillings(span.sbo, score, formed.tokenizer, 3, 20)


def test_a_beam_of_all_sequences_is_exact(tiny):
    text, begin = "c [MASK] [MASK] [MASK] b [MASK]", 2
    ids = token_ids(tiny, text)
    conditionals = {}

    def score(sequence: Sequence_) -> float:
        total = 0.0
        for size, token in enumerate(sequence):
            known = sequence[:size]
            if known not in conditionals:
                given = [*ids[:begin], *known, *ids[begin + size :]]
                conditionals[known] = true_mlm(tiny, given, begin + size)
            total += conditionals[known][token]
        return total

    spans = tiny.fill(text, top=len(WORDS) ** 3, beam=len(WORDS) ** 3).spans
    assert_fillings(spans[0].mlm, score, tiny.tokenizer, 3, len(WORDS) ** 3)
    # The other span is filled with this one left masked.
    other = true_mlm(tiny, ids, len(ids) - 2)
    assert_fillings(spans[1].mlm, lambda one: other[one[0]], tiny.tokenizer, 1, 4)


def test_a_beam_of_one_is_greedy(predictor):
    text, place = "a [MASK] [MASK] [MASK] b", 2
    allowed, ids = predictor.tokenizer.replacement_ids, token_ids(predictor, text)
    total = 0.0
    for size in range(3):
        log_probs = true_mlm(predictor, ids, place + size)[allowed]
        total += log_probs.max()
        ids[place + size] = int(allowed[log_probs.argmax()])
    [found] = predictor.fill(text, top=1, beam=1).spans[0].mlm
    assert list(found.token_ids) == ids[place : place + 3]
    assert found.log_probability == pytest.approx(total, abs=TOLERANCE)
    # More than fit a batch.
    wide = predictor.fill(text, top=40).spans[0].mlm
    assert len({filling.token_ids for filling in wide}) == 40
    assert wide[0].log_probability >= found.log_probability - TOLERANCE


def test_what_is_predicted_can_stand_in_a_text(predictor):
    tokenizer = predictor.tokenizer
    allowed = set(tokenizer.replacement_ids.tolist())
    assert len(allowed) < tokenizer.vocab_size
    top = tokenizer.vocab_size
    [span] = predictor.fill("a [MASK] b", top=top).spans
    for guesses in (span.masks[0].mlm, span.masks[0].sbo):
        assert {guess.token_id for guess in guesses} == allowed
        # Of the whole vocabulary: what is left out has its share.
        assert sum(guess.probability for guess in guesses) < 1


def test_spans_beyond_the_position_table(tiny_tokenizer):
    predictor = make_predictor(tiny_tokenizer, {"sbo.positions": 2})
    text = "a b [MASK] [MASK] [MASK] c [MASK] [MASK] c"
    long, short = predictor.fill(text, top=2).spans
    log_probs = true_sbo(predictor, token_ids(predictor, text), 3, 5)
    # The head reads the boundaries of the whole span.
    assert [mask.sbo is None for mask in long.masks] == [False, False, True]
    assert len(log_probs) == 2
    assert (long.sbo, len(long.mlm)) == (None, 2)
    assert long.no_sbo == "the SBO head knows the first 2 tokens of a span only"
    assert (short.no_sbo, len(short.sbo)) == ("", 2)


def test_spans_at_the_edges_of_a_model_that_skipped_them(tiny_tokenizer):
    predictor = make_predictor(tiny_tokenizer, {"sbo.edges": "skip"})
    spans = predictor.fill("[MASK] b [MASK] c [MASK] [MASK]").spans
    assert [span.sbo is None for span in spans] == [True, False, True]
    assert [span.masks[0].sbo is None for span in spans] == [True, False, True]
    assert "sbo.edges" in spans[0].no_sbo
    assert "sbo.edges" in spans[2].no_sbo


def test_a_model_without_sbo_head(tiny_tokenizer):
    predictor = make_predictor(tiny_tokenizer, {"sbo.weight": 0.0})
    text = "ab [MASK] [MASK] c"
    [span] = predictor.fill(text, top=2).spans
    assert (span.sbo, span.masks[0].sbo) == (None, None)
    assert span.no_sbo == "the model has no SBO head"
    by_mlm = true_mlm(predictor, token_ids(predictor, text), 2)
    assert_guesses(span.masks[0].mlm, by_mlm, tiny_tokenizer, 2)


def test_a_model_of_pairs(tiny_tokenizer):
    predictor = make_predictor(tiny_tokenizer, {"data.pairs": True})
    text = "ab [MASK] c"
    [span] = predictor.fill(text, top=4).spans
    by_mlm = true_mlm(predictor, token_ids(predictor, text), 2)
    assert_guesses(span.masks[0].mlm, by_mlm, tiny_tokenizer, 4)


def test_fillings_are_spelt_as_text():
    tokenizer = learn("wordpiece")
    for line in random_lines(5):
        [ids] = tokenizer.encode([line])
        spaced = line.replace(".", " .")
        assert running_text(tokenizer, ids) == spaced
    tokenizer = learn("unigram")
    for line in random_lines(5):
        assert running_text(tokenizer, tokenizer.encode([line])[0]) == line


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["a"], r"there is no \[MASK\] in the text 'a'"),
        (["żółw [MASK] ⅞"], "nothing beside its masks that the vocabulary .* spell"),
        (["c [MASK] " * 60], "has 122 tokens .* 100 positions"),
        (["c [MASK]", 0], "top is 0; it must be at least 1"),
        (["c [MASK]", 3, 2], "beam is 2, less than top, which is 3"),
    ],
)
def test_what_cannot_be_filled(tiny, arguments, fault):
    with pytest.raises(InputError, match=fault):
        tiny.fill(*arguments)


def test_unknown_words_are_named(tiny):
    filled = tiny.fill("żółw c [MASK] żółw ⅞")
    assert filled.unknown == ("żółw", "⅞")
    # And read as what they are to the model.
    ids = token_ids(tiny, "żółw c [MASK] żółw ⅞")
    assert ids.count(tiny.tokenizer.unk_id) == 3
    by_mlm = true_mlm(tiny, ids, 3)
    assert_guesses(filled.spans[0].masks[0].mlm, by_mlm, tiny.tokenizer, 4)


def test_masks_alone_can_be_filled(tiny):
    [span] = tiny.fill("[MASK] [MASK]").spans
    assert [len(span.mlm), len(span.sbo)] == [5, 5]


def test_what_cannot_be_encoded(tiny):
    with pytest.raises(InputError, match="texts is a string"):
        tiny.encode("c c")
    with pytest.raises(InputError, match=r"'c c c.* has 101 tokens .* 100 positions"):
        tiny.encode(["c", "c " * 99])
    assert tiny.encode([]) == []
    with pytest.raises(InputError, match="from 2 to 9 must"):
        tiny.span_embeddings("c c", [(0, 1), (2, 9)])
