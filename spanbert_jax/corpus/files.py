"""Bytes from wherever they lie: local files and fsspec's URLs, packed or not."""

import bz2
import glob
import gzip
import io
import lzma
import os
import re
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self

from spanbert_jax.errors import InputError, UserError

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_BUFFER_BYTES = 1 << 20
# What zstandard unpacks at a time; it hands out all that comes of it at once.
_ZSTD_BYTES = 1 << 15
# Frames of `zstd --ultra --long=31`, the most that the format's own tool makes.
_ZSTD_WINDOW_BYTES = 1 << 31
# What a file's version is called by the file systems of fsspec, the surest first.
_VERSION_KEYS = (
    *("etag", "ETag", "generation", "md5Hash", "content_md5"),
    *("updated", "LastModified", "last_modified", "mtime", "created"),
)


@dataclass(frozen=True)
class FileInfo:
    """A file that is there.

    Attributes:
        location: an absolute path, or a URL.
        size: bytes.
        stamp: another one when the file has changed.
    """

    location: str
    size: int
    stamp: str

    @property
    def name(self) -> str:
        """The base name."""
        return _base_name(self.location)


def _base_name(location: str) -> str:
    name = location.rsplit("/", 1)[-1]
    # A signed address carries its key there.
    return name.partition("?")[0] if _URL.match(location) else name


class Naming:
    """A context in which whatever a library raises becomes a sentence with the file.

    To stand around calls of file systems and codecs only: each has errors of its own
    kinds, and ours would be taken for theirs.
    """

    def __init__(self, location: str) -> None:
        self._location = location

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(
            error, UserError | MemoryError
        ):
            reason = str(error) or type(error).__name__
            raise InputError(
                f"--input: cannot read {self._location}: {reason}"
            ) from error


class File:
    """A file open for reading.

    Args:
        location: a path or a URL.
        unpack: reads the content of a packed file.

    Raises:
        InputError: the file cannot be read; so do all methods.
    """

    def __init__(self, location: str, unpack: bool = True) -> None:
        self._naming = Naming(location)
        with ExitStack() as opening, self._naming:
            file: Any = opening.enter_context(_open(location))
            if unpack and is_packed(location):
                packed = _UNPACKERS[_suffix(location)](file)
                file = io.BufferedReader(packed, _BUFFER_BYTES)
                opening.enter_context(file)
            self.raw: io.BufferedReader = file
            self._closing = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def read(self, size: int) -> bytes:
        """Returns the next bytes: `size` of them or fewer, none at the end."""
        with self._naming:
            return self.raw.read(size)

    def peek(self, size: int) -> bytes:
        """Returns what comes next without taking it: about `size` bytes, or more."""
        with self._naming:
            return self.raw.peek(size)

    def readline(self, size: int) -> bytes:
        """Returns the next line with its end, or the first `size` bytes of it."""
        with self._naming:
            return self.raw.readline(size)

    def seek(self, position: int) -> None:
        """Goes to a place in the (unpacked) file."""
        with self._naming:
            self.raw.seek(position)


def is_packed(location: str) -> bool:
    """Tells by its name whether a file is compressed."""
    return _suffix(location) in _UNPACKERS


def _suffix(location: str) -> str:
    return os.path.splitext(_base_name(location))[1].lower()


def find_files(pattern: str) -> list[FileInfo]:
    """Lists the files that a path, a URL or a glob of either names.

    Args:
        pattern: "**" in it goes into directories; a name that exists is taken as it is,
            whatever characters it has.

    Raises:
        InputError: there is no such file, or what keeps it cannot be asked.
    """
    # Of a local file by its URL: the same file by its path is the same source.
    path = re.sub(r"^(file|local)://", "", pattern)
    with Naming(pattern):
        found = _find_urls(path) if _URL.match(path) else _find_paths(path)
    files = [info for info in found if info is not None]
    if not files:
        reason = "is a directory; name its files" if found else "matches no file"
        raise InputError(f"--input={pattern} {reason}")
    return files


def _find_paths(pattern: str) -> list[FileInfo | None]:
    """Lists files, and None for each directory."""
    path = os.path.expanduser(pattern)
    # A file may be called "a[1].txt": the name itself goes before the glob.
    names = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
    return [_describe_path(os.path.abspath(name)) for name in names]


def _describe_path(path: str) -> FileInfo | None:
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(
            f"--input: {path} is no regular file; a build reads its text several times"
        )
    return FileInfo(path, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def _find_urls(pattern: str) -> list[FileInfo | None]:
    """Lists files, and None for each directory."""
    system, path = _file_system(pattern)
    if system.exists(path):
        found = {path: system.info(path)}
    else:
        found = system.glob(path, detail=True)
    return [
        None
        if info["type"] == "directory"
        else _describe_url(system.unstrip_protocol(name), info)
        for name, info in found.items()
    ]


def _describe_url(location: str, info: Mapping[str, Any]) -> FileInfo:
    if info.get("size") is None:
        raise InputError(f"--input: {location} does not tell its size; copy it first")
    versions = [str(info[key]) for key in _VERSION_KEYS if info.get(key)]
    return FileInfo(
        location, info["size"], "-".join([str(info["size"]), *versions[:1]])
    )


def _file_system(location: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and what it calls the file."""
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    try:
        return url_to_fs(location)
    except ImportError as error:
        match = _URL.match(location)
        protocol = match[1] if match else ""
        package = known_implementations[protocol]["class"].split(".")[0]
        if package == "fsspec":
            package = f"'fsspec[{protocol.replace('https', 'http')}]'"
        raise InputError(
            f"--input={location} needs a package that is not installed: pip install"
            f" {package}"
        ) from error


def _open(location: str) -> BinaryIO:
    if not _URL.match(location):
        return open(location, "rb", buffering=_BUFFER_BYTES)
    system, path = _file_system(location)
    return io.BufferedReader(system.open(path, "rb"), _BUFFER_BYTES)


class _ZstdFile(io.RawIOBase):
    """All frames of a .zst file.

    zstandard's own reader stops after the first frame, or takes a file that breaks off
    for a complete one.
    """

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__()
        try:
            from zstandard import ZstdDecompressor
        except ImportError as error:
            raise InputError(
                "--input: a .zst file needs a package that is not installed: pip"
                " install zstandard"
            ) from error
        self._unpacker = ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._packed = packed
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._output:
            if not self._unpack():
                return 0
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _unpack(self) -> bool:
        self._input = self._input or self._packed.read(_ZSTD_BYTES)
        if not self._input:
            if self._frame is not None:
                raise EOFError("it breaks off before its end")
            return False
        if self._frame is None:
            self._frame = self._unpacker.decompressobj()
        self._output = memoryview(self._frame.decompress(self._input))
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
        return True


_UNPACKERS: dict[str, Any] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _ZstdFile,
}
