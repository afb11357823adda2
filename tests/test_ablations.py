"""The ablations: each differs from its parent by one setting."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import ablations
from spanbert_jax import settings

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
