"""PyTorch's files: their numbers exactly, and never a call of what they name."""

import argparse
import collections
import pickle
import random
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import weightfiles as wf
from spanbert_jax.errors import InputError
from spanbert_jax.interop import pickles
from spanbert_jax.interop.pickles import read

DTYPES = [np.dtype(name) for name in wf.STORAGES if name != "bfloat16"]
DTYPES.append(np.dtype(ml_dtypes.bfloat16))


def make_archive(path: Path, item: bytes, storages: dict[str, np.ndarray]) -> None:
    wf.write_archive(path, item, {k: v.tobytes() for k, v in storages.items()})


def make_stream(path: Path, item: bytes, storages: dict[str, np.ndarray]) -> None:
    wf.write_stream(path, item, {k: (v.size, v.tobytes()) for k, v in storages.items()})


both = pytest.mark.parametrize("write", [make_archive, make_stream])
Write = Callable[[Path, bytes, dict[str, np.ndarray]], None]


def read_all(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in read(path).items()}


def random_array(generator: np.random.Generator, dtype: np.dtype) -> np.ndarray:
    return generator.normal(scale=50, size=60).astype(np.float32).astype(dtype)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, write: Write, dtype: np.dtype) -> None:
    array = random_array(np.random.default_rng(0), dtype)
    write(tmp_path / "a.pt", wf.mapping({"a": wf.of_array("0", array)}), {"0": array})
    tensor = read(tmp_path / "a.pt")["a"]
    assert tensor.shape == array.shape
    found = tensor.read()
    assert found.dtype == dtype
    assert found.tobytes() == array.tobytes()


@both
def test_any_view_of_a_shared_storage(tmp_path: Path, write: Write) -> None:
    generator = np.random.default_rng(1)
    base = generator.normal(size=(4, 5, 6)).astype(np.float32)
    views = {}
    for i in range(100):
        starts = generator.integers(0, 6, 3)
        steps = generator.integers(1, 4, 3)
        places = zip(starts, steps, strict=True)
        view = base[tuple(slice(a, None, step) for a, step in places)]
        view = view.transpose(generator.permutation(3))
        if i % 3 == 0 and 1 in view.shape:
            view = np.broadcast_to(view, [7 if n == 1 else n for n in view.shape])
        views[f"v{i}"] = view
    views["last"] = base[3, 4, 5:]
    views["scalar"] = base[1:2, 2, 3].reshape(())
    address = base.__array_interface__["data"][0]
    items = {
        name: wf.tensor(
            wf.storage("0", "float32", base.size),
            view.shape,
            [stride // 4 for stride in view.strides],
            0
            if not view.size
            else (view.__array_interface__["data"][0] - address) // 4,
        )
        for name, view in views.items()
    }
    write(tmp_path / "a.pt", wf.mapping(items), {"0": base})
    found = read(tmp_path / "a.pt")
    assert found.keys() == views.keys()
    assert any(0 in view.shape for view in views.values())
    assert any(0 in view.strides for view in views.values())
    for name, view in views.items():
        array = found[name].read()
        assert found[name].shape == array.shape == view.shape
        np.testing.assert_array_equal(array, view)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_order_of_bytes(tmp_path: Path, dtype: np.dtype) -> None:
    array = random_array(np.random.default_rng(2), dtype).reshape(12, 5)
    words = array.view(f"u{dtype.itemsize}").byteswap()
    item = wf.mapping({"a": wf.of_array("0", array)})
    for order, stored in (("big", words), ("little", array)):
        others = {"byteorder": order.encode()}
        wf.write_archive(tmp_path / "a.pt", item, {"0": stored.tobytes()}, others)
        assert read(tmp_path / "a.pt")["a"].read().tobytes() == array.tobytes()
    wf.write_archive(tmp_path / "a.pt", item, {}, {"byteorder": b"middle"})
    with pytest.raises(InputError, match=r"a\.pt cannot be read"):
        read(tmp_path / "a.pt")


@both
def test_names_are_dotted_through_dictionaries_and_lists(
    tmp_path: Path, write: Write
) -> None:
    arrays = {key: np.full(3, float(key), np.float32) for key in "0123"}
    first, second, third, fourth = (wf.of_array(key, arrays[key]) for key in arrays)
    # Put once, it is got by its number: one tensor by two names.
    tied = wf.mapping({"x.y": second + b"q\x07", "twin": b"h\x07"})
    item = wf.mapping(
        {
            "model": wf.call(wf.named("collections", "OrderedDict"))
            + b"q\x05"
            + b"("
            + wf.text("a")
            + first
            + b"u",
            "again": wf.group(wf.number(1), tied),
            "list": wf.listing(third, wf.mapping({"b": fourth})),
            "epoch": wf.number(3),
        }
    )
    write(tmp_path / "a.pt", item, arrays)
    found = read_all(tmp_path / "a.pt")
    assert {name: array[0] for name, array in found.items()} == {
        "model.a": 0,
        "again.1.x.y": 1,
        "again.1.twin": 1,
        "list.0": 2,
        "list.1.b": 3,
    }


def test_a_dictionary_that_holds_itself(tmp_path: Path) -> None:
    array = np.ones(2, np.float32)
    item = b"}q\x00(" + wf.text("me") + b"h\x00" + wf.text("a")
    item += wf.of_array("0", array) + b"u"
    make_archive(tmp_path / "a.pt", item, {"0": array})
    assert list(read(tmp_path / "a.pt")) == ["a"]


def test_two_tensors_by_one_name_are_refused(tmp_path: Path) -> None:
    array = np.ones(2, np.float32)
    inner = wf.mapping({"b": wf.of_array("0", array)})
    item = wf.mapping({"a.b": wf.of_array("0", array), "a": inner})
    make_archive(tmp_path / "a.pt", item, {"0": array})
    with pytest.raises(InputError, match=r"^a\.pt holds two tensors .* a\.b$"):
        read(tmp_path / "a.pt")


@both
def test_parameters_and_subclasses(tmp_path: Path, write: Write) -> None:
    array = np.arange(4, dtype=np.float32)
    hooks = wf.call(wf.named("collections", "OrderedDict"))
    plain = wf.of_array("0", array)
    state = wf.mapping({"tag": wf.text("x")})
    parameter = wf.named("torch._utils", "_rebuild_parameter")
    stateful = wf.named("torch._utils", "_rebuild_parameter_with_state")
    typed = wf.named("torch._tensor", "_rebuild_from_type_v2")
    rebuild = wf.named("torch._utils", "_rebuild_tensor_v2")
    held = wf.storage("0", "float32", 4)
    arguments = wf.group(
        held, wf.number(0), wf.numbers([4]), wf.numbers([1]), b"\x89", hooks
    )
    items = {
        "old": wf.call(
            wf.named("torch._utils", "_rebuild_tensor"),
            *(held, wf.number(0), wf.numbers([4]), wf.numbers([1])),
        ),
        "size": wf.call(
            rebuild,
            *(held, wf.number(0)),
            wf.call(wf.named("torch", "Size"), wf.listing(wf.number(4))),
            *(wf.numbers([1]), b"\x89", hooks),
        ),
        "parameter": wf.call(parameter, plain, b"\x88", hooks),
        "stateful": wf.call(stateful, plain, b"\x88", hooks, state),
        "typed": wf.call(
            typed, rebuild, wf.named("my.module", "Weight"), arguments, state
        ),
    }
    write(tmp_path / "a.pt", wf.mapping(items), {"0": array})
    found = read(tmp_path / "a.pt")
    assert found.keys() == items.keys()
    for tensor in found.values():
        np.testing.assert_array_equal(tensor.read(), array)


STRANGERS = {
    "namespace": wf.create(wf.named("argparse", "Namespace"))
    + wf.mapping({"lr": wf.number(1)})
    + b"b",
    "default": wf.call(wf.named("collections", "defaultdict"), wf.named("f", "g"))
    + b"("
    + wf.text("a")
    + wf.number(1)
    + b"u",
    "item": wf.call(wf.named("collections", "defaultdict"))
    + wf.text("a")
    + wf.number(1)
    + b"s",
    "list": wf.create(wf.named("my", "List")) + b"(" + wf.number(1) + b"e",
    "append": wf.create(wf.named("my", "List")) + wf.number(1) + b"a",
    "set": b"\x80\x04"
    + wf.create(wf.named("my", "Set"))
    + b"("
    + wf.number(1)
    + b"\x90",
    "options": wf.named("my", "Kind") + wf.group() + wf.mapping({"a": b"N"}) + b"\x92",
    "old class": b"(imy\nKind\n",
    "object": b"(" + wf.named("my", "Kind") + wf.number(1) + b"o",
    "function": wf.named("my.module", "function"),
    "device": wf.call(wf.named("torch", "device"), wf.text("cuda:0")),
    "dtype": wf.named("torch", "float32"),
    "scalar": wf.call(
        wf.named("numpy.core.multiarray", "scalar"),
        wf.call(wf.named("numpy", "dtype"), wf.text("f8")),
        wf.call(wf.named("_codecs", "encode"), wf.text("\xff"), wf.text("latin1")),
    ),
    "bytes of Python 2": b"U\x02\xff\xfe",
    "module": wf.group(wf.text("module"), wf.named("my", "Net"), b"N", b"N") + b"Q",
}


@both
@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_what_else_is_saved_is_passed_over(
    tmp_path: Path, write: Write, stranger: bytes
) -> None:
    array = np.arange(3, dtype=np.float32)
    items = {"first": stranger, "a": wf.of_array("0", array), "last": stranger}
    write(tmp_path / "a.pt", wf.mapping(items), {"0": array})
    (name,) = found = read(tmp_path / "a.pt")
    assert name == "a"
    np.testing.assert_array_equal(found["a"].read(), array)


def python(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()"


def system(module: str) -> Callable[[Path], bytes]:
    return lambda marker: wf.call(
        wf.named(module, "system"), wf.text(f"touch {marker}")
    )


# Each makes a file when Python itself loads it.
CALLS: dict[str, Callable[[Path], bytes]] = {
    "os.system": system("os"),
    "posix.system": system("posix"),
    "builtins.exec": lambda marker: wf.call(
        wf.named("builtins", "exec"), wf.text(python(marker))
    ),
    "builtins.eval": lambda marker: wf.call(
        wf.named("__builtin__", "eval"), wf.text(python(marker))
    ),
    "builtins.open": lambda marker: wf.call(
        wf.named("builtins", "open"), wf.text(str(marker)), wf.text("w")
    ),
    "subprocess.getoutput": lambda marker: wf.call(
        wf.named("subprocess", "getoutput"), wf.text(f"touch {marker}")
    ),
}
# These too, by ways that no list could know.
DETOURS: dict[str, Callable[[Path], bytes]] = {
    # Protocol 4 has names with dots.
    "a method": lambda marker: (
        b"\x80\x04"
        + wf.call(
            wf.named("pathlib", "Path.touch"),
            wf.call(wf.named("pathlib", "PosixPath"), wf.text(str(marker))),
        )
    ),
    "a class": lambda marker: wf.call(
        wf.named("logging", "FileHandler"), wf.text(str(marker))
    ),
    "a new object": lambda marker: (
        wf.create(wf.named("io", "FileIO"), wf.text(str(marker)), wf.text("w"))
        + b"0"
        + wf.call(wf.named("_io", "open"), wf.text(str(marker)), wf.text("w"))
    ),
    "an instance": lambda marker: (
        b"(" + wf.text(str(marker)) + wf.text("w") + b"i_io\nFileIO\n"
    ),
}


@both
@pytest.mark.parametrize("call", (CALLS | DETOURS).values(), ids=CALLS | DETOURS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_that_a_pickle_calls_is_called(
    tmp_path: Path, write: Write, call: Callable[[Path], bytes]
) -> None:
    marker = tmp_path / "marker"
    array = np.ones(2, np.float32)
    hostile = call(marker)
    pickle.loads(wf.whole(hostile))
    assert marker.exists()
    marker.unlink()
    items = {"a": wf.of_array("0", array), "b": hostile}
    for item in (hostile, wf.mapping(items)):
        write(tmp_path / "a.pt", item, {"0": array} if item != hostile else {})
        try:
            found = read(tmp_path / "a.pt")
        except InputError:
            assert call in CALLS.values()
        else:
            assert call in DETOURS.values()
            assert list(found) == (["a"] if item != hostile else [])
        assert not marker.exists()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_bomb_is_called_by_its_name(
    tmp_path: Path, call: Callable[[Path], bytes], request: pytest.FixtureRequest
) -> None:
    make_archive(tmp_path / "a.pt", call(tmp_path / "marker"), {})
    name = request.node.callspec.id.split(".")[-1]
    with pytest.raises(InputError, match=rf"^a\.pt asks to call \S+\.{name}, .* run$"):
        read(tmp_path / "a.pt")


def test_no_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange_module.py").write_text(python(tmp_path / "marker"))
    monkeypatch.syspath_prepend(tmp_path)
    item = wf.call(wf.named("strange_module", "Kind"))
    make_archive(tmp_path / "a.pt", item, {})
    assert read(tmp_path / "a.pt") == {}
    assert "strange_module" not in sys.modules
    assert not (tmp_path / "marker").exists()


def attributes() -> dict[str, dict[str, object]]:
    """What classes and functions within a pickle's reach have."""
    reach = [collections.OrderedDict, tuple, str]
    reach += [
        item
        for item in vars(pickles).values()
        if getattr(item, "__module__", None) == pickles.__name__
    ]
    return {item.__name__: dict(vars(item)) for item in reach}


# What follows the name on the stack would change what it names.
SETS = {
    "a dictionary": wf.mapping({"__call__": wf.named("a", "b")}) + b"b",
    "slots": wf.group(b"N", wf.mapping({"__call__": wf.named("a", "b")})) + b"b",
    "a class": wf.group(b"N", wf.mapping({"__class__": wf.named("a", "b")})) + b"b",
    "a function": wf.group(b"N", wf.mapping({"_function": wf.named("a", "b")})) + b"b",
}


@pytest.mark.parametrize("change", SETS.values(), ids=SETS)
@pytest.mark.parametrize(
    "victim",
    [
        ("torch._utils", "_rebuild_tensor_v2"),
        ("collections", "OrderedDict"),
        ("torch", "FloatStorage"),
        ("torch", "Size"),
        ("my", "Kind"),
    ],
    ids=str,
)
def test_a_pickle_changes_nothing_for_the_next(
    tmp_path: Path, victim: tuple[str, str], change: bytes
) -> None:
    array = np.arange(3, dtype=np.float32)
    before = attributes()
    make_archive(tmp_path / "bad.pt", wf.named(*victim) + change, {})
    try:
        assert read(tmp_path / "bad.pt") == {}
    except InputError as error:
        assert "bad.pt cannot be read" in str(error)  # noqa: PT017
    assert attributes() == before
    wf.save(tmp_path / "good.pt", {"a": array})
    np.testing.assert_array_equal(read(tmp_path / "good.pt")["a"].read(), array)


FLOATS = wf.storage("0", "float32", 6)
BROKEN = {
    "offset": (wf.tensor(FLOATS, [2], [1], 5), "needs 7 numbers of its .* has 6"),
    "far": (wf.tensor(FLOATS, [1], [1], 2**62), "needs"),
    "shape": (wf.tensor(FLOATS, [7], [1]), "needs 7"),
    "strides": (wf.tensor(FLOATS, [2, 3], [4, 1]), "needs 7"),
    "negative offset": (wf.tensor(FLOATS, [1], [1], -1), "has sizes"),
    "negative stride": (wf.tensor(FLOATS, [2], [-1], 3), "has sizes"),
    "negative size": (wf.tensor(FLOATS, [-2, -3], [1, 1]), "has sizes"),
    "ranks": (wf.tensor(FLOATS, [2, 3], [1]), "shorter"),
    "too many axes": (wf.tensor(FLOATS, [1] * 99, [1] * 99), ""),
    "expanded": (wf.tensor(FLOATS, [2**40], [0]), "1099511627776 numbers in a file"),
    "overflow": (wf.tensor(FLOATS, [2**62, 4, 0], [0, 0, 0]), ""),
    "fraction": (
        wf.call(
            wf.named("torch._utils", "_rebuild_tensor_v2"),
            *(FLOATS, b"G\0\0\0\0\0\0\0\0", wf.numbers([1]), wf.numbers([1])),
        ),
        "has sizes",
    ),
    "count": (wf.tensor(wf.storage("0", "float32", 7), [1], [1]), "needs 7"),
    "type": (wf.tensor(wf.storage("0", "float64", 6), [1], [1]), "needs 6 .* has 3"),
    "no storage": (wf.tensor(wf.storage("1", "float32", 1), [1], [1]), "lacks"),
    "two types": (
        wf.mapping({"a": wf.tensor(wf.storage("0", "int32", 6), [1], [1])})[:-1]
        + wf.text("b")
        + wf.tensor(FLOATS, [1], [1])
        + b"u",
        "two types",
    ),
    "a forged storage": (
        wf.tensor(wf.group(wf.text("0"), wf.text("O"), wf.number(1)), [1], [1]),
        "lacks the storage",
    ),
    "objects": (
        wf.group(*map(wf.text, ("storage", "O", "0", "cpu")), wf.number(1)) + b"Q",
        "kind that is not read",
    ),
    "part of a storage": (
        wf.group(
            *(wf.text("storage"), wf.named("torch", "FloatStorage"), wf.text("0")),
            *(wf.text("cpu"), wf.number(6), wf.group(wf.text("1"), b"K\0", b"K\1")),
        )
        + b"Q",
        "parts of others",
    ),
    "quantised": (wf.named("torch._utils", "_rebuild_qtensor"), "_rebuild_qtensor"),
    "persistent nonsense": (b"NQ", "cannot be read"),
    "a call of a placeholder's result": (
        wf.call(wf.call(wf.named("builtins", "getattr"), b"N", wf.text("a"))),
        "not callable",
    ),
    "an extension": (b"\x82\x01", "cannot be read"),
    "an empty stack": (b"00", "cannot be read"),
    "no opcode": (b"\xff", "cannot be read"),
    "memory": (b"Nr\xff\xff\xff\x7f", "has no object 2147483647"),
    "memory by a text": (b"Np99999999999999999999\n", "has no object 9999"),
}


@pytest.mark.parametrize(("item", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_and_hostile_pickles(tmp_path: Path, item: bytes, message: str) -> None:
    array = np.arange(6, dtype=np.float32)
    make_archive(tmp_path / "a.pt", wf.mapping({"a": item}), {"0": array})
    with pytest.raises(InputError, match=rf"^a\.pt .*{message}"):
        read_all(tmp_path / "a.pt")


@both
def test_a_file_that_ends_too_soon_anywhere(tmp_path: Path, write: Write) -> None:
    array = np.arange(6, dtype=np.float32)
    write(tmp_path / "a.pt", wf.mapping({"a": wf.of_array("0", array)}), {"0": array})
    whole = (tmp_path / "a.pt").read_bytes()
    assert list(read(tmp_path / "a.pt")) == ["a"]
    for length in range(len(whole)):
        (tmp_path / "a.pt").write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"^a\.pt "):
            read(tmp_path / "a.pt")


@both
def test_random_damage_is_an_error_or_changes_numbers_only(
    tmp_path: Path, write: Write
) -> None:
    array = np.arange(6, dtype=np.float32)
    items = {"a": wf.of_array("0", array)} | STRANGERS
    write(tmp_path / "a.pt", wf.mapping(items), {"0": array})
    whole = (tmp_path / "a.pt").read_bytes()
    rng = random.Random(0)
    errors = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        (tmp_path / "a.pt").write_bytes(damaged)
        try:
            read_all(tmp_path / "a.pt")
        except InputError as error:
            errors += 1
            assert str(error).startswith("a.pt")  # noqa: PT017
    assert errors > 100


def test_damaged_numbers_are_found_by_their_checksum(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    wf.save(tmp_path / "a.pt", {"a": array})
    whole = (tmp_path / "a.pt").read_bytes()
    place = whole.index(array.tobytes()) + 5
    (tmp_path / "a.pt").write_bytes(whole[:place] + b"\x40" + whole[place + 1 :])
    tensor = read(tmp_path / "a.pt")["a"]
    assert tensor.shape == array.shape
    with pytest.raises(InputError, match=r"^a\.pt is damaged: .*archive/data/0 "):
        tensor.read()
    (tmp_path / "a.pt").write_bytes(whole.replace(b"FloatStorage", b"IntStorage  ", 1))
    with pytest.raises(InputError, match=r"^a\.pt is damaged: .*archive/data\.pkl "):
        read(tmp_path / "a.pt")


def test_files_of_other_kinds_are_told_apart(tmp_path: Path) -> None:
    array = np.ones(2, np.float32)
    item = wf.mapping({"a": wf.of_array("0", array)})
    path = tmp_path / "a.pt"

    def refuses(message: str) -> None:
        with pytest.raises(InputError, match=rf"^a\.pt .*{message}"):
            read(path)

    refuses("No such file")
    path.write_bytes(b"")
    refuses("empty")
    path.write_bytes(b"some text\n" * 100)
    refuses("cannot be read as a PyTorch file")
    path.write_bytes(pickle.dumps({"a": 1}))
    refuses("is a pickle, but not one of PyTorch")
    path.write_bytes(b"\0" * 257 + b"ustar" + b"\0" * 250)
    refuses("tar archive")
    wf.write_archive(path, item, {"0": array.tobytes()}, compression=8)
    refuses("compressed")
    wf.write_archive(path, item, {"0": array.tobytes()}, {"constants.pkl": b""})
    refuses("TorchScript")
    wf.write_archive(path, item, {})
    refuses("lacks its part archive/data/0")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "x")
    refuses("lacks its part word/data.pkl")


def test_no_more_memory_than_what_is_asked_for(tmp_path: Path) -> None:
    large = np.zeros(1 << 23, np.float32)
    wf.save(tmp_path / "a.pt", {"large": large, "small": np.ones(9, np.float32)})
    tracemalloc.start()
    try:
        arrays = read_all(tmp_path / "a.pt")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrays["large"].shape == large.shape
    assert not arrays["large"].flags.writeable
    assert peak < 1 << 20


@pytest.mark.parametrize("zipped", [True, False])
def test_files_that_torch_writes(tmp_path: Path, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    base = torch.randn(6, 7, 8)
    state = {
        "plain": base,
        "transposed": base.transpose(0, 2),
        "part": base[1:5:2, 3, ::3],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "marked": torch.nn.Parameter(torch.randn(5)),
        "bfloat16": torch.randn(33).bfloat16(),
        "half": torch.randn(33).half(),
        "double": torch.randn(3).double(),
        "bool": torch.tensor([True, False]),
        **{
            str(dtype): torch.arange(-9, 9).to(dtype)
            for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        },
        "bytes": torch.arange(9, dtype=torch.uint8),
    }
    state["marked"].mark = "one"
    state["tied"] = state["plain"]
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    saved = {
        "model": state,
        "net": net.state_dict(),
        "whole": net,
        "args": argparse.Namespace(arch="bert", betas=(0.9, 0.98)),
        "best": np.float64(1.5),
        "array": np.ones(3),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "meters": collections.defaultdict(list, a=[1]),
        "optimizer": torch.optim.AdamW(net.parameters()).state_dict(),
    }
    path = tmp_path / "a.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    found = read(path)
    expected = {f"model.{name}": tensor for name, tensor in state.items()}
    expected |= {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        array = found[name].read()
        assert str(tensor.dtype) == f"torch.{array.dtype.name}"
        assert found[name].shape == array.shape == tuple(tensor.shape)
        if array.dtype.name == "bfloat16":
            tensor, array = tensor.float(), array.astype(np.float32)
        np.testing.assert_array_equal(array, tensor.detach().numpy())


def test_torch_may_leave_checksums_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(5.0)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(computed)
    found = read(tmp_path / "a.pt")["a"].read()
    np.testing.assert_array_equal(found, np.arange(5, dtype=np.float32))
