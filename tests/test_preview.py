"""The preview: its numbers, its spans, its colours and its errors."""

import dataclasses
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import toy
from spanbert_jax import settings
from spanbert_jax.corpus.store import Corpus, Split
from spanbert_jax.corpus.tokenizers import STARTS
from spanbert_jax.data import describe
from spanbert_jax.data.batch import Feed, make_batch, masked_blocks

LENGTH = 32


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the command."""
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path])),
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "COLUMNS": "100",
    }

    def call(*arguments, stdout=subprocess.PIPE):
        return subprocess.Popen(
            [sys.executable, "-m", "spanbert_jax.preview", *arguments],
            env=environment,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )

    return call


@pytest.fixture(scope="module")
def output(start, toy_corpus):
    process = start(
        f"--corpus={toy_corpus.directory}",
        f"--block_length={LENGTH}",
        "--seed=3",
        "--epoch=2",
    )
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    return out


@pytest.fixture
def feed(toy_corpus, toy_cache):
    config = toy.make_config(toy_cache)
    config.train.seed = 3
    config.data.block_length = LENGTH
    return settings.feed(config, toy_corpus, "train")


def documents(corpus: Corpus, split: str) -> list[np.ndarray]:
    return [
        shard.tokens[begin:end]
        for shard in corpus.split(split).shards
        for begin, end in zip(shard.documents[:-1], shard.documents[1:], strict=True)
    ]


def block_lengths(corpus: Corpus, split: str) -> list[int]:
    """Cuts each document before the first word that no longer fits."""
    lengths = []
    for document in documents(corpus, split):
        words: list[int] = []
        for token in document:
            if corpus.tokenizer.tokens[token].startswith("##"):
                words[-1] += 1
            else:
                words.append(1)
        filled = 0
        for word in words:
            if filled + word > LENGTH - 2:
                lengths.append(filled)
                filled = 0
            filled += word
        lengths.append(filled)
    return lengths


def test_counts_are_those_of_the_text(output, toy_corpus):
    for split in ("train", "valid"):
        texts = documents(toy_corpus, split)
        tokens = np.concatenate(texts)
        unknown = np.mean(tokens == toy_corpus.tokenizer.unk_id)
        row = [split, f"{len(texts):,}", "0", f"{len(tokens):,}", f"{unknown:.3%}"]
        assert row in [line.split() for line in output.splitlines()]
    assert f"vocabulary {toy_corpus.tokenizer.vocab_size} tokens, wordpiece" in output


def test_histogram_and_fill_are_those_of_the_blocks(output, toy_corpus, feed):
    lengths = block_lengths(toy_corpus, "train")
    assert f"\n{len(lengths)} blocks at block length 32: up to 30 tokens" in output
    bins = re.findall(r"^ +(\d+) to +(\d+) +(\d+) +([\d.]+)% *(#*)$", output, re.M)
    assert [(int(low), int(high)) for low, high, *_ in bins] == [
        (low, low + 2) for low in range(1, 31, 3)
    ]
    for low, high, count, share, bar in bins:
        expected = sum(int(low) <= length <= int(high) for length in lengths)
        assert int(count) == expected
        assert float(share) == pytest.approx(100 * expected / len(lengths), abs=0.051)
        assert bool(bar) == bool(expected)
    places = sum(lengths) + 2 * len(lengths)
    for name, rows in (("without", len(lengths)), ("with", feed.plan.num_rows)):
        fill = places / (rows * LENGTH)
        assert f" {name} packing {rows:>12,} rows, {fill:.1%} filled\n" in output


def test_masks_are_those_of_the_training_batches(output, toy_corpus, feed):
    rows = np.arange(feed.plan.num_rows)
    batch = make_batch(feed, rows, np.full(len(rows), 2))
    due = batch["target_weights"] > 0
    tokens = toy_corpus.split("train").num_tokens
    share = f"share masked       {due.sum() / tokens:.2%} of {tokens:,} tokens; 15.00%"
    assert share in output
    average = due.sum() / feed.plan.num_blocks
    assert f"targets per block  {average:.2f} on average, 1 to 5\n" in output
    put = np.take_along_axis(batch["token_ids"], batch["target_positions"], axis=1)
    masked = (put == toy_corpus.tokenizer.mask_id)[due].mean()
    kept = (put == batch["target_ids"])[due].mean()
    shares = re.search(r"([\d.]+)% \[MASK\], ([\d.]+)% random, ([\d.]+)% kept", output)
    assert float(shares[1]) == pytest.approx(100 * masked, abs=0.051)
    # A random token may be the true one.
    assert float(shares[3]) == pytest.approx(100 * kept, abs=0.5)
    spans = len(
        np.unique(np.argwhere(due)[:, 0] * LENGTH + batch["left_positions"][due])
    )
    words = (toy_corpus.tokenizer.word_edges[batch["target_ids"]][due] & STARTS).sum()
    assert (
        f" {words / spans:.2f} words placed, {due.sum() / spans:.2f} tokens" in output
    )


def test_spans_restore_the_text_between_their_boundaries(output, toy_corpus):
    blocks = output.split("\nblock ")[1:]
    assert len(blocks) == 3
    for block in blocks:
        head, *lines = block.strip("\n").split("\n")
        shard, document, first, length, targets = re.search(
            r"(\S+) document (\d+) from token (\d+): (\d+) tokens?, (\d+) targets?",
            head,
        ).groups()
        shards = {one.name: one for one in toy_corpus.split("train").shards}
        begin = shards[shard].documents[int(document)] + int(first)
        ids = shards[shard].tokens[begin : begin + int(length)]
        tokens = ["[CLS]", *(toy_corpus.tokenizer.tokens[i] for i in ids), "[SEP]"]
        rule = next(i for i, line in enumerate(lines) if line.startswith("  span"))
        text = " ".join(line.strip() for line in lines[:rule])
        plain = re.sub(r"\{\d+:|\}", "", text)
        assert plain == " ".join(tokens).replace(" ##", "")

        marked = re.findall(r"\{(\d+):(.*?)\}", text)
        listed = re.findall(
            r"^ +(\d+) +(\d+)  (\S+) +(\S+) \|  (.*?)  \| (\S+)$(\n +became.*)?",
            "\n".join(lines[rule + 1 :]),
            re.M,
        )
        assert [number for number, _ in marked] == [span[0] for span in listed]
        count = 0
        spans = zip(marked, listed, strict=True)
        for (_, words), (_, at, label, left, cells, right, became) in spans:
            place = int(at)
            pieces = dict(cell.split(" ") for cell in cells.split("  "))
            assert list(pieces) == [str(i + 1) for i in range(len(pieces))]
            inside = list(pieces.values())
            assert inside == tokens[place : place + len(inside)]
            assert " ".join(inside).replace(" ##", "") == words
            assert (left, right) == (tokens[place - 1], tokens[place + len(inside)])
            assert label in ("[MASK]", "random", "kept")
            assert bool(became) == (label == "random")
            count += len(inside)
        assert count == int(targets)


@pytest.fixture(scope="module")
def pairs(start, tmp_path_factory):
    """A corpus with two documents of one token, and the preview of its pairs."""
    text = ".\n\n" + toy.make_text() + "\n,\n"
    corpus = toy.build_corpus(tmp_path_factory.mktemp("pairs") / "corpus", text)
    process = start(
        f"--corpus={corpus.directory}",
        f"--block_length={LENGTH}",
        "--pairs",
        "--seed=3",
        "--epoch=2",
        "--blocks=40",
    )
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    return corpus, out


def test_pairs_are_counted_with_what_is_left_out(pairs, tmp_path):
    corpus, output = pairs
    config = toy.make_config(tmp_path)
    config.data.pairs = True
    packed = settings.feed(config, corpus, "train")
    plan = packed.plan
    assert f"\n{plan.num_blocks} blocks at block length 32: two segments" in output
    single = [one for one in documents(corpus, "train") if len(one) == 1]
    assert 0 < len(single) <= 2
    assert f"documents of a single token, left out: {len(single)}\n" in output
    tokens = corpus.split("train").num_tokens - len(single)
    assert f" of {tokens:,} tokens; 15.00% asked for" in output
    share = (plan.num_blocks // 2) / plan.num_blocks
    assert f"{share:.1%} of the second segments are of another document" in output
    places = tokens + 3 * plan.num_blocks
    for name, rows in (("without", plan.num_blocks), ("with", plan.num_rows)):
        fill = places / (rows * LENGTH)
        assert f" {name} packing {rows:>12,} rows, {fill:.1%} filled\n" in output


def test_pairs_are_shown_with_both_seps_and_where_they_are_from(pairs):
    corpus, output = pairs
    shards = {one.name: one for one in corpus.split("train").shards}
    blocks, kinds = output.split("\nblock ")[1:], []
    assert len(blocks) == 40
    for block in blocks:
        head, *lines = block.strip("\n").split("\n")
        kind, length, targets = re.match(
            r"[\d,]+, (next|random): (\d+) tokens?, (\d+) targets?", head
        ).groups()
        kinds.append(kind)
        rule = next(i for i, line in enumerate(lines) if line.startswith("  span"))
        text = " ".join(line.strip() for line in lines[2:rule])
        plain = re.sub(r"\{\d+:|\}", "", text)
        assert plain.startswith("[CLS] ")
        assert plain.endswith(" [SEP]")
        inner = plain.removeprefix("[CLS] ").removesuffix(" [SEP]").split(" [SEP] ")
        assert len(inner) == 2
        places, tokens = [], ["[CLS]"]
        for name, line, words in zip("AB", lines, inner, strict=False):
            shard, document, first = re.fullmatch(
                rf"  {name} from (\S+) document (\d+) from token (\d+)", line
            ).groups()
            begin = shards[shard].documents[int(document)] + int(first)
            found, spelt = [], ""
            while spelt.replace(" ##", "").removeprefix("##") != words:
                token = shards[shard].tokens[begin + len(found)]
                found.append(corpus.tokenizer.tokens[token])
                spelt = " ".join(found)
            places.append((shard, document, begin, begin + len(found)))
            tokens += [*found, "[SEP]"]
        follows = places[0][1] == places[1][1] and places[0][3] == places[1][2]
        assert follows == (kind == "next")
        assert int(length) == len(tokens) - 3
        listed = re.findall(
            r"^ +\d+ +(\d+)  \S+ +(\S+) \|  (.*?)  \| (\S+)$",
            "\n".join(lines[rule + 1 :]),
            re.M,
        )
        count = 0
        for at, left, cells, right in listed:
            place = int(at)
            inside = [cell.split(" ")[1] for cell in cells.split("  ")]
            assert inside == tokens[place : place + len(inside)]
            assert (left, right) == (tokens[place - 1], tokens[place + len(inside)])
            count += len(inside)
        assert count == int(targets)
    assert set(kinds) == {"next", "random"}


def test_words_with_the_unknown_token_are_counted(output, toy_corpus):
    tokens = np.concatenate(documents(toy_corpus, "train"))
    # Each is a word for itself: a word that cannot be spelt is one unknown token.
    unknown = int((tokens == toy_corpus.tokenizer.unk_id).sum())
    words = int((toy_corpus.tokenizer.word_edges[tokens] & STARTS).sum())
    line = f"never a target     {unknown:,} of {words:,} words, which hold the unknown"
    assert line in output
    assert " tags " not in output


def with_tags(feed: Feed, name: str) -> Feed:
    """The feed with a tag of two words on every fourth, and one of twelve at the end.

    Its masking is the scheme of those tags.
    """
    shards = []
    for shard in feed.split.shards:
        starts = np.flatnonzero(feed.word_edges[shard.tokens] & 1)
        tags = np.stack([starts[:-14:4], starts[2:-12:4]], axis=1)
        tags = np.append(tags, [[starts[-12], len(shard.tokens)]], axis=0)
        shards.append(dataclasses.replace(shard, tags={name: tags}))
    scheme = {"entities": "entity", "noun_phrases": "noun_phrase"}[name]
    masking = dataclasses.replace(feed.masking, scheme=scheme)
    split = Split("train", tuple(shards))
    return dataclasses.replace(feed, split=split, masking=masking)


@pytest.mark.parametrize("name", ["entities", "noun_phrases"])
def test_tags_are_counted_and_their_share_of_the_spans(feed, name):
    feed = with_tags(feed, name)
    blocks = feed.plan.segments
    where = blocks.shard, blocks.start, blocks.length
    ends = {(s, a + n) for s, a, n in zip(*where, strict=True)}
    whole = long = words = 0
    for number, shard in enumerate(feed.split.shards):
        words += int((feed.word_edges[shard.tokens] & 1).sum())
        borders = sorted(end for s, end in ends if s == number)
        for begin, end in shard.tags[name].tolist():
            if not any(begin < border < end for border in borders):
                whole += 1
                long += end == len(shard.tokens)
    everything = np.arange(len(blocks))
    masked = masked_blocks(feed, everything, np.zeros_like(everything))
    statistics = describe.mask_statistics(feed, masked)
    text = "\n".join(describe.describe_masks(statistics, feed, 0, describe.in_plain))
    label = name.replace("_", " ")
    rate = 100 * whole / words
    assert f"tags               {whole:,} {label} in the sample, {rate:.1f} per" in text
    assert f"; {long} of more than 10 words never are\n" in text
    spans = masked.masks.spans
    # Every span of two words is a tag: the other units are single words.
    share = float((spans.last - spans.first == 2).mean())
    assert f" {share:.1%} of the spans are one;" in text
    assert 0.3 < share < 0.6


def test_a_block_without_a_target_is_described(feed, toy_corpus):
    tokens = np.full(7, toy_corpus.tokenizer.unk_id, np.uint16)
    offsets = np.array([0, 7])
    shard = dataclasses.replace(
        feed.split.shards[0], tokens=tokens, documents=offsets, lines=offsets
    )
    plan = dataclasses.replace(
        feed.plan,
        segments=dataclasses.replace(
            feed.plan.segments,
            shard=np.zeros(1, np.int32),
            start=np.zeros(1, np.int64),
            length=np.array([7], np.int32),
            continues=np.zeros(1, bool),
        ),
    )
    feed = dataclasses.replace(feed, split=Split("train", (shard,)), plan=plan)
    masked = masked_blocks(feed, np.zeros(1, np.int64), np.zeros(1, np.int64))
    statistics = describe.mask_statistics(feed, masked)
    masks = "\n".join(describe.describe_masks(statistics, feed, 0, describe.in_plain))
    assert "targets per block  0.00 on average, 0 to 0" in masks
    assert "budget unused      100.00%" in masks
    assert "7 of 7 words, which hold the unknown token" in masks
    tokenizer = toy_corpus.tokenizer
    lines = describe.describe_block(feed, tokenizer, 0, masked, 100, describe.in_plain)
    assert next(lines).endswith(
        "7 tokens, 0 targets in 0 spans, 2 of the budget unused"
    )
    assert next(lines).split() == ["[CLS]", *["[UNK]"] * 7, "[SEP]"]


def test_what_is_piped_is_plain_and_fits_100_columns(output):
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 100


def test_a_terminal_gets_colours(start, toy_corpus):
    parent, child = pty.openpty()
    process = start(
        f"--corpus={toy_corpus.directory}",
        f"--block_length={LENGTH}",
        "--split=valid",
        "--masking=subword",
        "--replacement=token",
        "--mask_ratio=0.4",
        "--blocks=40",
        stdout=child,
    )
    os.close(child)
    read = b""
    # At its end a pseudo-terminal gives an error where a pipe gives nothing.
    while True:
        try:
            read += os.read(parent, 65536)
        except OSError:
            break
    os.close(parent)
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    text = read.decode().replace("\r\n", "\n")
    plain = re.sub("\x1b\\[[0-9;]*m", "", text)
    for name in ("mask", "random", "keep"):
        assert describe.in_colour("x", name).split("x")[0] in text
    assert "masking subword, replacement token, seed 1000, epoch 0" in plain
    assert "mixed" in plain
    assert plain.count("\nblock ") == 40
    assert max(map(len, plain.splitlines())) <= 100


def test_faults_are_one_sentence_and_exit_code_2(start, toy_corpus):
    directory = toy_corpus.directory
    faults = [
        (
            ("--corpus=nowhere", "--block_length=6", "--pairs"),
            "error: --block_length is 6; pairs need at least 7\n",
        ),
        (
            ("--corpus=nowhere", "--mask_ratio=1.5"),
            "error: --mask_ratio is 1.5; it must be at least 0.0001 and below 1\n",
        ),
        (("--corpus=nowhere",), "error: --corpus=nowhere"),
        (
            (f"--corpus={directory}", "--masking=entity"),
            f"error: --masking is 'entity', but data.corpus={directory} holds no"
            " entities; build it with --tags=entities\n",
        ),
    ]
    processes = [start(*arguments) for arguments, _ in faults]
    for process, (_, message) in zip(processes, faults, strict=True):
        out, err = process.communicate()
        assert (process.returncode, out) == (2, "")
        assert err.startswith(message)
        assert err.count("\n") == 1


def test_an_empty_split_and_a_reader_that_leaves(start, tmp_path):
    corpus = toy.build_corpus(tmp_path / "one", "a single document of words\n")
    assert corpus.split("valid").num_documents == 0
    reading, writing = os.pipe()
    os.close(reading)
    left = start(f"--corpus={corpus.directory}", stdout=writing)
    os.close(writing)
    empty = start(f"--corpus={corpus.directory}", "--split=valid")
    out, err = empty.communicate()
    assert (empty.returncode, err) == (0, "")
    assert out.endswith("\n\nvalid makes no block: nothing to show\n")
    assert left.communicate()[1] == ""
    assert left.returncode == 0


def test_wrapping_counts_what_takes_columns():
    cells = [describe.in_colour("ab", "mask"), "cd", "東京", "é", "a-long-cell"]
    lines = list(describe.wrap(cells, 8, "> ", "  ", " "))
    assert [re.sub("\x1b\\[[0-9;]*m", "", line) for line in lines] == [
        "> ab cd",
        "  東京 é",
        "  a-long-cell",
    ]
