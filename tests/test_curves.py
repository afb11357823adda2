"""Curves: what a run recorded is read up to a step, and drawn the same each time."""

import json
import struct
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from spanbert_jax.errors import InputError
from spanbert_jax.interop.curves import draw_curves
from spanbert_jax.interop.history import last_evaluation, read_history


def make_history(*steps: int) -> list[dict[str, Any]]:
    """A line of training each step, and a look at held-out text each tenth."""
    records: list[dict[str, Any]] = []
    for step in steps:
        losses = {"mlm_loss": 9 - step / 50, "sbo_loss": 9 - step / 80}
        records.append({"step": step, "split": "train", **losses})
        if step % 10 == 0:
            held_out = {**losses, "unigram_loss": 6.5}
            records.append({"step": step, "split": "valid", **held_out})
    return records


def write_metrics(workdir: Path, history: list[dict[str, Any]], end: str = "") -> None:
    lines = "".join(json.dumps(record) + "\n" for record in history)
    (workdir / "metrics.jsonl").write_text(lines + end)


def test_the_history_ends_with_the_step(tmp_path: Path) -> None:
    history = make_history(*range(1, 31))
    write_metrics(tmp_path, history)
    assert read_history(tmp_path, 30) == history
    assert read_history(tmp_path, 19) == make_history(*range(1, 20))
    assert last_evaluation(read_history(tmp_path, 19))["step"] == 10
    assert last_evaluation(read_history(tmp_path, 9)) is None


@pytest.mark.parametrize("end", ['{"step": 4, "spl', '{"step": 4}'])
def test_a_line_that_is_being_written_is_not_read(tmp_path: Path, end: str) -> None:
    write_metrics(tmp_path, make_history(1, 2, 3), end)
    assert read_history(tmp_path, 9) == make_history(1, 2, 3)


def test_a_run_without_metrics_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path, 9) == []
    write_metrics(tmp_path, [], '{"step"')
    assert read_history(tmp_path, 9) == []


@pytest.mark.parametrize("line", ["nothing", "[]", "{}"])
def test_broken_metrics_are_refused(tmp_path: Path, line: str) -> None:
    write_metrics(tmp_path, make_history(1), f"{line}\n")
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
    chunks = chunks_of(draw_curves(make_history(*range(1, 31))))
    assert set(chunks) == {"IHDR", "pHYs", "IDAT", "IEND"}
    assert struct.unpack(">II", chunks["IHDR"][:8]) == (960, 540)


def test_equal_histories_give_equal_figures_and_others_do_not() -> None:
    history = make_history(*range(1, 31))
    first = draw_curves(history)
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 20}):
        assert draw_curves(history) == first
        assert matplotlib.rcParams["font.size"] == 20
    without_text = [record for record in history if record["split"] == "train"]
    others = [draw_curves(without_text), draw_curves(make_history(*range(1, 30)))]
    assert len({first, *others}) == 3
