"""What the file of a SentencePiece model says.

The library's own classes for it are made for one version of protobuf and refuse to be
imported beside another, so the wire format is read here. The fields are those of
sentencepiece_model.proto.
"""

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


class Kind(enum.IntEnum):
    """What a piece is for. Texts are spelt with the normal and the user-defined."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Algorithm(enum.IntEnum):
    """How pieces are chosen for a text."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


class Piece(NamedTuple):
    """An entry of the vocabulary; `score` is higher for what is chosen sooner."""

    text: str
    score: float
    kind: Kind


class Model(NamedTuple):
    """The parts of a model that decide on its ids.

    Attributes:
        pieces: by id.
        algorithm: how pieces are chosen.
        byte_fallback: whether unknown characters are spelt in bytes.
        spaces_behind: whether a space is spelt with the word before it.
            normal_form: the message NormalizerSpec, as the library takes it.
        charsmap: what it has of rules, compiled; nothing if there are none.
    joins_spaces: whether spaces at the ends are dropped, and several are one.
    """

    pieces: tuple[Piece, ...]
    algorithm: Algorithm
    byte_fallback: bool
    spaces_behind: bool
    normal_form: bytes
    charsmap: bytes
    joins_spaces: bool


def read_model(content: bytes) -> Model:
    """Reads the content of a .model file that the library accepts."""
    pieces = []
    trainer: dict[int, int | bytes] = {}
    normal_form = b""
    for number, value in _fields(content):
        if number == 1:
            pieces.append(_piece(value))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normal_form = value
    normalizer = dict(_fields(normal_form))
    return Model(
        tuple(pieces),
        algorithm=Algorithm(trainer.get(3, Algorithm.UNIGRAM)),
        byte_fallback=bool(trainer.get(35, 0)),
        spaces_behind=bool(trainer.get(24, 0)),
        normal_form=normal_form,
        charsmap=bytes(normalizer.get(2, b"")),
        joins_spaces=bool(normalizer.get(4, 1)),
    )


def _piece(message: bytes) -> Piece:
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(fields[1].decode(), score, Kind(fields.get(3, Kind.NORMAL)))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields the fields of a message of protobuf: numbers and values."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        wire = tag & 7
        if wire == _VARINT:
            value, place = _varint(message, place)
        else:
            if wire == _LENGTH:
                size, place = _varint(message, place)
            else:
                size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}[wire]
            value, place = message[place : place + size], place + size
        yield tag >> 3, value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Returns the number that begins at a place, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
