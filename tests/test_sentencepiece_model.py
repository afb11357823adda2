"""The file of a SentencePiece model as the library itself reads it."""

import io

import pytest
import sentencepiece as library

from spanbert_jax.interop.sentencepiece_model import Algorithm, Kind, read_model
from vocabularies import random_lines

SPECIALS = {
    "unk_piece": "[UNK]",
    "control_symbols": ["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
    "user_defined_symbols": ["«", "»»"],
}


def train(**options) -> bytes:
    model = io.BytesIO()
    library.SentencePieceTrainer.Train(
        sentence_iterator=iter(random_lines(100)),
        model_writer=model,
        minloglevel=2,
        **{"vocab_size": 400, "hard_vocab_limit": False, **SPECIALS, **options},
    )
    return model.getvalue()


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char", "word"])
def test_pieces_are_those_of_the_library(model_type, byte_fallback):
    content = train(model_type=model_type, byte_fallback=byte_fallback)
    processor = library.SentencePieceProcessor(model_proto=content)
    model = read_model(content)
    assert model.algorithm == Algorithm[model_type.upper()]
    assert model.byte_fallback == byte_fallback
    assert len(model.pieces) == processor.GetPieceSize()
    for i, piece in enumerate(model.pieces):
        assert piece.text == processor.IdToPiece(i)
        assert piece.score == processor.GetScore(i)
        assert (piece.kind == Kind.UNKNOWN) == processor.IsUnknown(i)
        assert (piece.kind == Kind.CONTROL) == processor.IsControl(i)
        assert (piece.kind == Kind.BYTE) == processor.IsByte(i)
        assert (piece.kind == Kind.UNUSED) == processor.IsUnused(i)
        defined = piece.text.lstrip("▁") in SPECIALS["user_defined_symbols"]
        assert (piece.kind == Kind.USER_DEFINED) == defined


def test_the_rest_is_what_was_asked_for():
    model = read_model(train())
    assert not model.spaces_behind
    assert model.joins_spaces
    assert model.charsmap
    model = read_model(
        train(
            treat_whitespace_as_suffix=True,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
        )
    )
    assert model.spaces_behind
    assert not model.joins_spaces
    assert model.charsmap == b""


def test_fields_that_are_not_known_are_passed_over():
    content = train()
    later = [
        # Numbers 900 to 903: a number, eight bytes, a text, four bytes.
        b"\xa0\x38\xff\xff\xff\xff\x0f",
        b"\xa9\x3801234567",
        b"\xb2\x38\x05\x0a\x03abc",
        b"\xbd\x380123",
    ]
    around = b"".join(later)
    assert read_model(around + content + around) == read_model(content)
