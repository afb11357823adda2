"""metrics.jsonl, TensorBoard's events and what ends a run."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

import text
import toy
from spanbert_jax.data.batch import Batch, make_batch
from spanbert_jax.errors import NonFiniteError, StorageError
from spanbert_jax.model.losses import Prediction
from spanbert_jax.training.metrics import (
    FILE,
    Log,
    checksum,
    cut_back,
    evaluation_at,
)
from spanbert_jax.training.step import StepMetrics

# Sums over 20 MLM targets, 5 right; 10 SBO targets, 1 right; 8 pairs, 6 right.
MLM = Prediction(*np.float32([60, 5, 20]))
SBO = Prediction(*np.float32([5, 1, 10]))
NSP = Prediction(*np.float32([4, 6, 8]))


def one_corpus(_: range) -> dict[str, float]:
    """The shares of a run with a single corpus."""
    return {}


@pytest.fixture
def config() -> ConfigDict:
    return toy.make_config(Path())


@pytest.fixture(scope="module")
def batch() -> Batch:
    feed = text.make_feed(text.random_split(12, [30, 40, 17]), 64)
    return make_batch(feed, np.array([0, -1]), np.array([0, 0]))


def make_metrics(
    loss: float = 3.5, grad_norm: float = 0.75, **heads: Prediction
) -> StepMetrics:
    """Of MLM and SBO, or of the heads that are given."""
    return StepMetrics(
        loss=np.float32(loss),
        heads=heads or {"mlm": MLM, "sbo": SBO},
        grad_norm=np.float32(grad_norm),
        tokens=np.int32(89),
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


def test_a_resumed_log_holds_each_step_once(
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    for start, stop in ((0, 5), (3, 8)):
        log = Log(tmp_path, config, start, stop, one_corpus)
        for step in range(start + 1, stop + 1):
            log.update(step, make_metrics(), batch)
        log.close()
    assert steps(tmp_path) == list(range(1, 9))


def test_an_evaluation_is_found_by_its_step(tmp_path: Path, config: ConfigDict) -> None:
    assert evaluation_at(tmp_path, 4) is None
    log = Log(tmp_path, config, 0, 20, one_corpus)
    log.evaluation(4, {"mlm_loss": 2.5})
    log.close()
    assert evaluation_at(tmp_path, 4)["mlm_loss"] == 2.5
    assert evaluation_at(tmp_path, 3) is None


def test_every_array_of_a_batch_counts_in_its_checksum(batch: Batch) -> None:
    whole = checksum(batch)
    assert whole == checksum({key: batch[key].copy() for key in reversed(batch)})
    seen = {whole}
    for key, array in batch.items():
        changed = array.copy()
        changed[-1, -1] += 1
        seen.add(checksum(batch | {key: changed}))
    assert len(seen) == 1 + len(batch)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_number_that_is_not_finite_ends_the_run(
    tmp_path: Path, config: ConfigDict, batch: Batch, name: str, value: float
) -> None:
    log = Log(tmp_path, config, 0, 20, one_corpus)
    log.update(1, make_metrics(), batch)
    with pytest.raises(NonFiniteError, match=rf"{name} is {value} at step 2\b"):
        log.update(2, make_metrics(**{name: value}), batch)
    log.close()
    assert steps(tmp_path) == [1]


def test_a_number_that_is_not_finite_ends_the_run_between_two_lines_too(
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    config.train.log_every = 10
    log = Log(tmp_path, config, 0, 20, one_corpus)
    with pytest.raises(NonFiniteError):
        log.update(7, make_metrics(loss=math.nan), batch)
    log.close()


def test_an_update_is_recorded_with_its_means_and_its_rate(
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    log = Log(tmp_path, config, 0, 20, one_corpus)
    log.update(2, make_metrics(), batch)
    log.close()
    [found] = lines(tmp_path)
    measured = {name: found.pop(name) for name in ("tokens_per_second", "seconds")}
    assert all(value > 0 for value in measured.values())
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
        "batch_crc32": checksum(batch),
    }


def test_a_run_records_the_heads_that_it_has(
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    log = Log(tmp_path, config, 0, 20, one_corpus)
    log.update(1, make_metrics(mlm=MLM), batch)
    log.update(2, make_metrics(mlm=MLM, sbo=SBO, nsp=NSP), batch)
    log.close()
    one, all_three = lines(tmp_path)
    assert not any(name.startswith(("sbo", "nsp")) for name in one)
    assert (all_three["nsp_loss"], all_three["nsp_accuracy"]) == (0.5, 0.75)
    assert all_three.keys() - one.keys() == {
        *("sbo_loss", "sbo_accuracy", "nsp_loss", "nsp_accuracy")
    }


def test_a_step_without_a_target_of_a_head_records_0(
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    log = Log(tmp_path, config, 0, 20, one_corpus)
    log.update(1, make_metrics(mlm=MLM, nsp=Prediction(*np.zeros(3))), batch)
    log.close()
    [found] = lines(tmp_path)
    assert (found["nsp_loss"], found["nsp_accuracy"]) == (0, 0)


def test_the_held_out_loss_weighs_the_heads_as_the_objective_does(
    tmp_path: Path, config: ConfigDict
) -> None:
    config.sbo.weight, config.nsp.weight = 0.5, 0.25
    log = Log(tmp_path, config, 0, 20, one_corpus)
    log.evaluation(1, {"mlm_loss": 3.0})
    log.evaluation(2, {"mlm_loss": 3.0, "sbo_loss": 4.0})
    log.evaluation(3, {"mlm_loss": 3.0, "sbo_loss": 4.0, "nsp_loss": 0.5})
    with pytest.raises(NonFiniteError, match="nan after step 4"):
        log.evaluation(4, {"mlm_loss": 3.0, "nsp_loss": math.nan})
    log.close()
    assert [found["loss"] for found in lines(tmp_path)] == [3.0, 5.0, 5.125]


def test_every_nth_update_is_recorded(
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    config.train.log_every = 3
    log = Log(tmp_path, config, 4, 20, one_corpus)
    for step in range(5, 13):
        log.update(step, make_metrics(), batch)
    log.close()
    assert steps(tmp_path) == [6, 9, 12]


def test_a_record_is_on_disk_at_once(
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    log = Log(tmp_path, config, 0, 20, one_corpus)
    log.update(1, make_metrics(), batch)
    assert steps(tmp_path) == [1]
    assert "train/loss" in {tag for tag, *_ in scalars(tmp_path)}
    log.close()


def test_a_directory_that_cannot_be_written_is_a_storage_error(
    tmp_path: Path, config: ConfigDict
) -> None:
    with pytest.raises(StorageError, match=FILE):
        Log(tmp_path / "missing", config, 0, 20, one_corpus)


def test_a_record_is_said_in_one_line(
    tmp_path: Path,
    config: ConfigDict,
    batch: Batch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = Log(tmp_path, config, 0, 2000, one_corpus)
    log.update(1234, make_metrics(), batch)
    log.update(1235, make_metrics(mlm=MLM, nsp=NSP), batch)
    log.close()
    line, with_nsp = capsys.readouterr().out.splitlines()
    for part in ("1,234", "train", "loss 3.500", "MLM 3.000", "25.0%", "SBO 0.500"):
        assert part in line
    assert "NSP" not in line
    for part in ("NSP 0.500", "NSP accuracy 75.0%"):
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
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    log = Log(tmp_path, config, 0, 20, one_corpus)
    log.update(1, make_metrics(), batch)
    log.update(2, make_metrics(loss=2.25), batch)
    log.evaluation(2, {"mlm_loss": 1.5, "mlm_span_exact": {"1": 0.5, "11+": 0.125}})
    log.close()
    expected = []
    for held in lines(tmp_path):
        for name, value in held.items():
            if name == "mlm_span_exact":
                for length, share in value.items():
                    tag = f"valid/mlm_span_exact/{length}"
                    expected.append((tag, held["step"], pytest.approx(share)))
            elif name not in ("step", "split"):
                tag = f"{held['split']}/{name}"
                expected.append((tag, held["step"], pytest.approx(value, rel=1e-6)))
    found = scalars(tmp_path)
    assert found == expected
    assert ("train/loss", 2, 2.25) in found
    assert ("valid/mlm_span_exact/11+", 2, 0.125) in found


def test_tensorboard_drops_what_a_resumed_run_does_again(
    tmp_path: Path, config: ConfigDict, batch: Batch
) -> None:
    import tensorflow as tf

    for start, stop in ((0, 5), (3, 6)):
        log = Log(tmp_path, config, start, stop, one_corpus)
        for step in range(start + 1, stop + 1):
            log.update(step, make_metrics(), batch)
        log.close()
    status = tf.compat.v1.SessionLog.START
    restarts = [e.step for e in events(tmp_path) if e.session_log.status == status]
    # "Purge from here on": the first step that is done again.
    assert restarts == [1, 4]
    assert [e.file_version for e in events(tmp_path) if e.file_version] == [
        "brain.Event:2"
    ] * 2
