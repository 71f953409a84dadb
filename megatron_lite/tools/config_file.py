"""Reads a config file as plain data: JSON, TOML or YAML, within bounds.

The file comes from somebody else, so it is treated as untrusted data. YAML tags are refused and no
text is evaluated. Its size, its depth, the values that YAML aliases expand to and the parts of a
TOML key are bounded before they can cost time or memory. A duplicate key is an error in all three
formats, since a reader that takes the last one hides the first one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.plain import without_repetition

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_BYTES = 2**18
MAX_DEPTH = 50
MAX_YAML_VALUES = 20_000  # an alias counts each time it is used
# Python's TOML reader takes time quadratic in the parts of a key such as a.b.c: 3 s for 8,000.
MAX_DOTS = 200


def read_config_file(path: str) -> Any:
    """Returns the content of the file as plain data.

    The file's ending decides the format (.json, .toml, .yaml, .yml). If it is another ending,
    the contents decide.
    Raises OSError if the file cannot be read. Raises InputError, which names the file, if it is too
    large, is not text, or cannot be parsed.
    """
    text = read_input_text(path, MAX_FILE_BYTES)
    formats = FORMATS.get(Path(path).suffix.lower()) or _formats_of(text)
    faults = []
    for name in formats:
        try:
            config = PARSERS[name](text)
            _check_depth(config)
            return config
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            faults.append(f"not {name} ({_one_line(error)})")
    raise InputError(f"{path}: {'; '.join(faults)}")


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads plain data and refuses tags, duplicate keys and endless aliases.

    depth: the nesting level of the node that is being composed.
    num_values: the values composed so far, including those that an alias expands to.
    sizes: the number of values at and below each anchor.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.num_values = 0
        self.sizes: dict[str, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        anchor: Any = getattr(event, "anchor", None)
        is_alias = isinstance(event, yaml.AliasEvent)
        if getattr(event, "tag", None) is not None:
            raise ValueError(
                f"line {event.start_mark.line + 1}: the tag {event.tag[:40]!r} is not read; "
                "write plain values"
            )
        if is_alias and anchor in self.anchors and anchor not in self.sizes:
            raise ValueError(
                f"line {event.start_mark.line + 1}: the alias {anchor[:40]!r} stands inside "
                "its own value"
            )
        # An alias counts all values behind it. A short file of nested aliases can stand for
        # billions of them.
        self.num_values += self.sizes.get(anchor, 1) if is_alias else 1
        if self.num_values > MAX_YAML_VALUES:
            raise ValueError(
                f"line {event.start_mark.line + 1}: more than {MAX_YAML_VALUES} values, "
                "aliases included"
            )
        if self.depth >= MAX_DEPTH:
            raise ValueError(f"line {event.start_mark.line + 1}: more than {MAX_DEPTH} levels deep")
        before = self.num_values
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if anchor is not None and not is_alias:
            self.sizes[anchor] = 1 + self.num_values - before
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Composes a mapping. Raises ValueError for a duplicate key.

        Keys that `<<` will merge in are not here yet, so they may repeat a key.
        """
        node = super().compose_mapping_node(anchor)
        found: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in found:
                    raise ValueError(
                        f"line {key.start_mark.line + 1}: the key {key.value[:40]!r} stands "
                        "twice in one mapping"
                    )
                found.add(key.value)
        return node


def _read_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _read_toml(text: str) -> Any:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > MAX_DOTS:
            raise ValueError(f"line {number}: more than {MAX_DOTS} dots in one line")
    return tomllib.loads(text)


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=without_repetition)


PARSERS: dict[str, Callable[[str], Any]] = {
    "JSON": _read_json,
    "TOML": _read_toml,
    "YAML": _read_yaml,
}
FORMATS = {".json": ("JSON",), ".toml": ("TOML",), ".yaml": ("YAML",), ".yml": ("YAML",)}


def _formats_of(text: str) -> tuple[str, ...]:
    """Returns the formats to try for a file whose ending names none.

    JSON comes first, since JSON is also YAML.
    """
    if text.lstrip().startswith("{"):
        return ("JSON", "YAML")
    first = next(
        (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")),
        "",
    )
    return (
        ("TOML",)
        if re.match(r"\s*(\[[^\]]+\]\s*(#.*)?$|[\w.\"'-]+\s*=)", first[:200])
        else ("YAML",)
    )


def _check_depth(config: Any) -> None:
    """Raises ValueError for more than MAX_DEPTH levels. Functions that walk a config rely on it."""
    level, depth = [config], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels deep")
        depth += 1
        level = [
            below
            for value in level
            if isinstance(value, dict | list)
            for below in (value.values() if isinstance(value, dict) else value)
        ]


def _one_line(error: Exception) -> str:
    """Returns a parser's message on one line, cut at 300 characters. YAML's has several lines."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + "..."
