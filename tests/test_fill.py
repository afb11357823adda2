"""The command: its table, its objects, its errors; models that are read from disk."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

import reference
import runs
import spanbert_jax
from models import save_run
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.data.describe import columns, in_colour, in_plain
from spanbert_jax.errors import InputError
from spanbert_jax.inference.filling import (
    NO_HEAD,
    Filled,
    Filling,
    Guess,
    MaskedSpan,
    MaskedToken,
)
from spanbert_jax.inference.predictor import Predictor
from spanbert_jax.inference.table import describe_filled
from spanbert_jax.interop.huggingface import write_export
from spanbert_jax.interop.pretrained import parameter_shapes
from spanbert_jax.training.saved import read_saved

TEXT = "Tu [MASK] [MASK] gonalo solu [MASK] ."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return runs.build_corpus(tmp_path_factory.mktemp("corpus") / "short")


@pytest.fixture(scope="module")
def workdir(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of pairs with checkpoints of the steps 5 and 10."""
    directory = tmp_path_factory.mktemp("run")
    config = runs.make_config(directory / "cache", corpus)
    config.data.block_length = 16
    config.data.pairs = True
    save_run(config, corpus, directory / "work", [5, 10])
    return directory / "work"


@pytest.fixture(scope="module")
def model(workdir: Path) -> Predictor:
    return spanbert_jax.load(workdir)


def fill(*arguments: str, stdin: bytes = b"", options: Sequence[str] = ()) -> runs.Exit:
    """The command, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *options, "-m", "spanbert_jax.fill", *arguments],
        cwd=runs.REPOSITORY,
        env={**runs.environment(), "COLUMNS": "200"},
        input=stdin,
        capture_output=True,
        check=False,
    )
    return runs.Exit(done.returncode, done.stdout.decode(), done.stderr.decode())


def make_guesses(*tokens: str) -> tuple[Guess, ...]:
    return tuple(Guess(token, 9, 0.25 / n) for n, token in enumerate(tokens, start=1))


def make_fillings(*texts: str) -> tuple[Filling, ...]:
    return tuple(
        Filling(text, tuple(text.split()), (9,), -1.5 * n)
        for n, text in enumerate(texts, start=1)
    )


FILLED = Filled(
    "The [MASK][MASK] won [MASK]",
    7,
    (),
    (
        MaskedSpan(
            4,
            16,
            (
                MaskedToken(2, make_guesses("Denver", "New"), make_guesses("A", "B")),
                MaskedToken(3, make_guesses("中文", "##s"), None),
            ),
            make_fillings("Denver Broncos", "New York"),
            None,
            "some reason",
        ),
        MaskedSpan(
            21,
            27,
            (MaskedToken(5, make_guesses("it"), make_guesses("all")),),
            make_fillings("it"),
            make_fillings("all"),
            "",
        ),
    ),
)


def test_the_table():
    assert list(describe_filled(FILLED, 60, in_plain)) == [
        "The [MASK][MASK] won [MASK]",
        "",
        "  span 1              MLM head                SBO head",
        "  P at 2    0.25      Denver        0.25      A",
        "            0.125     New           0.125     B",
        "  P at 3    0.25      中文",
        "            0.125     ##s",
        "  log P     -1.500    Denver",
        "                      Broncos",
        "            -3.000    New York",
        "            no SBO prediction for this span: some reason",
        "",
        "  span 2              MLM head                SBO head",
        "  P at 5    0.25      it            0.25      all",
    ]


def test_the_table_without_sbo_head():
    first = dataclasses.replace(FILLED.spans[0], no_sbo=NO_HEAD)
    masks = tuple(dataclasses.replace(mask, sbo=None) for mask in first.masks)
    filled = dataclasses.replace(
        FILLED, spans=(dataclasses.replace(first, masks=masks),)
    )
    # The headline says it once.
    assert "SBO" not in "".join(describe_filled(filled, 60, in_plain))


@pytest.mark.parametrize("width", [60, 73, 100])
def test_the_table_fits_its_width(width):
    long = make_fillings("中" * 70, "a" * 150, "word " * 30, "\x1b[2J \u2028")
    span = dataclasses.replace(
        FILLED.spans[0], mlm=long, sbo=long, no_sbo="for reasons " * 20
    )
    filled = dataclasses.replace(FILLED, text="[MASK]" * 40 + " a", spans=(span,) * 11)
    lines = list(describe_filled(filled, width, in_plain))
    assert max(map(columns, lines)) <= width
    assert all(line.isprintable() for line in lines)
    # Cut, not lost.
    assert "".join(lines).count("中") == 11 * (2 * 70 + 1)
    painted = list(describe_filled(filled, width, in_colour))
    assert list(map(columns, painted)) == list(map(columns, lines))


def test_the_command_prints_a_table(workdir, model):
    texts = (TEXT, "Tu ö [MASK] .")
    done = fill(
        *(f"--model={workdir}", texts[0], "--top=2", "--beam=3", texts[1]),
        options=("-X", "importtime"),
    )
    assert done.code == 0, done
    headline = f"{workdir}, step 10: 1 layers of 64, 300 tokens"
    lines = [headline]
    for text in texts:
        filled = model.fill(text, top=2, beam=3)
        lines += ["", *describe_filled(filled, 100, in_plain)]
    for printed, expected in zip(done.output.splitlines(), lines, strict=True):
        assert_alike(parse(printed), parse(expected))
    errors = done.errors.splitlines()
    said = [line for line in errors if not line.startswith("import time:")]
    assert said == ["warning: the vocabulary cannot spell 'ö': read as [UNK]"]
    # They take seconds, and are of no use here.
    imported = {line.split("|")[-1].strip() for line in errors}
    assert "jax" in imported
    assert not imported & {"tensorflow", "torch", "transformers", "matplotlib"}


def test_the_command_prints_objects_for_lines(workdir):
    long = "tu [MASK] " * 10
    done = fill(
        *(f"--model={workdir}", "--json", "--step=5", "--top=2"),
        *("a [MASK]", "-", TEXT),
        stdin=f"\n\n{long}\n".encode() + b"tu \xff[MASK]\r\n",
    )
    assert done.code == 0, done
    assert done.errors == (
        "warning: the text has 22 tokens, but the model was trained on blocks of 16"
        " (data.block_length)\n"
    )
    found = list(map(json.loads, done.output.splitlines()))
    texts = ["a [MASK]", long.strip(), "tu \ufffd[MASK]", TEXT]
    assert [one["text"] for one in found] == texts
    model = spanbert_jax.load(workdir, 5)
    for one in found:
        assert (one.pop("model"), one.pop("step")) == (str(workdir), 5)
        filled = model.fill(one["text"], top=2)
        assert_alike(one, json.loads(json.dumps(dataclasses.asdict(filled))))


def parse(line: str) -> list[object]:
    """The words and the numbers of a line."""
    words = re.split(r" {2,}", line)
    return [
        float(word) if re.fullmatch(r"-?\d+\.\d+", word) else word for word in words
    ]


def assert_alike(one: object, other: object) -> None:
    """Equal, but for the rounding of numbers."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-2)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_alike(left, right)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--model=nowhere", "a [MASK]"], "--model=nowhere is neither"),
        (["Tu gonalo"], "there is no [MASK] in the text 'Tu gonalo'"),
    ],
)
def test_the_command_refuses(workdir, arguments, fault):
    done = fill(f"--model={workdir}", *arguments)
    assert done.code == 2
    assert done.errors.count("\n") == 1
    assert done.errors.startswith("error: ")
    assert fault in done.errors


def test_the_package_alone_imports_nothing_slow():
    code = "import sys, spanbert_jax; print({'jax', 'numpy'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=runs.REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


def test_a_run_is_loaded(workdir, model, corpus):
    assert (model.step, model.max_positions) == (10, 32)
    assert "nsp_head" in model.scorer.params
    assert spanbert_jax.load(str(workdir), 5).step == 5
    assert model.tokenizer.sha256 == corpus.tokenizer.sha256
    shapes = parameter_shapes(model.config, model.tokenizer.vocab_size)
    expected = reference.rough_params(shapes, 10)
    for mine, true in zip(
        *map(jax.tree.leaves, (model.scorer.params, expected)), strict=True
    ):
        np.testing.assert_array_equal(mine, true)
    with pytest.raises(InputError, match=r"path=.* has no step 7; it has 5, 10"):
        spanbert_jax.load(workdir, 7)
    with pytest.raises(InputError, match=r"neither .* a run nor an export"):
        spanbert_jax.load(workdir.parent)


def test_an_export_is_the_same_model(workdir, model, tmp_path):
    directory = tmp_path / "export"
    write_export(read_saved(workdir, "--workdir"), directory)
    exported = spanbert_jax.load(directory)
    assert exported.step == 10
    assert exported.fill(TEXT) == model.fill(TEXT)
    one, other = (each.encode([TEXT])[0].hidden for each in (exported, model))
    np.testing.assert_array_equal(one, other)
    done = fill(f"--model={directory}", "--step=5", TEXT)
    assert done.code == 2
    assert "is an export of step 10; it has no step 5" in done.errors
