"""A name of a class of the library leads to one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import megatron_lite

LIBRARY = Path(megatron_lite.__file__).parent


def test_a_class_name_is_used_once() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(LIBRARY.rglob("*.py")):
        place = str(path.relative_to(LIBRARY))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(place)
    assert len(classes) > 100
    assert not {name: places for name, places in classes.items() if len(places) > 1}
