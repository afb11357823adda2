"""Verify: it finds the same model in an export, and whatever is not the same."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

import models
import runs
import toy
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.interop import verify
from spanbert_jax.interop.huggingface import write_export
from spanbert_jax.training.saved import Saved


@pytest.fixture(scope="module")
def config(toy_cache: Path, toy_corpus: Corpus) -> ConfigDict:
    config = toy.make_config(toy_cache)
    config.data.corpus = str(toy_corpus.directory)
    return config


@pytest.fixture(scope="module")
def saved(
    config: ConfigDict, toy_corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    return models.make_saved(config, toy_corpus, tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def export(saved: Saved) -> Path:
    write_export(saved, saved.workdir / "export")
    return saved.workdir / "export"


@pytest.fixture
def copy(export: Path, tmp_path: Path) -> Path:
    """An export to be broken."""
    return shutil.copytree(export, tmp_path / "export")


def compare(saved: Saved, directory: Path, texts: list[str]) -> verify.Verdict:
    with models.one_thread():
        return verify.compare(saved, directory, texts)


# ---- The texts


def test_held_out_text_is_taken_where_there_is_enough(
    saved: Saved, toy_corpus: Corpus
) -> None:
    texts, origin = verify.find_texts(saved)
    assert origin == f"{len(texts)} held-out texts of corpus"
    assert len(texts) >= 50
    lengths = {len(ids) for ids in toy_corpus.tokenizer.encode(texts)}
    # From one word to a whole row of the model without [CLS] and [SEP].
    assert min(lengths) < 4
    assert max(lengths) >= 30
    # Nothing but the held-out documents, in their order.
    ids = toy_corpus.split("valid").shards[0].tokens.tolist()
    letters = "".join(toy_corpus.tokenizer.spell(i)[0] for i in ids)
    assert letters.startswith("".join(texts).replace(" ", ""))


def test_sentences_take_the_place_of_text_that_is_not_there(
    saved: Saved, tmp_path: Path
) -> None:
    moved = saved.config.copy_and_resolve_references()
    moved.data.corpus = str(tmp_path / "gone")
    for other, reason in (
        (saved._replace(config=moved), f"data.corpus={tmp_path}/gone is no corpus"),
        (saved._replace(record={"corpus": "other"}), "had another data.corpus="),
    ):
        texts, origin = verify.find_texts(other)
        assert reason in origin
        assert len(set(texts)) == len(texts) >= 50
        assert len({len(text.split()) for text in texts}) > 20


def test_sentences_fill_up_what_is_held_out(config: ConfigDict, tmp_path: Path) -> None:
    config = config.copy_and_resolve_references()
    corpus = toy.build_corpus(tmp_path / "corpus", toy.make_text(documents=30))
    config.data.corpus = str(corpus.directory)
    texts, origin = verify.find_texts(models.make_saved(config, corpus, tmp_path))
    found = re.fullmatch(
        r"(\d+) held-out texts of corpus and (\d+) of this program", origin
    )
    assert 0 < int(found[1]) < 50
    assert int(found[1]) + int(found[2]) == len(texts) == 64


# ---- The comparison


@pytest.mark.parametrize(
    ("boundaries", "internal"), [("both", False), ("both", True), ("left", False)]
)
def test_an_export_is_the_same_model_in_torch(
    config: ConfigDict,
    toy_corpus: Corpus,
    tmp_path: Path,
    boundaries: str,
    internal: bool,
) -> None:
    """Rough parameters, so that no part is without an effect."""
    config = config.copy_and_resolve_references()
    config.sbo.boundaries, config.sbo.internal = boundaries, internal
    config.sbo.positions = 4
    saved = models.make_saved(config, toy_corpus, tmp_path)
    write_export(saved, tmp_path / "export")
    texts = verify.find_texts(saved).texts
    verdict = compare(saved, tmp_path / "export", texts)
    assert list(verdict.differences) == ["hidden states", "MLM logits", "SBO logits"]
    assert 0 < max(verdict.differences.values()) < 2e-5
    assert verdict.misread == []
    assert verdict.is_good
    lengths = map(len, toy_corpus.tokenizer.encode(texts))
    # At least 50 texts, cut to the 32 positions.
    assert verdict.tokens == sum(min(length, 30) + 2 for length in lengths)


def test_a_model_for_an_accelerator_on_pairs_is_the_same_in_torch(
    config: ConfigDict, toy_corpus: Corpus, tmp_path: Path
) -> None:
    config = config.copy_and_resolve_references()
    config.data.pairs, config.sbo.weight = True, 0.0
    config.model.dtype, config.model.attention = "bfloat16", "cudnn"
    config.model.attention_dropout = 0.0
    saved = models.make_saved(config, toy_corpus, tmp_path)
    write_export(saved, tmp_path / "export")
    verdict = compare(saved, tmp_path / "export", verify.find_texts(saved).texts)
    names = ["hidden states", "MLM logits", "next-sentence logits"]
    assert list(verdict.differences) == names
    assert 0 < max(verdict.differences.values()) < 2e-5
    assert verdict.is_good


def nudge(file: str, tensor: str, by: float = 0.5) -> Callable[[Path], None]:
    """Changes one number of a tensor."""

    def change(directory: Path) -> None:
        tensors = load_file(directory / file)
        tensors[tensor].flat[5] += by
        save_file(tensors, directory / file, metadata={"format": "pt"})

    return change


def rewrite(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        text = (directory / file).read_text()
        assert text.count(old) == 1
        (directory / file).write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("break_it", "name"),
    [
        (
            nudge(
                "model.safetensors",
                "bert.encoder.layer.1.attention.output.dense.weight",
            ),
            "hidden states",
        ),
        (nudge("model.safetensors", "cls.predictions.bias"), "MLM logits"),
        (nudge("sbo.safetensors", "dense_2.weight"), "SBO logits"),
        (
            rewrite("README.md", "self.norm_2(nn.functional.gelu(", "self.norm_2(("),
            "SBO",
        ),
        (rewrite("config.json", '"gelu"', '"gelu_new"'), "hidden states"),
        (rewrite("config.json", "1e-12", "1e-5"), "hidden states"),
    ],
)
def test_what_is_not_the_same_is_found(
    saved: Saved, copy: Path, break_it: Callable[[Path], None], name: str
) -> None:
    break_it(copy)
    verdict = compare(saved, copy, verify.find_texts(saved).texts[:8])
    worse = {key for key, x in verdict.differences.items() if x > verify.TOLERANCE}
    assert any(key.startswith(name) for key in worse)
    assert not verdict.is_good


def test_a_tokenizer_that_reads_otherwise_is_found(saved: Saved, copy: Path) -> None:
    rewrite("tokenizer_config.json", '"do_lower_case": false', '"do_lower_case": true')(
        copy
    )
    verdict = compare(saved, copy, ["ba", "Ba"])
    assert verdict.misread == ["Ba"]
    assert max(verdict.differences.values()) < verify.TOLERANCE
    assert not verdict.is_good


def test_a_difference_that_is_no_number_is_not_good() -> None:
    assert not verify.Verdict(1, [], {"hidden states": float("nan")}).is_good
    assert verify.Verdict(1, [], {"hidden states": 1e-4}).is_good
    assert not verify.Verdict(1, [], {"hidden states": 1.1e-4}).is_good


# ---- The command


def test_an_export_that_is_another_model_is_an_error(
    saved: Saved, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nudge("sbo.safetensors", "bias", 2e-4)(copy)
    with models.one_thread():
        assert not verify.verify(saved, copy)
    told = capsys.readouterr()
    assert re.search(r"tokens: .*SBO logits 2\.0e-04", told.out)
    fault = "is not the model of the run: a difference of more than 0.0001"
    assert told.err == f"error: {copy} {fault}\n"


def run_export(
    arguments: list[str], code: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs the command, after some code."""
    start = f"""
import runpy, sys
{code}
sys.argv = ["export", *{arguments!r}]
runpy.run_module("spanbert_jax.export", run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-c", start],
        # One thread: those of torch wait for each other by spinning.
        env={**runs.environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_says_how_the_export_compares(
    config: ConfigDict, toy_corpus: Corpus, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    models.save_run(config, toy_corpus, tmp_path / "run", [4])
    arguments = [f"--workdir={tmp_path}/run", f"--output={tmp_path}/export", "--verify"]
    done = run_export(arguments)
    assert done.returncode == 0, done.stderr
    # Neither bars nor reports of transformers.
    assert done.stderr == ""
    *_, texts, differences = done.stdout.splitlines()
    assert re.fullmatch(
        r"comparing with transformers on \d+ held-out texts of corpus", texts
    )
    assert re.fullmatch(
        r"largest differences over [\d,]+ tokens: hidden states \de-0\d,"
        r" MLM logits .*, SBO logits .*",
        re.sub(r"\d\.\de", "1e", differences),
    )
    again = run_export(arguments)
    assert again.returncode == 2
    assert "exists and is not an empty directory" in again.stderr


@pytest.mark.slow
def test_what_a_run_has_learnt_is_in_its_export(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    corpus = runs.build_corpus(tmp_path / "corpus")
    config = runs.make_config(tmp_path / "cache", corpus)
    assert runs.start(config, corpus, tmp_path / "run").code == 0
    arguments = [f"--workdir={tmp_path}/run", f"--output={tmp_path}/export", "--verify"]
    done = run_export([*arguments, "--step=15"])
    assert done.returncode == 0, done.stderr
    # What the run recorded at its evaluation is in the card.
    [record] = [
        record
        for record in runs.read_metrics(tmp_path / "run")
        if (record["step"], record["split"]) == (10, "valid")
    ]
    card = (tmp_path / "export" / "README.md").read_text()
    losses = f"| loss | {record['mlm_loss']:.3f} | {record['sbo_loss']:.3f} |"
    assert losses in card
    assert "after 15 of 20 steps" in " ".join(card.split())


def test_without_torch_nothing_is_written(tmp_path: Path) -> None:
    hide = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name in ("torch", "transformers") else find(name, *rest)
)
"""
    arguments = [f"--workdir={tmp_path}", f"--output={tmp_path}/new/export", "--verify"]
    done = run_export(arguments, hide)
    assert done.returncode == 2
    assert done.stderr == (
        "error: --verify needs torch and transformers: pip install torch transformers\n"
    )
    assert not (tmp_path / "new").exists()
