"""Tensors of PyTorch's files, found without PyTorch and without running what they hold.

A pickle is a program that may call whatever it names. Here it can name a short table of
ours and nothing else: any other class or function becomes a placeholder, which takes
what it is given and does nothing. The numbers stay in the file, which is mapped into
memory, until they are asked for.
"""

import contextlib
import functools
import io
import math
import mmap
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from spanbert_jax.errors import InputError

# How each format begins, or what it has in its first block.
_ZIP_MAGIC = b"PK\x03\x04"
_TAR_MAGIC, _TAR_MAGIC_PLACE = b"ustar", slice(257, 262)
_STREAM_MAGIC, _STREAM_VERSION = 0x1950A86A20F9469CFC6C, 1001

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_BYTE_ORDERS = {b"little": "<", b"big": ">"}

# Names of dtypes, not dtypes: the state that a pickle gives an object would be set in
# the one float32 of the process.
_ELEMENTS = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16).name,
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}

# What no checkpoint names. Nothing of it would run; but whoever made the file meant it
# to, and its weights deserve no trust.
_HOSTILE = re.compile(
    r"(?:os|posix|nt|sys|subprocess|runpy|importlib)\..*"
    r"|(?:builtins|__builtin__)\.(?:eval|exec|execfile|compile|open|__import__)",
    re.DOTALL,
)
# Tensors of other kinds, quantised or sparse: left out in silence they would be missed.
_REBUILDS = re.compile(r"torch\.(?:.*\.)?_rebuild_\w+", re.DOTALL)
# What puts an object into the memo, at a place that it names.
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


@dataclass(frozen=True)
class Stretch:
    """Some bytes of a file.

    Attributes:
        label: what they are there, for errors.
        content: the whole file.
        start: the first byte.
        size: bytes.
        order: "<" or ">", of the bytes of a number.
        checksum: CRC-32; 0 where none was written.
    """

    label: str
    content: mmap.mmap
    start: int
    size: int
    order: str = "<"
    checksum: int = 0

    @functools.cached_property
    def data(self) -> memoryview:
        """The bytes, checked once.

        Raises:
            InputError: they are not those that were written.
        """
        data = memoryview(self.content)[self.start : self.start + self.size]
        if self.checksum and zlib.crc32(data) != self.checksum:
            raise InputError(f"is damaged: the checksum of {self.label} does not match")
        return data


class Tensor(NamedTuple):
    """A tensor that lies in a file.

    Attributes:
        path: of the file, for errors.
        storage: the numbers, perhaps of several tensors.
        dtype: of its elements.
        offset: of its first element, in elements.
        shape: may have zeros.
        strides: of each axis, in elements; 0 repeats.
    """

    path: Path
    storage: Stretch
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self) -> np.ndarray:
        """Returns the numbers, as a read-only view of the file where that can be.

        Raises:
            InputError: they are damaged.
        """
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        with _naming(self.path):
            data = self.storage.data
        size = self.dtype.itemsize
        words = np.frombuffer(
            data, f"{self.storage.order}u{size}", offset=self.offset * size
        )
        strides = [size * stride for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(
            words, self.shape, strides, writeable=False
        )
        return view.astype(f"=u{size}", copy=False).view(self.dtype)


class _Storage(NamedTuple):
    """A storage as a pickle names it."""

    key: str
    element: str
    count: int


class _View(NamedTuple):
    """A tensor as a pickle tells it; nothing in it is checked."""

    storage: Any
    offset: Any
    shape: Any
    strides: Any


class _Inert:
    """Stands for all else that a pickle names: takes what it is given, does nothing."""

    def __new__(cls, *arguments: object, **options: object) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        """Takes an item of a list."""

    def extend(self, items: object) -> None:
        """Takes items of a list."""

    def add(self, item: object) -> None:
        """Takes an item of a set."""


class _Call:
    """A function of ours on a pickle's stack: to be called, not to be changed."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, *_: object
) -> _View:
    return _View(storage, offset, shape, strides)


def _rebuild_parameter(tensor: Any, *_: object) -> Any:
    return tensor


def _rebuild_from_type(rebuild: Any, kind: Any, arguments: Any, state: Any) -> Any:
    del kind, state  # of a subclass, or attributes that someone set
    return rebuild(*arguments)


_FUNCTIONS = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
}


class _Unpickler(pickle.Unpickler):
    """Makes dictionaries, lists, numbers, texts, `_View`s and placeholders, no more.

    Nothing within reach of a pickle can be changed by it for the next: names and types
    of C are immutable, `_Call`s are made anew, and `_Inert` takes no state as a class.
    """

    def __init__(self, stream: BinaryIO) -> None:
        # Texts of Python 2, and bytes of its NumPy among the placeholders' arguments.
        super().__init__(stream, encoding="utf-8", errors="replace")
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _ELEMENTS:
            return _ELEMENTS[full]
        if full in _FUNCTIONS:
            return _Call(_FUNCTIONS[full])
        if full == "collections.OrderedDict":
            return OrderedDict
        if full == "torch.Size":
            return tuple
        if _HOSTILE.fullmatch(full):
            raise InputError(
                f"asks to call {full}, which no checkpoint needs; nothing of it was run"
            )
        if _REBUILDS.fullmatch(full):
            raise InputError(
                f"holds a tensor of a kind that is not read here ({full});"
                " save dense tensors of plain numbers"
            )
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        # Whole modules name their classes so, with the source.
        if pid[0] == "module":
            return pid[1]
        _, element, key, _, count, *views = pid
        if element not in _ELEMENTS.values():
            raise InputError(f"holds numbers of a kind that is not read here: {pid!r}")
        if any(view is not None for view in views):
            raise InputError("holds storages that are parts of others; save it again")
        storage = _Storage(key, element, count)
        if self.storages.setdefault(key, storage) != storage:
            raise InputError(f"is broken: its storage {key} has two types or sizes")
        return storage


def read(path: Path) -> dict[str, Tensor]:
    """Finds the tensors of a PyTorch file.

    Args:
        path: a zip archive as PyTorch writes it since 1.6, or the stream of before.

    Returns:
        The tensors by their dotted names: what lies in dictionaries and lists of the
        saved object, {"model": {"a": t}} as "model.a".

    Raises:
        InputError: the file is neither, is broken or does not tell the truth.
    """
    with _naming(path):
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if content[:4] == _ZIP_MAGIC:
            saved, storages = _read_archive(path, content)
        elif content[_TAR_MAGIC_PLACE] == _TAR_MAGIC:
            raise InputError(
                "is a tar archive, as PyTorch's first versions wrote: load it with"
                " PyTorch and save it again"
            )
        else:
            saved, storages = _read_stream(content)
        return {
            name: _locate(path, name, view, storages)
            for name, view in _flatten(saved).items()
        }


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Makes of all that goes wrong a sentence that begins with the file's name."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path.name} {error}") from error
    # An unpickler raises errors of a dozen kinds, and documents that it may be any.
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        reason = str(error) or type(error).__name__
        raise InputError(
            f"{path.name} cannot be read as a PyTorch file: {reason}"
        ) from error


def _read_archive(path: Path, content: mmap.mmap) -> tuple[object, dict[str, Stretch]]:
    """Returns the saved object, and the storages by key."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        root = archive.namelist()[0].split("/")[0]
    if f"{root}/constants.pkl" in members:
        raise InputError("is a TorchScript program: save its state_dict() instead")

    def find(name: str, order: str = "<") -> Stretch:
        member = members.get(f"{root}/{name}")
        if member is None:
            raise InputError(f"lacks its part {root}/{name}")
        return _find_member(content, member, order)

    saved, named = _load(io.BytesIO(find("data.pkl").data))
    order = "<"
    # Older versions did not write it, and hardly ran on other machines.
    if f"{root}/byteorder" in members:
        order = _BYTE_ORDERS[bytes(find("byteorder").data)]
    return saved, {key: find(f"data/{key}", order) for key in named}


def _find_member(content: mmap.mmap, member: zipfile.ZipInfo, order: str) -> Stretch:
    if member.compress_type != zipfile.ZIP_STORED:
        raise InputError(
            f"has its part {member.filename} compressed, as PyTorch does not write it:"
            " unpack it and pack it again without compression (zip -0)"
        )
    # The directory's name and extra field need not be as long as those at the member.
    magic, name, extra = _LOCAL_HEADER.unpack_from(content, member.header_offset)
    start = member.header_offset + _LOCAL_HEADER.size + name + extra
    if magic != _ZIP_MAGIC or start + member.file_size > len(content):
        raise InputError(f"is broken at its part {member.filename}")
    label = f"its part {member.filename}"
    return Stretch(label, content, start, member.file_size, order, member.CRC)


def _read_stream(content: mmap.mmap) -> tuple[object, dict[str, Stretch]]:
    """Returns the saved object, and the storages by key.

    Numbers are little-endian whatever machine wrote them.
    """
    if _load(content)[0] != _STREAM_MAGIC:
        raise InputError("is a pickle, but not one of PyTorch")
    if (version := _load(content)[0]) != _STREAM_VERSION:
        raise InputError(f"is of a version that is not known, {version}")
    # About the machine that wrote it: nothing that matters.
    _load(content)
    saved, named = _load(content)
    keys, _ = _load(content)
    storages = {}
    for key in keys:
        count = int.from_bytes(content.read(8), "little", signed=True)
        size = count * np.dtype(named[key].element).itemsize
        start = content.tell()
        if not 0 <= size <= len(content) - start:
            raise InputError(
                f"ends within its storage {key}, which has {count} numbers"
            )
        content.seek(start + size)
        storages[key] = Stretch(f"its storage {key}", content, start, size)
    return saved, storages


def _load(stream: Any) -> tuple[Any, dict[str, _Storage]]:
    """Reads the next pickle of a stream.

    Args:
        stream: at the pickle; at its end afterwards.

    Returns:
        The object, and the storages that it names, by key.

    Raises:
        InputError: it would take memory out of all proportion to its size. The
            unpickler's memo is as long as its largest index, and four bytes can ask for
            64 GiB.
    """
    start = stream.tell()
    for opcode, argument, position in pickletools.genops(stream):
        # An object takes a byte at least.
        if opcode.name in _PUTS and argument > position - start:
            raise InputError(f"is broken: its pickle has no object {argument}")
    stream.seek(start)
    unpickler = _Unpickler(stream)
    return unpickler.load(), unpickler.storages


def _flatten(saved: object) -> dict[str, _View]:
    """Returns the tensors in nested dictionaries and lists, by dotted name."""
    views: dict[str, _View] = {}
    # A pickle can make a dictionary that holds itself.
    seen = set()
    stack = [("", saved)]
    while stack:
        name, value = stack.pop()
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, _View):
            if name in views:
                raise InputError(f"holds two tensors by the name {name}")
            views[name] = value
        elif isinstance(value, dict):
            items = value.items()
        elif isinstance(value, list | tuple):
            items = enumerate(value)
        if id(value) not in seen:
            seen.add(id(value))
            dot = f"{name}." if name else ""
            stack += reversed([(f"{dot}{key}", item) for key, item in items])
    return views


def _locate(path: Path, name: str, view: _View, storages: dict[str, Stretch]) -> Tensor:
    """Finds a tensor's place, and refuses one that is not all in its storage."""
    if not isinstance(view.storage, _Storage) or view.storage.key not in storages:
        raise InputError(f"lacks the storage of {name}")
    key, element, count = view.storage
    storage, dtype = storages[key], np.dtype(element)
    offset, shape, strides = view.offset, tuple(view.shape), tuple(view.strides)
    numbers = (count, offset, *shape, *strides)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise InputError(f"is broken: {name} has sizes {numbers}")
    steps = zip(shape, strides, strict=True)
    last = offset + sum((size - 1) * stride for size, stride in steps)
    held = min(count, storage.size // dtype.itemsize)
    if count > held or (0 not in shape and last >= held):
        raise InputError(
            f"is broken: {name} needs {max(count, last + 1)} numbers of its storage,"
            f" which has {held}"
        )
    # Strides of 0 can make a terabyte of a single number.
    if math.prod(shape) > len(storage.content):
        raise InputError(
            f"is broken: {name} has {math.prod(shape)} numbers in a file of"
            f" {len(storage.content)} bytes"
        )
    # NumPy has limits too, and says so.
    np.broadcast_to(np.zeros((), dtype), shape)
    return Tensor(path, storage, dtype, offset, shape, strides)
