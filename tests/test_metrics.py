"""metrics.jsonl, TensorBoard's events and what ends a run."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import toy
from clock import Clock
from spanbert_jax.errors import NonFiniteError, StorageError
from spanbert_jax.model.losses import Prediction
from spanbert_jax.training.meter import Meter
from spanbert_jax.training.metrics import Log
from spanbert_jax.training.sinks import FILE, JsonLines, cut_back, evaluation_at
from spanbert_jax.training.step import StepMetrics

# Sums over 20 MLM targets, 5 right; 10 SBO targets, 1 right; 8 pairs, 6 right.
MLM = Prediction(*np.float32([60, 5, 20]))
SBO = Prediction(*np.float32([5, 1, 10]))
NSP = Prediction(*np.float32([4, 6, 8]))


# No process of the run was told to stop.
GO_ON = np.bool_(False)


def make_log(
    workdir: Path,
    config: ConfigDict,
    start: int,
    stop: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Log:
    """Of a run with a single corpus on 4 devices of 1,000 FLOP/s; 600 FLOPs a step."""
    meter = Meter(4, 600, 1000.0, clock)
    return Log(workdir, config, start, stop, meter, lambda _: {})


@pytest.fixture
def config() -> ConfigDict:
    return toy.make_config(Path())


def make_metrics(
    loss: float = 3.5, grad_norm: float = 0.75, **heads: Prediction
) -> StepMetrics:
    """Of MLM and SBO, or of the heads that are given."""
    return StepMetrics(
        loss=np.float32(loss),
        heads=heads or {"mlm": MLM, "sbo": SBO},
        grad_norm=np.float32(grad_norm),
        tokens=np.int32(89),
        batch_checksum=np.uint32(2**32 - 5),
    )


def lines(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / FILE).read_text().splitlines()]


def steps(workdir: Path) -> list[int]:
    return [record["step"] for record in lines(workdir)]


def record(step: int) -> str:
    return json.dumps({"step": step, "split": "train", "loss": 1 / step}) + "\n"


@pytest.mark.parametrize("step", [0, 1, 4, 6, 9])
def test_lines_after_a_step_are_cut(tmp_path: Path, step: int) -> None:
    path = tmp_path / FILE
    whole = [record(number) for number in range(1, 7)]
    path.write_text("".join(whole))
    cut_back(path, step)
    assert path.read_text() == "".join(whole[:step])
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("length", [1, 2, 12, 30, -2])
def test_a_torn_last_line_is_cut(tmp_path: Path, length: int) -> None:
    path = tmp_path / FILE
    path.write_text(record(1) + record(2) + record(3)[:length])
    cut_back(path, 3)
    assert path.read_text() == record(1) + record(2)


def test_a_last_line_that_lacks_its_end_of_line_only_is_kept(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(record(1) + record(2)[:-1])
    cut_back(path, 2)
    assert path.read_text() == record(1) + record(2)


def test_bytes_that_are_no_text_are_cut(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(record(1).encode() + b"\x00\xff\x00")
    cut_back(path, 2)
    assert path.read_text() == record(1)


def test_there_may_be_nothing_to_cut_back(tmp_path: Path) -> None:
    cut_back(tmp_path / FILE, 3)
    assert not list(tmp_path.iterdir())


def test_a_resumed_log_holds_each_step_once(tmp_path: Path, config: ConfigDict) -> None:
    for start, stop in ((0, 5), (3, 8)):
        log = make_log(tmp_path, config, start, stop)
        for step in range(start + 1, stop + 1):
            log.update(step, make_metrics(), GO_ON)
        log.close()
    assert steps(tmp_path) == list(range(1, 9))


def test_an_evaluation_is_found_by_its_step(tmp_path: Path, config: ConfigDict) -> None:
    assert evaluation_at(tmp_path, 4) is None
    log = make_log(tmp_path, config, 0, 20)
    log.evaluation(4, {"mlm_loss": 2.5})
    log.close()
    assert evaluation_at(tmp_path, 4)["mlm_loss"] == 2.5
    assert evaluation_at(tmp_path, 3) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_number_that_is_not_finite_ends_the_run(
    tmp_path: Path, config: ConfigDict, name: str, value: float
) -> None:
    log = make_log(tmp_path, config, 0, 20)
    log.update(1, make_metrics(), GO_ON)
    with pytest.raises(NonFiniteError, match=rf"{name} is {value} at step 2\b"):
        log.update(2, make_metrics(**{name: value}), GO_ON)
    log.close()
    assert steps(tmp_path) == [1]


def test_a_number_that_is_not_finite_ends_the_run_between_two_lines_too(
    tmp_path: Path, config: ConfigDict
) -> None:
    config.train.log_every = 10
    log = make_log(tmp_path, config, 0, 20)
    with pytest.raises(NonFiniteError):
        log.update(7, make_metrics(loss=math.nan), GO_ON)
    log.close()


def test_an_update_is_recorded_with_its_means_and_its_rate(
    tmp_path: Path, config: ConfigDict
) -> None:
    clock = Clock()
    log = make_log(tmp_path, config, 0, 20, clock)
    log.update(1, make_metrics(), GO_ON)
    clock.go_on(0.5)
    log.update(2, make_metrics(), GO_ON)
    log.close()
    _, found = lines(tmp_path)
    assert found.pop("process_peak_bytes") > 2**20
    assert found == {
        "step": 2,
        "split": "train",
        "loss": 3.5,
        "mlm_loss": 3.0,
        "mlm_accuracy": 0.25,
        "sbo_loss": 0.5,
        "sbo_accuracy": pytest.approx(0.1),
        # The second of five updates of warm-up to 1e-3.
        "learning_rate": pytest.approx(4e-4, rel=1e-6),
        "grad_norm": 0.75,
        "batch_checksum": 2**32 - 5,
        "tokens_per_second": 178.0,
        "tokens_per_second_per_device": 44.5,
        "step_seconds": {"p50": 0.5, "p90": 0.5, "max": 0.5},
        "host_wait": 0.0,
        "mfu": pytest.approx(600 / (0.5 * 4 * 1000)),
        "seconds": 0.5,
    }


def test_the_figures_of_speed_are_those_since_the_line_before(
    tmp_path: Path, config: ConfigDict
) -> None:
    config.train.log_every = 3
    clock = Clock()
    log = make_log(tmp_path, config, 0, 20, clock)
    for step in range(1, 10):
        clock.go_on(step)
        log.update(step, make_metrics(), GO_ON)
    log.close()
    # The first step has no time.
    means = [(2 + 3) / 2, (4 + 5 + 6) / 3, (7 + 8 + 9) / 3]
    rates = [found["tokens_per_second"] for found in lines(tmp_path)]
    assert rates == pytest.approx([89 / mean for mean in means])
    assert [found["step_seconds"]["max"] for found in lines(tmp_path)] == [3, 6, 9]


def test_a_line_without_a_timed_step_has_no_figure_of_speed(
    tmp_path: Path, config: ConfigDict
) -> None:
    log = make_log(tmp_path, config, 0, 20)
    log.update(1, make_metrics(), GO_ON)
    log.close()
    [found] = lines(tmp_path)
    speed = {"tokens_per_second", "step_seconds", "host_wait", "mfu"}
    assert not speed & found.keys()
    assert "process_peak_bytes" in found


@pytest.mark.parametrize("stops", [False, True])
def test_an_update_says_whether_the_run_is_to_stop(
    tmp_path: Path, config: ConfigDict, stops: bool
) -> None:
    log = make_log(tmp_path, config, 0, 20)
    assert log.update(1, make_metrics(), np.bool_(stops)) is stops
    log.close()


def test_other_processes_check_and_leave_no_trace(
    tmp_path: Path,
    config: ConfigDict,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / FILE
    path.write_text(record(1) + record(2))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log = make_log(tmp_path, config, 1, 20)
    log.say("what all know")
    assert log.update(2, make_metrics(), np.bool_(True))
    log.evaluation(2, {"mlm_loss": 3.0})
    with pytest.raises(NonFiniteError, match="loss is nan at step 3"):
        log.update(3, make_metrics(loss=math.nan), GO_ON)
    with pytest.raises(NonFiniteError, match="nan after step 3"):
        log.evaluation(3, {"mlm_loss": math.nan})
    log.close()
    assert path.read_text() == record(1) + record(2)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    assert capfd.readouterr() == ("", "")


def test_a_run_records_the_heads_that_it_has(
    tmp_path: Path, config: ConfigDict
) -> None:
    log = make_log(tmp_path, config, 0, 20)
    log.update(1, make_metrics(mlm=MLM), GO_ON)
    log.update(2, make_metrics(mlm=MLM, sbo=SBO, nsp=NSP), GO_ON)
    log.close()
    one, all_three = lines(tmp_path)
    assert not any(name.startswith(("sbo", "nsp")) for name in one)
    assert (all_three["nsp_loss"], all_three["nsp_accuracy"]) == (0.5, 0.75)
    heads = {name.partition("_")[0] for name in all_three if name.endswith("_loss")}
    assert heads == {"mlm", "sbo", "nsp"}


def test_a_step_without_a_target_of_a_head_records_0(
    tmp_path: Path, config: ConfigDict
) -> None:
    log = make_log(tmp_path, config, 0, 20)
    log.update(1, make_metrics(mlm=MLM, nsp=Prediction(*np.zeros(3))), GO_ON)
    log.close()
    [found] = lines(tmp_path)
    assert (found["nsp_loss"], found["nsp_accuracy"]) == (0, 0)


def test_the_held_out_loss_weighs_the_heads_as_the_objective_does(
    tmp_path: Path, config: ConfigDict
) -> None:
    config.sbo.weight, config.nsp.weight = 0.5, 0.25
    log = make_log(tmp_path, config, 0, 20)
    log.evaluation(1, {"mlm_loss": 3.0})
    log.evaluation(2, {"mlm_loss": 3.0, "sbo_loss": 4.0})
    log.evaluation(3, {"mlm_loss": 3.0, "sbo_loss": 4.0, "nsp_loss": 0.5})
    with pytest.raises(NonFiniteError, match="nan after step 4"):
        log.evaluation(4, {"mlm_loss": 3.0, "nsp_loss": math.nan})
    log.close()
    assert [found["loss"] for found in lines(tmp_path)] == [3.0, 5.0, 5.125]


def test_every_nth_update_is_recorded(tmp_path: Path, config: ConfigDict) -> None:
    config.train.log_every = 3
    log = make_log(tmp_path, config, 4, 20)
    for step in range(5, 13):
        log.update(step, make_metrics(), GO_ON)
    log.close()
    assert steps(tmp_path) == [6, 9, 12]


def test_a_record_is_on_disk_at_once(tmp_path: Path, config: ConfigDict) -> None:
    log = make_log(tmp_path, config, 0, 20)
    log.update(1, make_metrics(), GO_ON)
    assert steps(tmp_path) == [1]
    assert "train/loss" in {tag for tag, *_ in scalars(tmp_path)}
    log.close()


def test_a_directory_that_cannot_be_written_is_a_storage_error(
    tmp_path: Path, config: ConfigDict
) -> None:
    with pytest.raises(StorageError, match=FILE):
        make_log(tmp_path / "missing", config, 0, 20)


def test_a_record_is_said_in_one_line(
    tmp_path: Path,
    config: ConfigDict,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    log = make_log(tmp_path, config, 0, 2000, clock)
    log.update(1234, make_metrics(), GO_ON)
    clock.go_on(0.25)
    log.update(1235, make_metrics(mlm=MLM, nsp=NSP), GO_ON)
    log.close()
    line, with_nsp = capsys.readouterr().out.splitlines()
    for part in ("1,234", "train", "loss 3.500", "MLM 3.000", "25.0%", "SBO 0.500"):
        assert part in line
    assert "NSP" not in line
    assert "tokens/s" not in line
    for part in ("NSP 0.500", "NSP accuracy 75.0%", "tokens/s 356", "s/step 0.250"):
        assert part in with_nsp
    for part in ("host wait 0.0%", "MFU 60.0%"):
        assert part in with_nsp
    assert "SBO" not in with_nsp


def events(workdir: Path) -> Iterator:
    import tensorflow as tf

    for path in sorted(workdir.glob("events.out.tfevents.*")):
        for data in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            yield tf.compat.v1.Event.FromString(data)


def scalars(workdir: Path) -> list[tuple[str, int, float]]:
    return [
        (value.tag, event.step, value.simple_value)
        for event in events(workdir)
        for value in event.summary.value
    ]


def test_tensorboard_reads_back_what_metrics_jsonl_holds(
    tmp_path: Path, config: ConfigDict
) -> None:
    clock = Clock()
    log = make_log(tmp_path, config, 0, 20, clock)
    log.update(1, make_metrics(), GO_ON)
    clock.go_on(0.75)
    log.update(2, make_metrics(loss=2.25), GO_ON)
    log.evaluation(2, {"mlm_loss": 1.5, "mlm_span_exact": {"1": 0.5, "11+": 0.125}})
    log.close()
    expected = []
    for held in lines(tmp_path):
        for name, value in held.items():
            if isinstance(value, dict):
                for part, number in value.items():
                    tag = f"{held['split']}/{name}/{part}"
                    expected.append((tag, held["step"], pytest.approx(number)))
            elif name not in ("step", "split"):
                tag = f"{held['split']}/{name}"
                expected.append((tag, held["step"], pytest.approx(value, rel=1e-6)))
    found = scalars(tmp_path)
    assert found == expected
    assert ("train/loss", 2, 2.25) in found
    assert ("valid/mlm_span_exact/11+", 2, 0.125) in found
    assert ("train/step_seconds/p90", 2, 0.75) in found


def test_tensorboard_drops_what_a_resumed_run_does_again(
    tmp_path: Path, config: ConfigDict
) -> None:
    import tensorflow as tf

    for start, stop in ((0, 5), (3, 6)):
        log = make_log(tmp_path, config, start, stop)
        for step in range(start + 1, stop + 1):
            log.update(step, make_metrics(), GO_ON)
        log.close()
    status = tf.compat.v1.SessionLog.START
    restarts = [e.step for e in events(tmp_path) if e.session_log.status == status]
    # "Purge from here on": the first step that is done again.
    assert restarts == [1, 4]
    assert [e.file_version for e in events(tmp_path) if e.file_version] == [
        "brain.Event:2"
    ] * 2


# ---- A full disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_line_that_finds_the_disk_full_fails_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def open_full(_: Path, *mode: str, **options: int) -> IO[bytes]:
        return opened(Path("/dev/full"), *mode, **options)

    monkeypatch.setattr(Path, "open", open_full)
    lines = JsonLines(tmp_path, 0)
    with pytest.raises(OSError, match="No space left"):
        lines.write({"step": 1})
    # Closing must not fail again: its error would take the place of the first one.
    lines.close()


def test_a_line_that_finds_room_for_a_part_only_fails(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path, 0)
    lines.close()

    class Short:
        def write(self, line: bytes) -> int:
            return len(line) - 1

    lines._file = Short()
    with pytest.raises(OSError, match="No space left"):
        lines.write({"step": 1})
