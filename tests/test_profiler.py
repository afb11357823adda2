"""The profiler: which steps are traced, and what cannot be."""

import collections
import math
import signal
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from jax._src.profiler import _profile_state as profiler_state
from ml_collections import ConfigDict

import runs
from spanbert_jax import settings
from spanbert_jax.corpus.mixture import mix
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.data.batch import empty_batch
from spanbert_jax.errors import PREEMPTED, InputError, StorageError
from spanbert_jax.model.flops import step_flops
from spanbert_jax.training import loop
from spanbert_jax.training.chips import CHIPS
from spanbert_jax.training.loop import train
from spanbert_jax.training.profiler import NO_STEPS, Profiler, check_steps, parse_steps


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return runs.build_corpus(tmp_path_factory.mktemp("corpus") / "short")


@pytest.fixture
def config(toy_cache: Path, corpus: Corpus) -> ConfigDict:
    config = runs.make_config(toy_cache, corpus)
    config.model.num_layers = 1
    config.train.eval_every = 0
    config.checkpoint.every = 5
    return config


def start(
    config: ConfigDict, corpus: Corpus, workdir: Path, profile: range = NO_STEPS
) -> int:
    return train(config, mix([corpus]), workdir, profile)


def traced(file: Path) -> list[int]:
    """The numbers of the steps in a trace, each of which is in it as a whole."""
    data = jax.profiler.ProfileData.from_file(str(file))
    events = [
        (event.name, dict(event.stats))
        for plane in data.planes
        for line in plane.lines
        for event in line.events
    ]
    steps = [stats["step_num"] for name, stats in events if name == "train"]
    operations = collections.Counter(
        name for name, stats in events if stats.get("hlo_module") == "jit_voted_update"
    )
    assert operations
    assert all(count % len(steps) == 0 for count in operations.values())
    return sorted(steps)


def traces(workdir: Path) -> list[Path]:
    directory = workdir / "profile"
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("text", "steps"),
    [("10:13", range(10, 13)), ("1:2", range(1, 2)), ("", NO_STEPS)],
)
def test_steps_are_named_from_the_first_to_the_one_behind_the_last(
    text: str, steps: range
) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    "text",
    ["10", "10:", ":13", "a:b", "1:2:3", "-1:3", "1.5:3", "1-3", "0:3", "5:5", "7:3"],
)
def test_what_names_no_steps_is_an_input_error(text: str) -> None:
    with pytest.raises(InputError, match=r"--profile.*START"):
        parse_steps(text)


@pytest.mark.parametrize("steps", [range(9, 12), range(100, 101), range(0, 3)])
def test_steps_outside_the_run_are_an_input_error(steps: range) -> None:
    with pytest.raises(
        InputError, match=rf"--profile={steps.start}:{steps.stop} .* 1 to 8"
    ):
        check_steps(steps, 8)


@pytest.mark.parametrize("steps", [range(8, 12), range(1, 9), NO_STEPS])
def test_steps_of_the_run_are_none(steps: range) -> None:
    check_steps(steps, 8)


def test_a_run_that_ends_before_the_steps_leaves_nothing(
    config: ConfigDict, corpus: Corpus, tmp_path: Path
) -> None:
    config.train.stop_after = 3
    with pytest.raises(InputError, match=r"--profile=4:6 .* 1 to 3"):
        start(config, corpus, tmp_path / "run", range(4, 6))
    assert not (tmp_path / "run").exists()


def utilisations(workdir: Path, steps: range) -> list[float]:
    """MFU times the median time of a step, as recorded; nan where there is none."""
    return [
        record["mfu"] * record["step_seconds"]["p50"] if "mfu" in record else math.nan
        for record in runs.read_metrics(workdir)
        if record["step"] in steps and record["split"] == "train"
    ]


def test_a_trace_holds_just_its_steps(
    config: ConfigDict,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config.train.stop_after = 6
    config.train.peak_flops = 2e9
    assert start(config, corpus, tmp_path, range(3, 6)) == 0
    [file] = traces(tmp_path)
    session = tmp_path / "profile" / "plugins" / "profile" / "steps-from-3"
    assert file == session / "process-0.xplane.pb"
    assert traced(file) == [3, 4, 5]
    # Neither where the trace began nor where it ended does a step have a time; the
    # trace changes nothing else.
    records = {record["step"]: record for record in runs.read_metrics(tmp_path)}
    timed = [step for step, record in records.items() if "step_seconds" in record]
    assert timed == [2, 4, 5]
    model = settings.model(config, corpus.tokenizer.vocab_size)
    shape = settings.feed(config, corpus, "train").shape(config.train.batch_size)
    flops = step_flops(model, empty_batch(shape))
    assert utilisations(tmp_path, range(2, 3)) == pytest.approx([flops / 2e9])

    # Started again, as launch scripts do: what is done of the range is not traced.
    config.train.stop_after = 8
    config.train.peak_flops = 0.0
    monkeypatch.setattr(loop, "find_chip", lambda kind: {"cpu": CHIPS["v5e"]}[kind])
    assert start(config, corpus, tmp_path, range(3, 6)) == 0
    seven, eight = utilisations(tmp_path, range(7, 9))
    assert math.isnan(seven)
    assert eight == pytest.approx(flops / CHIPS["v5e"].peak)
    assert traces(tmp_path) == [file]
    assert traced(file) == [3, 4, 5]


def test_a_run_that_ends_within_the_steps_closes_the_trace(
    config: ConfigDict,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config.train.stop_after = 2
    assert start(config, corpus, tmp_path, range(1, 100)) == 0
    [file] = traces(tmp_path)
    assert traced(file) == [1, 2]

    def signalled(profiler: Profiler, step: int) -> None:
        before(profiler, step)
        if step == 4:
            signal.raise_signal(signal.SIGTERM)

    before: Callable[[Profiler, int], None] = Profiler.before
    monkeypatch.setattr(Profiler, "before", signalled)
    config.train.stop_after = 0
    assert start(config, corpus, tmp_path, range(2, 8)) == PREEMPTED
    [_, resumed] = traces(tmp_path)
    steps = traced(resumed)
    assert steps[0] == 3
    assert steps == list(range(3, 3 + len(steps)))
    assert 4 <= steps[-1] < 7


def test_a_trace_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    directory = tmp_path / "profile"
    directory.touch()
    profiler = Profiler(directory, range(1, 2), 0, 5, print)
    profiler.before(1)
    with pytest.raises(StorageError, match=r"--profile: .*profile"):
        profiler.after(1)
    profiler.close()
    # A run ends here; jax would keep the failed trace from being followed by another.
    profiler_state.reset()


def test_what_a_killed_process_left_is_not_taken_for_the_trace(tmp_path: Path) -> None:
    left = tmp_path / ".process-0" / "plugins" / "profile" / "steps-from-1"
    left.mkdir(parents=True)
    # The last to be published, were it published.
    (left / "zzz.xplane.pb").write_bytes(b"half a trace")
    profiler = Profiler(tmp_path, range(1, 2), 0, 5, print)
    profiler.before(1)
    assert not (left / "zzz.xplane.pb").exists()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(jax.numpy.zeros(3)))
    profiler.after(1)
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file.name == "process-0.xplane.pb"
    assert list(jax.profiler.ProfileData.from_file(str(file)).planes)
