"""Which file a path means, and what is in it."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

import weightfiles as wf
from spanbert_jax.errors import InputError
from spanbert_jax.interop.weights import Weights, find

ARRAYS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.bias": np.arange(3, dtype=np.float16),
    "steps": np.arange(4),
}


def check(found: Weights, library: str, directory: Path) -> None:
    """Compares what was found with `ARRAYS`."""
    assert (found.library, found.directory) == (library, directory)
    assert found.shapes == {name: array.shape for name, array in ARRAYS.items()}
    for name, array in ARRAYS.items():
        loaded = found.load(name)
        assert loaded.dtype == array.dtype
        np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_safetensors(tmp_path: Path, name: str) -> None:
    save_file(ARRAYS, tmp_path / name)
    check(find(tmp_path), "safetensors", tmp_path)
    check(find(tmp_path / name), "safetensors", tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "checkpoint.pth"])
def test_pytorch(tmp_path: Path, name: str) -> None:
    wf.save(tmp_path / name, ARRAYS)
    check(find(tmp_path), "PyTorch", tmp_path)
    check(find(tmp_path / name), "PyTorch", tmp_path)


def test_a_pytorch_file_may_have_any_name(tmp_path: Path) -> None:
    wf.save(tmp_path / "checkpoint_best", ARRAYS)
    check(find(tmp_path / "checkpoint_best"), "PyTorch", tmp_path)


@pytest.mark.parametrize("name", ["bert_model.ckpt", "model.ckpt-100"])
def test_tensorflow(tmp_path: Path, name: str) -> None:
    wf.save_tensorflow(tmp_path / name, ARRAYS)
    parts = sorted(part.name for part in tmp_path.iterdir())
    assert parts == [f"{name}.data-00000-of-00001", f"{name}.index"]
    for path in ("", name, *parts):
        check(find(tmp_path / path), "TensorFlow", tmp_path)


def test_hugging_faces_names_go_before_others(tmp_path: Path) -> None:
    other = {"b": np.zeros(1, np.float32)}
    wf.save(tmp_path / "training_args.bin", other)
    wf.save(tmp_path / "optimizer.pt", other)
    wf.save(tmp_path / "pytorch_model.bin", ARRAYS)
    check(find(tmp_path), "PyTorch", tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    check(find(tmp_path), "PyTorch", tmp_path)
    wf.save(tmp_path / "pytorch_model.bin", other)
    save_file(ARRAYS, tmp_path / "model.safetensors")
    check(find(tmp_path), "safetensors", tmp_path)


@pytest.mark.parametrize("library", ["safetensors", "PyTorch"])
def test_shards(tmp_path: Path, library: str) -> None:
    name, write = {
        "safetensors": ("model.safetensors", save_file),
        "PyTorch": ("pytorch_model.bin", lambda arrays, path: wf.save(path, arrays)),
    }[library]
    stem, suffix = name.split(".")
    places = {}
    for i, (key, array) in enumerate(ARRAYS.items()):
        part = f"{stem}-{i % 2 + 1:05}-of-00002.{suffix}"
        places[key] = part
        parts = {other: ARRAYS[other] for other in places if places[other] == part}
        # What the index does not name does not count.
        parts["stray"] = array
        write(parts, tmp_path / part)
    index = tmp_path / f"{name}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    check(find(tmp_path), library, tmp_path)
    check(find(index), library, tmp_path)

    def refuses(message: str, **weight_map: str) -> None:
        index.write_text(json.dumps({"weight_map": places | weight_map}))
        with pytest.raises(InputError, match=message):
            find(tmp_path)

    refuses(r"lacks more, which .*\.index\.json says", more=part)
    refuses(rf"no {stem}-3\.{suffix} in", more=f"{stem}-3.{suffix}")
    refuses("own directory", more=f"../{part}")
    refuses("own directory", more=str(tmp_path / part))
    for text in ("", "[", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(InputError, match=rf"{name}\.index\.json (cannot|is empty)"):
            find(tmp_path)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_bfloat16(tmp_path: Path, suffix: str) -> None:
    array = np.linspace(-3, 3, 10).astype(ml_dtypes.bfloat16)
    path = tmp_path / f"a.{suffix}"
    if suffix == "pt":
        wf.save(path, {"a": array})
    else:
        save_file({"a": array}, path)
    loaded = find(path).load("a")
    assert loaded.dtype == array.dtype
    assert loaded.tobytes() == array.tobytes()


def test_a_dtype_that_numpy_lacks(tmp_path: Path) -> None:
    content = save({"a": np.zeros(4, np.uint8), "b": np.ones(2, np.float32)})
    content = content.replace(b'"U8"', b'"F8_E4M3"')
    # The header grows by five bytes.
    size = int.from_bytes(content[:8], "little")
    content = (size + 5).to_bytes(8, "little") + content[8:]
    (tmp_path / "a.safetensors").write_bytes(content)
    found = find(tmp_path)
    assert found.load("b").tolist() == [1, 1]
    with pytest.raises(InputError, match=r"a in a\.safetensors is stored as F8_E4M3"):
        found.load("a")


def test_no_file_or_more_than_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"there is no gone in {tmp_path}"):
        find(tmp_path / "gone")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="holds no weights: neither model"):
        find(tmp_path)
    for name in ("checkpoint1.pt", "bert_model.ckpt.index", "a.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    shown = "3 files of weights, a.safetensors, bert_model.ckpt.index, checkpoint1.pt: "
    with pytest.raises(InputError, match=shown):
        find(tmp_path)


def test_files_that_hold_no_weights(tmp_path: Path) -> None:
    for name in ("a.safetensors", "a.bin", "a.ckpt.index"):
        path = tmp_path / name
        for content, message in (
            (b"", "is empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid", r"\(git lfs pull\)"),
            (b"<html>" * 100, "cannot be read"),
        ):
            path.write_bytes(content)
            with pytest.raises(
                InputError,
                match=rf"^{name.removesuffix('.index')}"
                rf".*{message}",
            ):
                find(path)


def test_files_that_end_too_soon(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "a.safetensors")
    wf.save(tmp_path / "a.bin", ARRAYS)
    wf.save_tensorflow(tmp_path / "a.ckpt", ARRAYS)
    parts = list(tmp_path.iterdir())
    assert len(parts) == 4
    for part in parts:
        whole = part.read_bytes()
        part.write_bytes(whole[:-1])
        with pytest.raises(InputError, match=r"^a\."):
            load_all(part)
        part.write_bytes(whole)
        assert load_all(part).keys() == ARRAYS.keys()
    (tmp_path / "a.ckpt.data-00000-of-00001").unlink()
    with pytest.raises(InputError, match=r"^a\.ckpt cannot be read"):
        load_all(tmp_path / "a.ckpt")


def load_all(path: Path) -> dict[str, np.ndarray]:
    found = find(path)
    return {name: found.load(name) for name in found.shapes}
