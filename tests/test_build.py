"""Corpus directories: nothing lost, equal bytes, and no half-built one."""

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import pytest

from spanbert_jax.corpus import build as build_module
from spanbert_jax.corpus import store, workspace
from spanbert_jax.corpus.build import (
    BuildOptions,
    build,
    check_options,
    embedded_corpus,
)
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.sources import Reading
from spanbert_jax.corpus.store import open_corpus
from spanbert_jax.corpus.tokenizers import Specials
from spanbert_jax.errors import InputError, StorageError
from toy import contents

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
ODD = b"the first line\nand a second\n\n\nlonely\n   \nthe last, without an end"


def write_text(path: Path, documents: int, seed: int = 0) -> list[list[str]]:
    generator = random.Random(seed)
    words = [
        "".join(generator.choices("abcdefghij", k=generator.randint(1, 8)))
        for _ in range(100)
    ]
    made = [
        [
            " ".join(generator.choices(words, k=generator.randint(1, 12))) + "."
            for _ in range(generator.randint(1, 6))
        ]
        for _ in range(documents)
    ]
    path.write_text("\n\n".join("\n".join(document) for document in made))
    return made


@pytest.fixture
def options(tmp_path):
    write_text(tmp_path / "a.txt", 60, seed=1)
    write_text(tmp_path / "b.txt", 40, seed=2)
    return BuildOptions(
        output=tmp_path / "corpus",
        input=(str(tmp_path / "*.txt"),),
        vocab_size=120,
        valid_fraction=0.1,
        runner=Local(1),
        part_size=2500,
    )


def stored_documents(corpus, split):
    return [
        [shard.tokens[start:end].tolist() for start, end in pairwise(bounds)]
        for shard in corpus.split(split).shards
        for first, last in pairwise(shard.documents)
        for bounds in [shard.lines[(shard.lines >= first) & (shard.lines <= last)]]
    ]


def test_stored_documents_are_the_tokenised_text(options, tmp_path):
    written = write_text(tmp_path / "a.txt", 60, 1) + write_text(
        tmp_path / "b.txt", 40, 2
    )
    corpus = build(options)
    assert all(len(corpus.split(name).shards) > 1 for name in ("train", "valid"))
    expected = [corpus.tokenizer.encode(document) for document in written]
    train = stored_documents(corpus, "train")
    valid = stored_documents(corpus, "valid")
    assert len(valid) == 10
    assert train == [document for document in expected if document in train]
    assert valid == [document for document in expected if document in valid]
    assert len(train) + len(valid) == len(expected)
    total = sum(len(line) for line in chain.from_iterable(expected))
    assert corpus.split("train").num_tokens + corpus.split("valid").num_tokens == total


def test_any_number_of_workers_gives_the_same_bytes(options, tmp_path):
    one = build(options)
    two = build(replace(options, output=tmp_path / "two", runner=Local(2)))
    assert contents(one.directory) == contents(two.directory)


def test_the_fingerprint_knows_the_text_and_not_the_place(options, tmp_path):
    first = build(options)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("a.txt", "b.txt"):
        (elsewhere / name).write_bytes((tmp_path / name).read_bytes())
    moved = replace(
        options, input=(str(elsewhere / "*.txt"),), output=tmp_path / "second"
    )
    assert build(moved).fingerprint == first.fingerprint
    assert str(tmp_path) not in (first.directory / "corpus.json").read_text()
    text = (elsewhere / "a.txt").read_text()
    (elsewhere / "a.txt").write_text(text.replace(text[0], "z", 1))
    changed = build(replace(moved, output=tmp_path / "third"))
    assert changed.fingerprint != first.fingerprint


def test_odd_documents_are_kept_or_counted(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(ODD)
    (tmp_path / "blank.txt").write_bytes(b"\n \n\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "void.txt").write_bytes(b"\x00\x01\n\n\x00")
    options = BuildOptions(
        output=tmp_path / "one",
        input=(str(tmp_path / "*.txt"),),
        vocab_size=80,
        valid_fraction=0.0,
        runner=Local(1),
    )
    corpus = build(options)
    warnings = re.findall(r"warning: .*/(.*) holds no text", capsys.readouterr().err)
    assert warnings == ["blank.txt", "empty.txt", "void.txt"]
    train = corpus.manifest["splits"]["train"]
    assert train["documents"] == 3
    assert (train["dropped_documents"], train["dropped_tokens"]) == (0, 0)
    assert corpus.manifest["text"]["control_characters"] == 3
    lines = [line.split() for line in ODD.decode().split("\n") if line.strip()]
    spelt = [
        "".join(corpus.tokenizer.tokens[i].removeprefix("##") for i in line)
        for document in stored_documents(corpus, "train")
        for line in document
    ]
    assert spelt == ["".join(line) for line in lines]

    longer = build(replace(options, output=tmp_path / "two", min_tokens=12))
    kept = longer.manifest["splits"]["train"]
    assert kept["documents"] == 2
    assert kept["dropped_documents"] == 1
    assert kept["tokens"] + kept["dropped_tokens"] == train["tokens"]
    assert kept["dropped_tokens"] == len(corpus.tokenizer.encode(["lonely"])[0])


def test_text_without_any_document_is_refused(tmp_path):
    (tmp_path / "blank.txt").write_bytes(b"\n \n\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    pattern = str(tmp_path / "*.txt")
    options = BuildOptions(output=tmp_path / "c", input=(pattern,), runner=Local(1))
    with pytest.raises(InputError, match="no document in any of 2 sources"):
        build(options)
    (tmp_path / "empty.txt").write_bytes(b"some words")
    with pytest.raises(InputError, match="no training document is left: all of 1"):
        build(replace(options, min_tokens=1000))
    assert not options.output.exists()


def test_very_long_lines_keep_every_token(tmp_path):
    long = " ".join(["abc", "abd"] * 5000)
    text = f"before it\n{long}\nafter it\n\nbefore it\n{long}\n\nshort"
    (tmp_path / "a.txt").write_text(text)
    options = BuildOptions(
        output=tmp_path / "c",
        input=(str(tmp_path / "a.txt"),),
        vocab_size=60,
        valid_fraction=0.0,
        runner=Local(1),
    )
    corpus = build(options)
    before, middle, after, short = corpus.tokenizer.encode(
        ["before it", long, "after it", "short"]
    )
    assert len(middle) == 10_000
    expected = [[before, middle, after], [before, middle], [short]]
    assert stored_documents(corpus, "train") == expected


def test_literal_special_tokens_are_stored_as_text(tmp_path):
    (tmp_path / "a.txt").write_text("to [MASK] or [SEP] not [CLS] [PAD] [UNK]\n\nmask")
    options = BuildOptions(
        output=tmp_path / "c",
        input=(str(tmp_path / "a.txt"),),
        vocab_size=120,
        valid_fraction=0.0,
        runner=Local(1),
    )
    corpus = build(options)
    assert not corpus.unigram_counts[list(corpus.tokenizer.special_ids)].any()
    assert corpus.unigram_counts.sum() == corpus.split("train").num_tokens


def test_a_finished_corpus_is_left_alone(options, capsys):
    build(options)
    before = {path: path.stat().st_mtime_ns for path in options.output.iterdir()}
    build(replace(options, runner=Local(2)))
    assert "is finished already" in capsys.readouterr().out
    with pytest.raises(InputError, match="other text or options; it was left"):
        build(replace(options, min_tokens=2))
    assert before == {p: p.stat().st_mtime_ns for p in options.output.iterdir()}
    assert not options.output.with_name("corpus.partial").exists()


def test_a_build_broken_off_at_any_write_is_completed(options, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    options = replace(options, part_size=10_000)
    whole = contents(build(replace(options, output=tmp_path / "whole")).directory)
    path_rename, path_replace = Path.rename, Path.replace
    left = 0

    def breaking(function):
        def call(path, target):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(path, target)

        return call

    monkeypatch.setattr(Path, "rename", breaking(path_rename))
    monkeypatch.setattr(Path, "replace", breaking(path_replace))
    broken = 0
    while True:
        output = tmp_path / f"broken{broken}"
        left = broken
        try:
            build(replace(options, output=output))
            break
        except Killed:
            broken += 1
        assert not output.exists()
        left = -1
        assert contents(build(replace(options, output=output)).directory) == whole
    assert broken > 20


def test_killed_builds_go_on_with_their_finished_shards(options, tmp_path, capsys):
    write_text(tmp_path / "a.txt", 4000, seed=3)
    options = replace(options, runner=Local(2), part_size=20_000)
    code = (
        "import pickle, sys\n"
        "from spanbert_jax.corpus.build import build\n"
        "build(pickle.loads(bytes.fromhex(sys.argv[1])))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, pickle.dumps(options).hex()],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
    )
    partial = tmp_path / "corpus.partial"
    deadline = time.monotonic() + 60
    while len(list(partial.glob("report-*.json"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not options.output.exists()
    while any(Path(f"/proc/{worker}/fd").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)

    done = [path.stem.removeprefix("report-") for path in partial.glob("report-*.json")]
    kept = {path.name: path.stat().st_mtime_ns for path in partial.glob("train-*")}
    assert len(done) < 100
    corpus = build(replace(options, runner=Local(1)))
    assert "going on with" in capsys.readouterr().out
    for name in (f"train-{number}.tokens.npy" for number in done):
        assert (options.output / name).stat().st_mtime_ns == kept[name]
    whole = build(replace(options, runner=Local(1), output=tmp_path / "whole"))
    assert contents(corpus.directory) == contents(whole.directory)


def leave_partial(options, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", fail)
        with pytest.raises(StorageError, match="No space left") as error:
            build(options)
    assert str(options.output) in str(error.value)


def test_a_full_disk_is_a_storage_error(options, monkeypatch):
    leave_partial(options, monkeypatch)
    assert not options.output.exists()
    assert build(options).split("train").num_tokens > 0


def test_beginnings_of_another_build_are_thrown_away(options, monkeypatch, capsys):
    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "publish", fail)
        with pytest.raises(KeyboardInterrupt):
            build(options)
    other = replace(options, min_tokens=3)
    corpus = build(other)
    assert "starting anew" in capsys.readouterr().out
    assert contents(corpus.directory) == contents(
        build(replace(other, output=options.output.with_name("fresh"))).directory
    )


def test_a_clean_up_that_is_killed_leaves_no_build_that_looks_whole(
    options, tmp_path, monkeypatch
):
    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workspace, "publish", fail)
        with pytest.raises(KeyboardInterrupt):
            build(options)
    remove, left = workspace._remove, 0

    def breaking(path):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        remove(path)

    partial = tmp_path / "corpus.partial"
    whole = contents(build(replace(options, output=tmp_path / "whole")).directory)
    for left in (0, 1, 4):
        copy = shutil.copytree(partial, tmp_path / f"again{left}.partial")
        output = tmp_path / copy.name.removesuffix(".partial")
        with monkeypatch.context() as patch:
            patch.setattr(workspace, "_remove", breaking)
            with pytest.raises(KeyboardInterrupt):
                build(replace(options, output=output, min_tokens=3))
        left = -1
        assert contents(build(replace(options, output=output)).directory) == whole


def test_other_options_are_refused_without_a_reading(options, monkeypatch):
    build(options)
    monkeypatch.setattr(build_module, "scan", None)
    with pytest.raises(InputError, match="other text or options; it was left"):
        build(replace(options, min_tokens=2))


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_vocabulary_is_learnt_from_a_part_of_few_long_documents(
    tmp_path, monkeypatch, kind
):
    for number in range(2):
        lines = chain.from_iterable(write_text(tmp_path / "x", 400, seed=number))
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    monkeypatch.setitem(build_module._SAMPLE_CHARACTERS, kind, 4_000)
    learn = f"train_{'wordpiece' if kind == 'wordpiece' else 'sentencepiece'}"
    train, seen = getattr(build_module, learn), []

    def counting(lines, *arguments):
        seen.extend(lines)
        return train(seen, *arguments)

    monkeypatch.setattr(build_module, learn, counting)
    build(
        BuildOptions(
            output=tmp_path / "c",
            input=(str(tmp_path / "*.txt"),),
            tokenizer=kind,
            vocab_size=300,
            runner=Local(1),
        )
    )
    assert 2_000 < sum(map(len, seen)) < 8_000
    assert len(seen) > 50


def test_a_url_is_no_output(options):
    with pytest.raises(InputError, match="is a URL; a corpus is read through memory"):
        build(replace(options, output=Path("gs://bucket/corpus")))


def test_directories_of_others_are_not_touched(options, tmp_path):
    for directory in (options.output, tmp_path / "corpus.partial"):
        directory.mkdir()
        (directory / "letter.txt").write_text("dear")
        with pytest.raises(InputError, match=directory.name):
            build(replace(options, input=(str(tmp_path / "a.txt"),)))
        assert (directory / "letter.txt").read_text() == "dear"
        (directory / "letter.txt").unlink()
        directory.rmdir()


def test_text_that_changes_while_it_is_read_is_refused(options, tmp_path, monkeypatch):
    train = build_module.train_wordpiece

    def change(*arguments):
        vocabulary = train(*arguments)
        write_text(tmp_path / "b.txt", 40, seed=9)
        return vocabulary

    monkeypatch.setattr(build_module, "train_wordpiece", change)
    with pytest.raises(InputError, match=r"b\.txt changed while it was read"):
        build(options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": Path("v"), "vocab_size": 9}, "exclude each other"),
        ({"valid_fraction": 1.0}, r"--valid_fraction=1.0 is not in \[0, 1\)"),
        ({"valid_fraction": float("nan")}, "--valid_fraction=nan"),
        ({"min_tokens": 0}, "--min_tokens=0 is not at least 1"),
        ({"runner": Local(-1)}, "--workers=-1"),
        ({"part_size": 0}, "--part_size=0"),
        ({"tokenizer": "words"}, "--tokenizer=words is none of wordpiece, unigram"),
        (
            {"vocab": Path("v"), "vocab_size": None, "tokenizer": "bpe"},
            "--vocab=v and --tokenizer=bpe exclude each other",
        ),
        ({"specials": Specials(mask="[SEP]")}, "two special tokens are spelt alike"),
        ({"output": Path("a,b")}, "--output=a,b has a comma"),
        ({"vocab_size": 0}, "--vocab_size=0"),
        ({"reading": Reading(format="xml")}, "--format=xml is none of text, jsonl"),
        ({"reading": Reading(format="embedded")}, "leave --input out"),
        ({"reading": Reading(invalid="ignore")}, "--invalid=ignore is none of replace"),
        ({"reading": Reading(unicode="nfd")}, "--unicode=nfd is none of none, nfc"),
        ({"output": Path()}, "--output is missing"),
    ],
)
def test_options_out_of_range_are_refused(options, change, message):
    with pytest.raises(InputError, match=message):
        check_options(replace(options, **change))


def test_embedded_corpus_is_built_once_by_whoever_comes_first(tmp_path, monkeypatch):
    fills = []
    fill = build_module._fill

    def counted(*arguments):
        fills.append(arguments)
        fill(*arguments)

    monkeypatch.setattr(build_module, "_fill", counted)
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(embedded_corpus(tmp_path, 1000, 0.05))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fills) == 1
    assert found[0] == found[1]
    assert [path.name for path in (tmp_path / "corpora").iterdir()] == [found[0].name]
    corpus = open_corpus(found[0])
    assert corpus.tokenizer.vocab_size == 1000
    assert corpus.split("valid").num_documents >= 4
    assert embedded_corpus(tmp_path, 1000, 0.05) == found[0]
    assert json.loads((found[0] / "corpus.json").read_text()) == corpus.manifest


def test_building_loads_neither_jax_nor_tensorflow():
    code = (
        "import sys, spanbert_jax.prepare\n"
        "print({'jax', 'flax', 'tensorflow', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"
