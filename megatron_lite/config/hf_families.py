"""The families of Hugging Face models that map exactly, and those that cannot, with the reason.

families.json has them as data. Each family has the `keys` that become fields, the keys of which
`only` some values can be mapped (an exported config has the last one), the `fields` that all
members have in common, the `rules` for facts that are not one key (classes of hf_rules.py, with
their arguments), and the names of its weights, each by the name of the module here:

    base     the prefix of all tensors but those of the head; files of a model that was saved
             without its head lack it
    head     the module of the untied output weight
    outer    the modules outside of a layer, without the base
    layers   the place of a layer below the base
    layer    its modules; {"theirs": [..], "layout": ..} for several modules, or for a layout of
             convert/hf.py. A * stands for the number of an expert. A parameter that is not the
             weight or bias of a module stands with its whole name

A key has the field, its type, the default that transformers takes if it is missing (none: it must
be there) and, if it differs, for null. `inverted`: the field is the opposite of the key. `values`:
the field's value for each of the key's. Keys of one field must have one value.
A family that is `like` another one names what differs; null takes an entry out.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.config.plain import parse_json

DATA = parse_json(Path(__file__).with_name("families.json").read_text())


def _family(row: Mapping[str, Any]) -> dict[str, Any]:
    base = _family(DATA["families"][row["like"]]) if "like" in row else {}
    whole = {**base, **row}
    for name, part in row.items():
        if isinstance(part, dict):
            merged = {**base.get(name, {}), **part}
            whole[name] = {key: value for key, value in merged.items() if value is not None}
    return whole


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    name: _family(row) for name, row in DATA["families"].items()
}
REASONS: Mapping[str, str] = DATA["refused"]
