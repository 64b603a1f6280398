"""Recipes in files: what is read, and every fault of a malformed one in one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convert.quantization.recipe_file import read_recipe
from qwen_jax.errors import RequestError
from qwen_jax.quant import RECIPES, Recipe, Rule, WeightFormat


def write(folder: Path, content: Any) -> str:
    file = folder / "mine.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def refused(folder: Path, content: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read_recipe(write(folder, content))
    return str(caught.value)


def test_a_file_says_what_a_recipe_in_code_says(tmp_path):
    rules = [
        {"pattern": "layers.0.*", "keep": True},
        {"pattern": "*.mlp.experts.*", "bits": 3, "group_size": 64},
        {
            "pattern": "lm_head.weight",
            "bits": 8,
            "group_size": 32,
            "symmetric": False,
            "method": "round-to-nearest",
        },
    ]
    found = read_recipe(write(tmp_path, {"name": "mine", "rules": rules}))
    assert found == Recipe(
        "mine",
        (
            Rule("layers.0.*", None),
            Rule("*.mlp.experts.*", WeightFormat(3, 64)),
            Rule("lm_head.weight", WeightFormat(8, 32, False), "round-to-nearest"),
        ),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_names_are_those_of_the_program(name):
    assert read_recipe(name) is RECIPES[name]


def test_all_faults_are_in_one_error(tmp_path):
    rules = [
        {"pattern": "a", "bits": 5, "group_size": 64.0},
        {"bits": 3, "group_size": -1, "symetric": True},
        {"pattern": "", "bits": 3, "group_size": 64, "symmetric": 1, "method": "awq"},
        {"pattern": "b", "keep": False, "bits": 3},
        "c",
    ]
    error = refused(tmp_path, {"name": "my recipe", "rules": rules, "version": 2})
    for fault in (
        "unknown field version",
        "name is 'my recipe'; accepted are letters",
        "rule 1: bits is 5; accepted: 3, 4, 8",
        "rule 1: group_size is 64.0; accepted: 32, 64, 128",
        "rule 2: pattern is missing",
        "rule 2: group_size is -1",
        "rule 2: unknown field symetric",
        "rule 3: pattern is ''",
        "rule 3: symmetric is 1; accepted: true, false",
        "rule 3: method is 'awq'; accepted: 'round-to-nearest'",
        "rule 4: keep is false; accepted: true",
        "rule 4: bits beside keep",
        "rule 5: it is 'c'",
    ):
        assert fault in error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, ("name is null", "rules is null")),
        ({"name": "q3", "rules": [{"pattern": "a", "keep": True}]}, ("q3", "already")),
        ({"name": "mine", "rules": []}, ("rules is []",)),
        ([], ("not a JSON object",)),
        ("{", ("cannot be read",)),
        ('{"name": "a", "name": "b"}', ("duplicate keys: name",)),
    ],
)
def test_files_that_are_no_recipe(tmp_path, content, words):
    error = refused(tmp_path, content)
    assert [word for word in words if word not in error] == []


@pytest.mark.parametrize("name", ["q5", "", "Q3", "recipe.yaml"])
def test_unknown_names_are_told_the_known_ones(name):
    with pytest.raises(RequestError, match=r"accepted are q3, q3-small, q4, q8, experts-only"):
        read_recipe(name)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RequestError, match=r"nothing\.json"):
        read_recipe(str(tmp_path / "nothing.json"))
