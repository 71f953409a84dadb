"""The families of Hugging Face models that map exactly, and those that cannot, with the reason.

families.json has them as data. Each family has the keys that become fields, the keys that may have
some values only (an exported config has the last one), the fields that all members have in common,
rules for facts that are not one key (classes of hf_rules.py, with their arguments), and the names
of its weights. A family that is `like` another one names what differs; null takes an entry out.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.config import hf_rules
from megatron_lite.config.hf_rules import FamilyKeys, FamilyTensors, Key, Only, TensorNames
from megatron_lite.config.plain import parse_json

DATA = parse_json(Path(__file__).with_name("families.json").read_text())
TYPES = {"int": int, "float": float, "bool": bool}


def _family(row: Mapping[str, Any]) -> FamilyKeys:
    whole = {**DATA["families"][row["like"]]} if "like" in row else {}
    for name, part in row.items():
        if isinstance(part, dict):
            part = {**whole.get(name, {}), **part}
            part = {key: value for key, value in part.items() if value is not None}
        whole[name] = part
    return FamilyKeys(
        whole["architecture"],
        {key: Key(**{**one, "type": TYPES[one["type"]]}) for key, one in whole["keys"].items()},
        {key: Only(**one) for key, one in whole["only"].items()},
        whole["fields"],
        tuple(_rule(**one) for one in whole["rules"]),
        FamilyTensors(
            whole["base"],
            whole["head"],
            _modules(whole["outer"]),
            (whole["layers"], _modules(whole["layer"])),
        ),
    )


def _rule(rule: str, **arguments: Any) -> hf_rules.Rule:
    found: hf_rules.Rule = getattr(hf_rules, rule)(**arguments)
    return found


def _modules(names: Mapping[str, Any]) -> dict[str, str | TensorNames]:
    return {
        ours: theirs if isinstance(theirs, str) else TensorNames(**theirs)
        for ours, theirs in names.items()
    }


FAMILIES: Mapping[str, FamilyKeys] = {name: _family(row) for name, row in DATA["families"].items()}
REASONS: Mapping[str, str] = DATA["refused"]
