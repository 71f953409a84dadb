"""A name of a file or of a class of the library leads to one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import megatron_lite

LIBRARY = Path(megatron_lite.__file__).parent
# Every folder may have these two.
EVERYWHERE = {"__init__.py", "__main__.py"}


def _places() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The files of each file name, and the files that define each class."""
    files: dict[str, list[str]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(LIBRARY.rglob("*.py")):
        place = str(path.relative_to(LIBRARY))
        if path.name not in EVERYWHERE:
            files[path.name].append(place)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(place)
    return files, classes


def test_a_file_name_is_used_once() -> None:
    files, _ = _places()
    assert len(files) > 300
    assert not {name: places for name, places in files.items() if len(places) > 1}


def test_a_class_name_is_used_once() -> None:
    _, classes = _places()
    assert len(classes) > 100
    assert not {name: places for name, places in classes.items() if len(places) > 1}
