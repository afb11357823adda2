"""Curves: what a run recorded is read up to a step, and drawn the same each time."""

import struct
from pathlib import Path

import matplotlib
import pytest

import models
from spanbert_jax.errors import InputError
from spanbert_jax.interop.curves import draw_curves
from spanbert_jax.interop.history import last_evaluation, read_history


def test_the_history_ends_with_the_step(tmp_path: Path) -> None:
    history = models.make_history(*range(1, 31))
    models.write_metrics(tmp_path, history)
    assert read_history(tmp_path, 30) == history
    assert read_history(tmp_path, 19) == models.make_history(*range(1, 20))
    assert last_evaluation(read_history(tmp_path, 19))["step"] == 10
    assert last_evaluation(read_history(tmp_path, 9)) is None


@pytest.mark.parametrize("end", ['{"step": 4, "spl', '{"step": 4}'])
def test_a_line_that_is_being_written_is_not_read(tmp_path: Path, end: str) -> None:
    models.write_metrics(tmp_path, models.make_history(1, 2, 3), end)
    assert read_history(tmp_path, 9) == models.make_history(1, 2, 3)


def test_a_run_without_metrics_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path, 9) == []
    models.write_metrics(tmp_path, [], '{"step"')
    assert read_history(tmp_path, 9) == []


@pytest.mark.parametrize("line", ["nothing", "[]", "{}"])
def test_broken_metrics_are_refused(tmp_path: Path, line: str) -> None:
    models.write_metrics(tmp_path, models.make_history(1), f"{line}\n")
    with pytest.raises(InputError, match=r"metrics.jsonl cannot be read"):
        read_history(tmp_path, 9)


def chunks_of(png: bytes) -> dict[str, bytes]:
    """The parts of a PNG by their kinds."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    place, found = 8, {}
    while place < len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        found[kind.decode()] = png[place + 8 : place + 8 + size]
        place += size + 12
    return found


def test_a_figure_holds_nothing_of_its_making() -> None:
    chunks = chunks_of(draw_curves(models.make_history(*range(1, 31))))
    assert set(chunks) == {"IHDR", "pHYs", "IDAT", "IEND"}
    assert struct.unpack(">II", chunks["IHDR"][:8]) == (960, 540)


def test_equal_histories_give_equal_figures_and_others_do_not() -> None:
    history = models.make_history(*range(1, 31))
    first = draw_curves(history)
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 20}):
        assert draw_curves(history) == first
        assert matplotlib.rcParams["font.size"] == 20
    without_text = [record for record in history if record["split"] == "train"]
    others = [
        draw_curves(without_text),
        draw_curves(models.make_history(*range(1, 30))),
    ]
    assert len({first, *others}) == 3
