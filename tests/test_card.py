"""Card: its numbers are the run's, and its code runs."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ml_collections import ConfigDict

import models
import reference
import toy
from spanbert_jax import settings
from spanbert_jax.corpus.store import Corpus
from spanbert_jax.interop import names
from spanbert_jax.interop.boundary_head import CLASS, module_text
from spanbert_jax.interop.card import make_card, python_blocks
from spanbert_jax.interop.huggingface import write_export
from spanbert_jax.interop.pretrained import parameter_shapes


@pytest.fixture
def config(toy_cache: Path) -> ConfigDict:
    return toy.make_config(toy_cache)


def card_of(
    config: ConfigDict, corpus: Corpus, history: list[dict[str, Any]], **of_run: Any
) -> str:
    saved = models.make_saved(config, corpus, Path("run"))
    saved.record.update(of_run)
    tensors = names.to_tensors(saved.params, saved.origin.tokenizer.vocab_size)
    return make_card(saved, tensors, history)


def rows_of(card: str, title: str) -> dict[str, list[str]]:
    """The table of a section: the cells of each row, by its first one."""
    section = card.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", section, re.MULTILINE)
    cells = [re.split(r" (?<!\\)\| ", line) for line in lines]
    assert len({len(row) for row in cells}) == 1
    return {first: rest for first, *rest in cells}


# ---- What it says


def test_what_only_the_user_knows_is_left_open(
    config: ConfigDict, toy_corpus: Corpus
) -> None:
    card = card_of(config, toy_corpus, [])
    _, head, body = card.split("---\n", 2)
    header = yaml.safe_load(head)
    assert header["license"] == header["language"] == "FILL IN"
    assert header["library_name"] == "transformers"
    assert header["pipeline_tag"] == "fill-mask"
    assert "span-boundary-objective" in header["tags"]
    assert body.count("FILL IN") == 2


def test_parameters_are_counted_without_padding(
    config: ConfigDict, toy_corpus: Corpus
) -> None:
    size, vocab = 64, toy_corpus.tokenizer.vocab_size
    norm = 2 * size
    layer = 4 * (size * size + size) + 2 * (size * 128) + 128 + size + 2 * norm
    encoder = (vocab + 32 + 2) * size + norm + 2 * layer
    mlm = size * size + size + norm + vocab
    sbo = 20 * 200 + (2 * size + 200) * size + size + size * size + size + 2 * norm
    card = " ".join(card_of(config, toy_corpus, []).split())
    bert, head = f"encoder {encoder:,}, MLM head {mlm:,}", sbo + vocab
    assert f"Parameters: {bert}, span boundary head {head:,}." in card
    config.data.pairs = True
    with_pairs = " ".join(card_of(config, toy_corpus, []).split())
    nsp = size * size + size + 2 * size + 2
    heads = f"next-sentence head {nsp:,}, span boundary head {head:,}"
    assert f"Parameters: {bert}, {heads}." in with_pairs


def test_the_tables_hold_the_numbers_of_the_run(
    config: ConfigDict, toy_corpus: Corpus
) -> None:
    later = {**models.EVALUATION, "step": 30, "mlm_loss": 2.2}
    card = card_of(config, toy_corpus, [models.EVALUATION, later])
    assert rows_of(card, "Results") == {
        "at step 30": [
            "MLM head, from the token's own state",
            "SBO head, from the span's boundaries",
        ],
        "---": ["---", "---"],
        "loss": ["2.200", "2.500"],
        "targets right": ["51.3%", "40.0%"],
        "targets": ["12,345", "12,000"],
        "whole spans right": ["31.2% of 400", "6.2% of 400"],
        "... of length 1": ["50.0% of 100", "25.0% of 100"],
        "... of length 2": ["25.0% of 300", "0.0% of 300"],
    }
    assert "Perplexity of the MLM head: 10.44." in card
    assert "loss of 6.500" in " ".join(card.split())
    assert "![Losses by step](curves.png)" in card
    splits = toy_corpus.manifest["splits"]
    assert rows_of(card, "Training data")["corpus"] == [
        *(f"{splits['train'][key]:,}" for key in ("documents", "tokens")),
        *(f"{splits['valid'][key]:,}" for key in ("documents", "tokens")),
        "`corpus.txt`",
    ]


def test_the_recipe_is_that_of_the_settings(
    config: ConfigDict, toy_corpus: Corpus
) -> None:
    config.data.mask_ratio, config.data.block_length = 0.125, 24
    config.data.random_tokens = "corpus"
    config.train.steps, config.train.batch_size = 1_200_000, 4096
    config.model.dtype, config.init_from = "bfloat16", "bert"
    change = {"step": 7, "name": "optimizer.clip_norm", "old": 1.0, "new": 0.0}
    moved = {"step": 9, "name": "mesh.data", "old": 1, "new": 2}
    card = card_of(config, toy_corpus, [], changes=[change, moved])
    recipe = {name: cell for name, [cell] in rows_of(card, "Recipe").items()}
    assert recipe["started from"] == "bert"
    assert recipe["masked"].startswith("12.5% of the tokens: spans of whole words")
    assert "as frequent as in the text" in recipe["replaced by"]
    assert recipe["replaced by"].endswith("one draw for each span")
    assert recipe["batch"] == "4,096 rows of 24 tokens"
    assert recipe["steps"] == "1,200,000 of 1,200,000"
    assert recipe["computed in"] == "bfloat16, weights float32"
    assert recipe["computed on"] == "8 x TPU v4"
    told = "at step 7 optimizer.clip_norm from 1.0 to 0.0"
    assert recipe["changed on the way"] == told
    assert "No text of more than 24 tokens was read" in card


@pytest.mark.parametrize(
    ("masking", "masked", "draw"),
    [
        ("word", "whole words", "token"),
        ("subword", "single tokens", "token"),
        ("entity", "entities in 50% of the draws, words in the others", "span"),
        ("noun_phrase", "noun phrases in 50% of the draws", "span"),
    ],
)
def test_every_scheme_has_words(
    config: ConfigDict, toy_corpus: Corpus, masking: str, masked: str, draw: str
) -> None:
    config.data.masking = masking
    recipe = rows_of(card_of(config, toy_corpus, []), "Recipe")
    assert f": {masked}" in recipe["masked"][0]
    assert recipe["replaced by"][0].endswith(f"one draw for each {draw}")


def test_what_the_run_lacks_is_not_told(config: ConfigDict, toy_corpus: Corpus) -> None:
    config.sbo.weight, config.data.pairs = 0.0, True
    card = card_of(config, toy_corpus, [])
    assert "boundary" not in card.replace("boundary objective", "")
    assert "sbo.safetensors" not in card
    assert "span-boundary-objective" not in card
    assert "looked at no held-out text" in card
    assert "curves.png" not in card
    assert "next sentence" in rows_of(card, "Recipe")["objective"][0]
    # Trained on both token types, and with a pooler.
    assert "token type 1" not in card
    assert "pooler" not in card


def test_names_of_files_do_not_break_a_table(
    config: ConfigDict, toy_corpus: Corpus
) -> None:
    saved = models.make_saved(config, toy_corpus, Path("run"))
    [corpus] = saved.origin.corpora
    source = corpus["sources"][0]
    corpus["sources"] = [{**source, "name": f"a|b\n{i}"} for i in range(1_007)]
    tensors = names.to_tensors(saved.params, saved.origin.tokenizer.vocab_size)
    cells = rows_of(make_card(saved, tensors, []), "Training data")["corpus"]
    assert cells[-1].startswith(r"`a\|b 0`, `a\|b 1`")
    assert cells[-1].endswith("and 1,002 more")


# ---- What its code does


@pytest.mark.parametrize("sides", [("left", "right"), ("left",), ("right",)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_module_computes_what_our_head_does(
    config: ConfigDict, sides: tuple[str, ...], depth: int
) -> None:
    torch = pytest.importorskip("torch")
    size, vocab = 64, 300
    config.sbo.boundaries = "both" if len(sides) == 2 else sides[0]
    config.sbo.depth, config.sbo.positions = depth, 5
    config.sbo.position_size = 11
    params = reference.rough_params(parameter_shapes(config, vocab), seed=1)
    namespace: dict[str, Any] = {}
    exec(module_text(settings.model(config, vocab).sbo, size, vocab), namespace)
    head = namespace[CLASS]()
    head.load_state_dict(
        {
            name.removeprefix("sbo."): torch.from_numpy(array)
            for name, array in names.to_tensors(params, vocab).items()
            if name.startswith("sbo.")
        }
    )
    rng = np.random.default_rng(2)
    states = rng.normal(size=(len(sides), 5, size)).astype(np.float32)
    table = params["encoder"]["token_embedding"]["embedding"][:vocab]
    with torch.no_grad():
        logits = head(
            *torch.from_numpy(states), torch.arange(5), torch.from_numpy(table)
        )
    double = reference.double(params)
    for place in range(5):
        ours = reference.sbo_logits(list(states[:, place]), place + 1, double)
        np.testing.assert_allclose(logits[place], ours, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("boundaries", "internal"),
    [("both", False), ("both", True), ("left", False), ("right", True)],
)
def test_the_code_runs_where_it_says(
    config: ConfigDict,
    toy_corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    boundaries: str,
    internal: bool,
) -> None:
    config.sbo.boundaries, config.sbo.internal = boundaries, internal
    saved = models.make_saved(config, toy_corpus, tmp_path)
    write_export(saved, tmp_path / "export")
    monkeypatch.chdir(tmp_path / "export")
    blocks = python_blocks(Path("README.md").read_text())
    assert len(blocks) == 4
    namespace: dict[str, Any] = {}
    for block in blocks:
        assert all(len(line) <= 88 for line in block.splitlines())
        with models.one_thread():
            exec(block, namespace)
    printed = capsys.readouterr().out
    assert re.search(r"^0\.\d{3} ", printed, re.MULTILINE)
    # The last block: which states it reads is compared with what the head is to read.
    span, states = namespace["span"].tolist(), namespace["states"].numpy()
    assert len(span) == 3
    batch = {
        "target_positions": np.array([span]),
        "left_positions": np.array([[span[0] - 1] * 3]),
        "right_positions": np.array([[span[-1] + 1] * 3]),
        "span_offsets": np.array([[1, 2, 3]]),
    }
    double = reference.double(saved.params)
    for slot in range(3):
        places = reference.boundary_places(batch, 0, slot, boundaries, internal)
        ours = reference.sbo_logits([states[p] for p in places], slot + 1, double)
        theirs = namespace["logits"][slot].numpy()
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-5)
