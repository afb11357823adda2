"""The command: its output, its exit codes."""

import json
import os
import subprocess
import sys

import pytest

from spanbert_jax.corpus.store import open_corpus


def prepare(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "spanbert_jax.prepare", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def directory(tmp_path):
    for number, name in enumerate(("one", "ten", "seed")):
        record = {"body": f"text number {name}, as long as it takes\nand more"}
        with (tmp_path / f"{number}.jsonl").open("w") as file:
            file.writelines(json.dumps(record | {"n": n}) + "\n" for n in range(5))
    (tmp_path / "0.txt").write_text("some text")
    return tmp_path


def test_the_command_makes_a_corpus_and_says_what_to_do_next(directory):
    done = prepare(
        "--input=0.jsonl,[12].jsonl",
        "--output=made/corpus/",
        "--format=jsonl",
        "--text_field=body",
        "--vocab_size=70",
        "--valid_fraction=0.2",
        "--mask_token=<mask>",
        cwd=directory,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(
        "next: python -m spanbert_jax.main --config=configs/small.py"
        " --config.data.corpus=made/corpus --workdir=runs/first\n"
    )
    corpus = open_corpus(directory / "made" / "corpus")
    documents = [corpus.split(name).num_documents for name in ("train", "valid")]
    assert sorted(documents) == [5, 10]
    assert corpus.tokenizer.specials.mask == "<mask>"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--output=c"], 2, "--input is missing"),
        (["--input=0.jsonl"], 2, "--output is missing"),
        (["--input=nothing*", "--output=c"], 2, "--input=nothing* matches no file"),
        (
            ["--input=0.jsonl", "--output=c", "--vocab=v", "--vocab_size=9"],
            2,
            "exclude",
        ),
        (["--input=0.txt", "--output=c", "--vocab=v"], 2, "--vocab=v"),
        (["--input=0.jsonl", "--output=c"], 2, "use --format=jsonl"),
        (["--input=0.txt", "--output=c", "--stage=s"], 2, "need --runner"),
        (["--input=0.txt", "--output=c", "--text_field=t"], 2, "has no effect without"),
        (["--input=0.txt", "--output=c", "--nobyte_fallback"], 2, "--tokenizer=unigr"),
        (["--input=0.txt", "--output=c", "--spacy_model=m"], 2, "without --tags"),
        (["--input=0.txt", "--output=c", "--tags=verbs"], 2, "--tags: verbs is none"),
        (["--input=tfds:nothing", "--output=c"], 2, "Dataset nothing not found"),
        (["--input=0.jsonl", "--output=c", "--valid_fraction=1.5"], 2, "=1.5 is not"),
        (["--input=0.jsonl", "--output=c", "--min_tokens=x"], 2, "--min_tokens=x"),
        (["--input=0.jsonl", "--output=0.jsonl/c"], 4, "cannot write 0.jsonl/c"),
    ],
)
def test_faults_are_one_sentence_and_an_exit_code(directory, arguments, code, message):
    done = prepare(*arguments, cwd=directory)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not list(directory.glob("c*"))
