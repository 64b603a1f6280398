"""Recipes in JSON files.

```
{"name": "mine",
 "rules": [{"pattern": "*.mlp.experts.*", "bits": 3, "group_size": 64, "method": "gptq"},
           {"pattern": "lm_head.weight", "keep": true}]}
```
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pallas_kernels.dequant_matmul.layout import BITS, GROUP_SIZES
from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.checkpoint.problems import LISTED, show
from qwen_jax.errors import CheckpointError, RequestError
from qwen_jax.quant import RECIPES, Method, Recipe, Rule, WeightFormat

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS = ("name", "rules")
_KEPT = ("pattern", "keep")
_CODED = ("pattern", "bits", "group_size", "symmetric", "method")
_NEEDED = _CODED[:3]


def read_recipe(name: str) -> Recipe:
    """The recipe of a name, or of a JSON file.

    Args:
        name: one of `RECIPES`, or the path of a file whose name ends in `.json`.

    Raises:
        RequestError: neither, or a file that is malformed; all its faults are in one error.
    """
    if name in RECIPES:
        return RECIPES[name]
    if not name.endswith(".json"):
        raise RequestError(
            f"there is no recipe {show(name)!r}; accepted are {', '.join(RECIPES)}, and a file "
            "whose name ends in .json"
        )
    try:
        content = read_object(Path(name))
    except CheckpointError as error:
        raise RequestError(f"recipe: {error}") from error
    faults = _faults(content)
    if faults:
        more = f"; and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise RequestError(
            f"{show(name)} is no recipe: {'; '.join(faults[:LISTED])}{more}. Accepted is an object "
            'such as {"name": "mine", "rules": [{"pattern": "*.mlp.experts.*", "bits": 3, '
            '"group_size": 64}, {"pattern": "lm_head.weight", "keep": true}]}'
        )
    return Recipe(content["name"], tuple(map(_rule, content["rules"])))


def _rule(fields: Mapping[str, Any]) -> Rule:
    if "keep" in fields:
        return Rule(fields["pattern"], None)
    form = WeightFormat(fields["bits"], fields["group_size"], fields.get("symmetric", True))
    method = {"method": fields["method"]} if "method" in fields else {}
    return Rule(fields["pattern"], form, **method)


def _faults(content: Mapping[str, Any]) -> list[str]:
    name, rules = content.get("name"), content.get("rules")
    faults = [f"unknown field {show(field)}" for field in content if field not in _FIELDS]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        faults.append(f"name is {_shown(name)}; accepted are letters, digits, '.', '_' and '-'")
    elif name in RECIPES:
        faults.append(f"name is {name}, which is a recipe of this program already")
    if not isinstance(rules, list) or not rules:
        return [*faults, f"rules is {_shown(rules)}; accepted is a list that holds some"]
    for number, rule in enumerate(rules, 1):
        faults += [f"rule {number}: {fault}" for fault in _rule_faults(rule)]
    return faults


def _rule_faults(rule: Any) -> list[str]:
    if not isinstance(rule, dict):
        return [f"it is {_shown(rule)}; accepted is an object"]
    known = _KEPT if "keep" in rule else _CODED
    faults = [
        f"{show(name)} beside keep" if name in _CODED else f"unknown field {show(name)}"
        for name in rule
        if name not in known
    ]
    needed = _KEPT if "keep" in rule else _NEEDED
    faults += [f"{name} is missing" for name in needed if name not in rule]
    accepted: dict[str, tuple[Any, ...]] = {
        "keep": (True,),
        "bits": BITS,
        "group_size": GROUP_SIZES,
        "symmetric": (True, False),
        "method": get_args(Method),
    }
    for name, values in accepted.items():
        # By type too: 1 is not true here, nor 3.0 bits 3.
        if name in rule and not any(
            rule[name] == v and type(rule[name]) is type(v) for v in values
        ):
            listing = ", ".join(map(_shown, values))
            faults.append(f"{name} is {_shown(rule[name])}; accepted: {listing}")
    pattern = rule.get("pattern", "*")
    if not isinstance(pattern, str) or not pattern:
        faults.append(f"pattern is {_shown(pattern)}; accepted is that of tree paths")
    return faults


def _shown(value: Any) -> str:
    words = {True: "true", False: "false", None: "null"}
    return words[value] if isinstance(value, bool | None) else show(repr(value))
