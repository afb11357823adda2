"""Files by path and by URL, packed files, and errors that name the file."""

import gzip
import os

import fsspec
import pytest
import zstandard

from spanbert_jax.corpus.files import File, Naming, find_files, is_packed
from spanbert_jax.errors import InputError, StorageError


def read_all(location, **options):
    with File(str(location), **options) as file:
        return b"".join(iter(lambda: file.read(7), b""))


def test_by_path_and_by_url_the_same_bytes(tmp_path):
    content = os.urandom(1000)
    (tmp_path / "a").write_bytes(content)
    with fsspec.open("memory://files/a", "wb") as file:
        file.write(content)
    for location in (tmp_path / "a", "memory://files/a"):
        assert read_all(location) == content
        with File(str(location)) as file:
            file.seek(10)
            assert file.peek(3)[:3] == content[10:13]
            assert file.read(5) == content[10:15]


def test_lines_come_whole_or_in_parts(tmp_path):
    (tmp_path / "a").write_bytes(b"one two\nthree")
    with File(str(tmp_path / "a")) as file:
        parts = [file.readline(5) for _ in range(4)]
    assert parts == [b"one t", b"wo\n", b"three", b""]


def test_unpacking_goes_by_the_name_and_can_be_left_out(tmp_path):
    content = b"word " * 100_000
    packed = gzip.compress(content)
    for name in ("a.gz", "A.GZ"):
        (tmp_path / name).write_bytes(packed)
        assert is_packed(str(tmp_path / name))
        assert read_all(tmp_path / name) == content
        assert read_all(tmp_path / name, unpack=False) == packed
    assert not is_packed("a.gz/b.txt")


def test_zstd_with_a_long_window_and_many_frames(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    content = os.urandom(100_000) * 3
    packer = zstandard.ZstdCompressor(compression_params=parameters)
    (tmp_path / "a.zst").write_bytes(
        b"".join(packer.compress(content[i : i + 999]) for i in range(0, 300_000, 999))
    )
    assert read_all(tmp_path / "a.zst") == content
    stream = packer.compressobj()
    (tmp_path / "b.zst").write_bytes(stream.compress(content) + stream.flush())
    assert read_all(tmp_path / "b.zst") == content
    (tmp_path / "c.zst").write_bytes(b"")
    assert read_all(tmp_path / "c.zst") == b""


def test_a_stamp_changes_with_the_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    (before,) = find_files(str(path))
    assert find_files(str(path)) == [before]
    path.write_text("two")
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns + 1))
    (after,) = find_files(str(path))
    assert (after.size, after.location) == (before.size, before.location)
    assert after.stamp != before.stamp
    stamps = []
    for content in (b"one", b"two"):
        with fsspec.open("memory://stamps/a", "wb") as file:
            file.write(content)
        stamps += [info.stamp for info in find_files("memory://stamps/a")]
    assert stamps[0] != stamps[1]


def test_names_hold_no_path_and_no_key():
    with fsspec.open("memory://names/a?key=secret", "wb") as file:
        file.write(b"x")
    (info,) = find_files("memory://names/a?key=secret")
    assert info.name == "a"


def test_urls_are_expanded_like_paths():
    for name in ("a[1].txt", "b.txt", "sub.txt/c.txt"):
        with fsspec.open(f"memory://globs/{name}", "wb") as file:
            file.write(b"x")

    def names(pattern):
        return sorted(info.name for info in find_files(f"memory://globs/{pattern}"))

    assert names("*.txt") == ["a[1].txt", "b.txt"]
    assert names("a[1].txt") == ["a[1].txt"]
    assert names("**/c.txt") == ["c.txt"]
    with pytest.raises(InputError, match=r"memory://globs/x\*.txt matches no file"):
        names("x*.txt")
    with pytest.raises(InputError, match=r"sub\.txt is a directory"):
        names("sub.txt")


def test_a_file_system_without_its_package_says_what_to_install():
    fsspec.register_implementation("absent", "absent_package.FileSystem", clobber=True)
    with pytest.raises(
        InputError, match=r"absent://a/b .*: pip install absent_package"
    ):
        find_files("absent://a/b")
    fsspec.register_implementation("absentx", "fsspec.absent.System", clobber=True)
    with pytest.raises(InputError, match=r"pip install 'fsspec\[absentx\]'"):
        File("absentx://a/b")
    with pytest.raises(InputError, match=r"nosuch://a/b: .*not known"):
        find_files("nosuch://a/b")


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is no regular file"):
        find_files(str(tmp_path / "pipe"))
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"cannot read .*broken"):
        find_files(str(tmp_path / "brok*"))


def test_foreign_errors_name_the_file_and_ours_pass():
    with pytest.raises(InputError, match="cannot read a/b: KeyError"), Naming("a/b"):
        raise KeyError
    for error in (StorageError("ours"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, Naming("a/b"):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("location", "packed"),
    [
        ("/a/b.txt.gz", True),
        ("https://host/b.txt.GZ?key=1.txt", True),
        ("https://host/b.txt?key=1.gz", False),
        ("/a/b.txt?.gz", True),
        ("/a.gz/b", False),
    ],
)
def test_what_is_packed_is_told_by_the_name_without_a_key(location, packed):
    assert is_packed(location) == packed
