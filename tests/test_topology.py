"""Topologies: what there is, and a sentence for what there is not."""

import importlib.util

import jax
import pytest

from spanbert_jax.errors import InputError
from spanbert_jax.training.chips import CHIPS, find_chip
from spanbert_jax.training.topology import can_compile, make_devices, parse_topology


@pytest.mark.parametrize(
    ("name", "platform", "chip", "size"),
    [
        ("v5e:8x8", "tpu", "v5e", 64),
        ("v5e:1x1", "tpu", "v5e", 1),
        ("v6e:16x16", "tpu", "v6e", 256),
        ("v4:2x2x1", "tpu", "v4", 4),
        ("v4:4x4x8", "tpu", "v4", 128),
        ("v5p:4x8x8", "tpu", "v5p", 256),
        ("gpu:h100x32", "gpu", "h100", 32),
        ("gpu:a100x4", "gpu", "a100", 4),
        ("cpu:8", "cpu", None, 8),
    ],
)
def test_a_name_tells_the_chips(
    name: str, platform: str, chip: str | None, size: int
) -> None:
    topology = parse_topology(name)
    assert topology.name == name
    assert topology.platform == platform
    assert topology.chip == (chip and CHIPS[chip])
    assert topology.size == size


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "v5e:XxY"),
        ("v3:2x2", "v5e:XxY"),
        ("v5e", "2 sides, such as v5e:8x8"),
        ("v5e:64", "2 sides"),
        ("v5e:4x4x4", "2 sides"),
        ("v5e:8x-8", "2 sides"),
        ("v5e:0x8", "2 sides"),
        ("v4:4x4", "3 sides, such as v4:8x8x8"),
        ("v5e:3x4", "must be even"),
        ("v5p:4x1x4", "must be even"),
        ("v5e:1024x1024", "1,048,576 chips; the most is 8,192"),
        ("gpu:h100", "gpu:h100x32"),
        ("gpu:k80x8", "one of a100, h100, h200"),
        ("gpu:h100x12", "a multiple of 8"),
        ("gpu:h100x0", "gpu:CHIPxCOUNT"),
        ("cpu:0", "cpu:COUNT"),
        ("cpu:many", "cpu:COUNT"),
    ],
)
def test_a_slice_that_is_none_is_one_sentence(name: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_topology(name)
    assert str(caught.value).startswith(f"--topology={name}")
    assert says in str(caught.value)


def test_the_devices_of_a_cpu_are_those_of_the_process() -> None:
    assert make_devices(parse_topology("cpu:4")) == jax.devices()[:4]


def _lacks(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Hides all packages with a word in their names."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if word in name else find(name),
    )


def test_without_libtpu_a_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _lacks(monkeypatch, "libtpu")
    with pytest.raises(InputError, match=r"pip install 'jax\[tpu\]'"):
        can_compile(parse_topology("v5e:2x2"))


def test_without_cudas_plugin_a_gpu_is_not_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _lacks(monkeypatch, "cuda")
    assert not can_compile(parse_topology("gpu:h100x8"))
    assert can_compile(parse_topology("cpu:8"))


def test_a_chip_is_found_by_what_jax_calls_it() -> None:
    for chip in CHIPS.values():
        assert all(find_chip(kind) is chip for kind in chip.kinds)
    kinds = [kind for chip in CHIPS.values() for kind in chip.kinds]
    assert len(kinds) == len(set(kinds))
    assert find_chip("cpu") is None
