"""The loop: resuming, stopping, failing; everything that a run may meet."""

import functools
import gc
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

import runs
import toy
from spanbert_jax import settings
from spanbert_jax.corpus.mixture import mix
from spanbert_jax.corpus.store import Corpus, open_corpus
from spanbert_jax.data.batch import Batch
from spanbert_jax.data.pipeline import batches
from spanbert_jax.errors import PREEMPTED, InputError, NonFiniteError, StorageError
from spanbert_jax.training.evaluation import evaluate, unigram_log_probs
from spanbert_jax.training.program import cast_votes, make_program
from spanbert_jax.training.sharding import make_mesh, on, put_batch

STEPS = 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return runs.build_corpus(tmp_path_factory.mktemp("corpus") / "short")


@pytest.fixture
def config(toy_cache: Path, corpus: Corpus) -> ConfigDict:
    return runs.make_config(toy_cache, corpus)


@pytest.fixture(scope="module")
def unbroken(
    tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, corpus: Corpus
) -> tuple[Path, str]:
    """A run from step 0 to the last: its directory and its output."""
    workdir = tmp_path_factory.mktemp("unbroken")
    outcome = runs.start(runs.make_config(toy_cache, corpus), corpus, workdir)
    assert outcome.code == 0
    return workdir, outcome.output


@pytest.fixture(scope="module")
def _half(
    tmp_path_factory: pytest.TempPathFactory, toy_cache: Path, corpus: Corpus
) -> Path:
    workdir = tmp_path_factory.mktemp("half")
    config = runs.make_config(toy_cache, corpus)
    config.train.stop_after = 10
    assert runs.start(config, corpus, workdir).code == 0
    assert runs.steps_of(workdir) == [5, 10]
    return workdir


@pytest.fixture
def half(_half: Path, tmp_path: Path) -> Path:
    """A run that stopped after step 10, with checkpoints of steps 5 and 10."""
    return Path(shutil.copytree(_half, tmp_path / "half"))


# ---- Resuming


@pytest.mark.parametrize(("before_epoch_end", "workers"), [(False, 1), (True, 4)])
def test_a_resumed_run_equals_an_unbroken_one(
    config: ConfigDict,
    corpus: Corpus,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    before_epoch_end: bool,
    workers: int,
) -> None:
    rows = settings.feed(config, corpus, "train").plan.num_rows
    whole_batches, rest = divmod(rows, config.train.batch_size)
    # An epoch ends in the batch after the whole ones, and within the run.
    assert rest
    assert 8 < whole_batches < STEPS
    stop = whole_batches if before_epoch_end else 6
    config.data.workers = workers
    config.train.stop_after = stop
    first = runs.start(config, corpus, tmp_path)
    assert first.code == 0
    assert f"stopped at step {stop} " in first.output
    config.train.stop_after = 0
    second = runs.start(config, corpus, tmp_path)
    assert second.code == 0
    assert f"resuming from step {stop} " in second.output
    assert f"finished at step {STEPS}" in second.output
    runs.assert_same_end(tmp_path, unbroken[0], STEPS)


def test_a_new_run_says_that_it_starts_at_step_0(unbroken: tuple[Path, str]) -> None:
    workdir, output = unbroken
    assert f"no finished step in {workdir / 'checkpoints'}: starting at step 0" in (
        output
    )


def test_a_finished_run_says_so_and_changes_nothing(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    workdir = Path(shutil.copytree(unbroken[0], tmp_path / "finished"))
    before = runs.listing(workdir / "checkpoints")
    outcome = runs.start(config, corpus, workdir)
    assert outcome.code == 0
    assert f"finished at step {STEPS}" in outcome.output
    assert runs.listing(workdir / "checkpoints") == before
    runs.assert_same_end(workdir, unbroken[0], STEPS)


def test_metrics_after_the_resumed_step_and_a_torn_line_are_cut(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], half: Path
) -> None:
    later = (unbroken[0] / "metrics.jsonl").read_text().splitlines()[11:15]
    with (half / "metrics.jsonl").open("a") as file:
        file.write("\n".join(later) + '\n{"step": 15, "spl')
    runs.start(config, corpus, half)
    runs.assert_same_end(half, unbroken[0], STEPS)


def test_a_lost_evaluation_is_made_up_for(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], half: Path
) -> None:
    path = half / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert '"valid"' in lines[-1]
    path.write_text("".join(lines[:-1]))
    runs.start(config, corpus, half)
    runs.assert_same_end(half, unbroken[0], STEPS)


# ---- Signals


def _stop_while_step(step: int) -> Callable[[str], None]:
    """Sends SIGTERM while a step is under way: then the one before it is printed."""

    def listen(text: str) -> None:
        if text.startswith(f"step {step - 1:>7,} train"):
            os.kill(os.getpid(), signal.SIGTERM)

    return listen


@pytest.mark.parametrize("step", [pytest.param(7, marks=pytest.mark.slow), 10])
def test_sigterm_saves_and_the_same_command_goes_on(
    config: ConfigDict,
    corpus: Corpus,
    unbroken: tuple[Path, str],
    tmp_path: Path,
    step: int,
) -> None:
    first = runs.start(config, corpus, tmp_path, _stop_while_step(step))
    assert first.code == PREEMPTED
    assert f"step {step} is saved: run the same command again" in first.output
    assert runs.steps_of(tmp_path)[-1] == step
    second = runs.start(config, corpus, tmp_path)
    assert second.code == 0
    runs.assert_same_end(tmp_path, unbroken[0], STEPS)


def test_sigterm_before_an_evaluation_does_not_wait_for_it(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    # The line of step 10 is printed before its evaluation begins.
    first = runs.start(config, corpus, tmp_path, _stop_while_step(11))
    assert first.code == PREEMPTED
    assert runs.steps_of(tmp_path)[-1] == 10
    assert '"valid"' not in (tmp_path / "metrics.jsonl").read_text()
    assert runs.start(config, corpus, tmp_path).code == 0
    runs.assert_same_end(tmp_path, unbroken[0], STEPS)


def test_sigterm_in_the_last_step_loses_no_evaluation(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    outcome = runs.start(config, corpus, tmp_path, _stop_while_step(STEPS))
    if outcome.code == PREEMPTED:
        assert runs.start(config, corpus, tmp_path).code == 0
    runs.assert_same_end(tmp_path, unbroken[0], STEPS)


def test_a_run_gives_the_signals_back(unbroken: tuple[Path, str]) -> None:
    del unbroken  # That run has ended.
    # A shell starts what is to run in the background with SIGINT ignored.
    given = {signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler}
    assert signal.getsignal(signal.SIGTERM) in given
    assert signal.getsignal(signal.SIGINT) in given


# ---- Broken checkpoints

# Orbax leaves them behind when one of many reads fails.
_UNFINISHED_READS = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@_UNFINISHED_READS
def test_a_broken_newest_step_is_passed_over_and_saved_again(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], half: Path
) -> None:
    shutil.rmtree(half / "checkpoints" / "10" / "state")
    outcome = runs.start(config, corpus, half)
    gc.collect()
    assert outcome.code == 0
    (line,) = [line for line in outcome.output.splitlines() if "passed over" in line]
    assert line.startswith("checkpoint 10 cannot be read")
    assert "resuming from step 5 " in outcome.output
    assert (half / "broken" / "10").is_dir()
    assert runs.steps_of(half) == [10, 15, 20]
    runs.assert_same_end(half, unbroken[0], STEPS)


@_UNFINISHED_READS
def test_a_run_with_only_broken_steps_does_not_start_over(
    config: ConfigDict, corpus: Corpus, half: Path
) -> None:
    for step in (5, 10):
        shutil.rmtree(half / "checkpoints" / str(step) / "state")
    before = runs.listing(half)
    with pytest.raises(StorageError, match=r"no checkpoint .* valid.*step 10.*step 5"):
        runs.start(config, corpus, half)
    gc.collect()
    assert runs.listing(half) == before


# ---- What may change between two starts


@pytest.mark.parametrize(
    ("name", "value", "old", "new"),
    [
        ("train.seed", 1, "0", "1"),
        ("train.batch_size", 16, "8", "16"),
        ("data.block_length", 30, "32", "30"),
        ("data.masking", "subword", "'span'", "'subword'"),
        ("data.packing", False, "True", "False"),
        ("data.eval_seed", 7, "1000", "7"),
        ("model.hidden_size", 32, "64", "32"),
        ("model.num_layers", 2, "1", "2"),
        ("model.num_heads", 4, "2", "4"),
        ("sbo.weight", 0.0, r"\[64\]", "None"),
        ("sbo.positions", 5, "20", "5"),
    ],
)
def test_a_run_does_not_go_on_as_another_one(
    config: ConfigDict,
    corpus: Corpus,
    half: Path,
    name: str,
    value: object,
    old: str,
    new: str,
) -> None:
    config.update_from_flattened_dict({name: value})
    before = runs.listing(half)
    with pytest.raises(InputError, match=rf"(?s)cannot go on.*was.*{old}.*now.*{new}"):
        runs.start(config, corpus, half)
    assert runs.listing(half) == before


def test_a_run_does_not_go_on_with_another_text(
    config: ConfigDict, corpus: Corpus, half: Path, tmp_path: Path
) -> None:
    text = toy.make_text(seed=1, documents=32)
    other = runs.build_like(corpus, tmp_path / "other", text, valid_fraction=0.1)
    before = runs.listing(half)
    fingerprints = f"{corpus.fingerprint}.*{other.fingerprint}"
    with pytest.raises(InputError, match=rf"corpus.*{fingerprints}"):
        runs.start(config, other, half)
    assert runs.listing(half) == before


@pytest.mark.slow
def test_a_run_goes_on_with_a_moved_corpus(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], half: Path
) -> None:
    moved = shutil.copytree(corpus.directory, half.parent / "moved")
    config.data.corpus = str(moved)
    runs.start(config, open_corpus(moved), half)
    runs.assert_same_end(half, unbroken[0], STEPS)


def test_other_changes_are_named_and_recorded(
    config: ConfigDict, corpus: Corpus, half: Path
) -> None:
    changes = {
        "data.workers": (2, 1),
        "mesh.data": (1, 8),
        "model.dropout": (0.1, 0.2),
        "optimizer.learning_rate": (1e-3, 2e-3),
        "train.log_every": (1, 3),
        "train.steps": (20, 18),
        "train.stop_after": (10, 0),
    }
    config.update_from_flattened_dict({name: new for name, (_, new) in changes.items()})
    outcome = runs.start(config, corpus, half)
    assert outcome.code == 0
    assert "finished at step 18" in outcome.output
    changes["devices"] = (1, 8)
    lines = [line for line in outcome.output.splitlines() if "changed since" in line]
    assert lines == [
        f"changed since step 10: {name} was {old!r}, is now {new!r}"
        for name, (old, new) in changes.items()
    ]
    assert runs.read_record(half, 18)["changes"] == [
        {"step": 10, "name": name, "old": old, "new": new}
        for name, (old, new) in changes.items()
    ]
    steps = [
        record["step"]
        for record in runs.read_metrics(half)
        if record["split"] == "train"
    ]
    assert steps == [*range(1, 11), 12, 15, 18]


@pytest.mark.slow
def test_changes_of_earlier_starts_stay_recorded(
    config: ConfigDict, corpus: Corpus, half: Path
) -> None:
    for stop in (11, 12):
        config.train.stop_after = stop
        runs.start(config, corpus, half)
    assert [
        (change["step"], change["old"], change["new"])
        for change in runs.read_record(half, 12)["changes"]
    ] == [(10, 10, 11), (11, 11, 12)]


# ---- Failures


@pytest.mark.parametrize(
    "rate",
    [
        1e30,
        pytest.param(1e38, marks=pytest.mark.slow),
        pytest.param(1e15, marks=pytest.mark.slow),
    ],
)
def test_a_non_finite_loss_ends_the_run_before_it_is_saved(
    config: ConfigDict, corpus: Corpus, tmp_path: Path, rate: float
) -> None:
    config.optimizer.learning_rate = rate
    config.checkpoint.every = 1
    with pytest.raises(NonFiniteError, match=r"is (nan|inf) at step \d+;") as caught:
        runs.start(config, corpus, tmp_path)
    step = int(str(caught.value).split("at step ")[1].split(";")[0])
    saved = runs.steps_of(tmp_path)
    assert saved == list(range(max(1, step - 3), step))
    for number in saved:
        for name, array in runs.read_state(tmp_path, number).items():
            assert np.isfinite(array).all(), (number, name)


@pytest.mark.slow
def test_the_last_good_checkpoint_can_be_resumed_after_a_non_finite_loss(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], half: Path
) -> None:
    config.optimizer.learning_rate = 1e30
    with pytest.raises(NonFiniteError):
        runs.start(config, corpus, half)
    config.optimizer.learning_rate = 1e-3
    outcome = runs.start(config, corpus, half)
    assert "resuming from step 10 " in outcome.output
    runs.assert_same_end(half, unbroken[0], STEPS)


@pytest.mark.parametrize("below", ["", "deeper/run"])
def test_a_workdir_that_is_or_lies_below_a_file_is_a_storage_error(
    config: ConfigDict, corpus: Corpus, tmp_path: Path, below: str
) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(StorageError, match="--workdir"):
        runs.start(config, corpus, file / below if below else file)
    assert file.read_text() == "text"


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints"])
def test_a_file_that_cannot_be_written_is_a_storage_error(
    config: ConfigDict, corpus: Corpus, tmp_path: Path, name: str
) -> None:
    if name == "checkpoints":
        (tmp_path / name).write_text("text")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(StorageError, match=name):
        runs.start(config, corpus, tmp_path)


# ---- Small corpora


def _sentences(documents: int) -> str:
    lines = toy.make_text(documents=40).split("\n\n")
    return "\n\n".join(" ".join(text.split()[:5]) for text in lines[:documents]) + "\n"


@pytest.mark.parametrize("documents", [5, 1])
def test_fewer_rows_than_a_batch_train_with_a_warning(
    config: ConfigDict, corpus: Corpus, tmp_path: Path, documents: int
) -> None:
    small = runs.build_like(
        corpus, tmp_path / "small", _sentences(documents), valid_fraction=0.0
    )
    config.data.packing = False
    config.train.stop_after = 3
    outcome = runs.start(config, small, tmp_path / "run")
    assert outcome.code == 0
    assert f"fills {documents} rows, fewer than train.batch_size, which is 8" in (
        outcome.output
    )
    records = runs.read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(math.isfinite(record["loss"]) for record in records)


def test_a_corpus_without_a_block_cannot_be_made(
    corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"all of \d .* --min_tokens=1000 "):
        runs.build_like(corpus, tmp_path / "c", _sentences(5), min_tokens=1000)
    assert not (tmp_path / "c").exists()


def test_a_corpus_without_held_out_text_trains_to_the_end(
    config: ConfigDict, corpus: Corpus, tmp_path: Path
) -> None:
    text = toy.make_text(documents=32)
    whole = runs.build_like(corpus, tmp_path / "whole", text, valid_fraction=0.0)
    outcome = runs.start(config, whole, tmp_path / "run")
    assert outcome.code == 0
    assert f"finished at step {STEPS}" in outcome.output
    assert "held" in outcome.output
    assert all(
        math.isfinite(value)
        for record in runs.read_metrics(tmp_path / "run")
        for value in record.values()
        if isinstance(value, float)
    )


# ---- Metrics


def test_train_lines_hold_the_step_and_what_it_saw(
    config: ConfigDict, unbroken: tuple[Path, str]
) -> None:
    records = [
        record
        for record in runs.read_metrics(unbroken[0])
        if record["split"] == "train"
    ]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        # The first step, and the one after each save, has no time of its own.
        speed = {
            *("tokens_per_second", "tokens_per_second_per_device"),
            *("step_seconds", "host_wait"),
        }
        assert record.keys() == {
            *("step", "split", "loss", "mlm_loss", "sbo_loss", "mlm_accuracy"),
            *("sbo_accuracy", "learning_rate", "grad_norm", "batch_checksum"),
            *("seconds", "process_peak_bytes"),
            *(speed if record["step"] % config.checkpoint.every != 1 else ()),
        }
        total = record["mlm_loss"] + config.sbo.weight * record["sbo_loss"]
        assert record["loss"] == pytest.approx(total, rel=1e-6)
    rising = [1e-3 * update / 5 for update in range(1, 6)]
    falling = [1e-3 * (20 - update) / 15 for update in range(6, 21)]
    rates = [record["learning_rate"] for record in records]
    assert rates == pytest.approx(rising + falling, rel=1e-5, abs=1e-12)


def test_the_valid_line_counts_every_held_out_block_once(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str]
) -> None:
    records = [
        record
        for record in runs.read_metrics(unbroken[0])
        if record["split"] == "valid"
    ]
    assert [record["step"] for record in records] == [10, 20]
    made = _held_out_batches(config, corpus)
    targets = np.concatenate(
        [batch["target_ids"][batch["target_weights"] > 0] for batch in made]
    )
    counts = corpus.unigram_counts
    share = (counts + 1) / (counts.sum() + len(counts))
    for record in records:
        assert record["mlm_targets"] == len(targets)
        assert record["perplexity"] == pytest.approx(math.exp(record["mlm_loss"]))
        expected = -np.log(share[targets]).mean()
        assert record["unigram_loss"] == pytest.approx(expected)
        for head in ("mlm", "sbo"):
            assert math.isfinite(record[f"{head}_loss"])
            assert 0 <= record[f"{head}_accuracy"] <= 1
            shares, spans = record[f"{head}_span_exact"], record[f"{head}_spans"]
            assert sum(spans.values()) > 0
            assert shares.keys() == {name for name, count in spans.items() if count}
            assert all(0 <= share <= 1 for share in shares.values())


@pytest.mark.slow
def test_without_sbo_there_is_no_sbo_head_and_no_metric_of_it(
    config: ConfigDict, corpus: Corpus, unbroken: tuple[Path, str], tmp_path: Path
) -> None:
    config.sbo.weight = 0.0
    config.train.eval_every = 1
    config.train.stop_after = 1
    runs.start(config, corpus, tmp_path)
    train, valid = runs.read_metrics(tmp_path)
    assert train["loss"] == pytest.approx(train["mlm_loss"])
    assert not [name for name in (*train, *valid) if "sbo" in name]
    heads = [
        [name for name in runs.read_state(workdir, step) if "sbo" in name]
        for workdir, step in ((unbroken[0], STEPS), (tmp_path, 1))
    ]
    assert heads[0]
    assert not heads[1]


# ---- Evaluation


def _held_out_batches(config: ConfigDict, corpus: Corpus) -> list[Batch]:
    held_out = settings.mix(config, mix([corpus]), "valid")
    size = config.train.batch_size
    order = functools.partial(held_out.evaluation_rows, batch_size=size)
    steps = range(-(-held_out.num_rows // size))
    return list(batches(held_out, order, np.arange(size), steps, workers=2))


@pytest.mark.parametrize(("batch_size", "mesh"), [(16, (1, 1, 1)), (8, (2, 2, 2))])
def test_evaluation_does_not_depend_on_how_the_text_is_cut(
    config: ConfigDict, corpus: Corpus, batch_size: int, mesh: tuple[int, int, int]
) -> None:
    model = settings.model(config, corpus.tokenizer.vocab_size)
    unigram = jnp.asarray(unigram_log_probs(corpus.unigram_counts), jnp.float32)
    mask_id = jnp.int32(corpus.tokenizer.mask_id)

    def score() -> dict[str, object]:
        size = config.train.batch_size
        mesh = make_mesh(config, model.geometry)
        shape = settings.feed(config, corpus, "valid").shape(size)
        program = make_program(config, model, mesh, shape)
        with on(mesh):
            params = program.init(jax.random.key(0)).params
            votes = cast_votes(program, False)
            return evaluate(
                lambda batch: program.look(params, batch, votes, unigram, mask_id),
                (
                    put_batch(batch, mesh, size)
                    for batch in _held_out_batches(config, corpus)
                ),
            )

    expected = score()
    config.train.batch_size = batch_size
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = mesh
    found = score()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_held_out_masks_do_not_depend_on_the_seed_of_training(
    config: ConfigDict, corpus: Corpus
) -> None:
    one = _held_out_batches(config, corpus)
    config.train.seed = 1
    other = _held_out_batches(config, corpus)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_part_of_the_held_out_blocks_is_a_fixed_one(
    config: ConfigDict, corpus: Corpus
) -> None:
    every = settings.feed(config, corpus, "valid").plan.row_blocks
    config.eval.max_blocks = 5
    chosen = settings.feed(config, corpus, "valid").plan.row_blocks
    config.train.seed = 1
    again = settings.feed(config, corpus, "valid").plan.row_blocks
    assert len(every) > len(chosen) == len(set(chosen.tolist())) == 5
    assert set(chosen.tolist()) <= set(every.tolist())
    np.testing.assert_array_equal(chosen, again)
