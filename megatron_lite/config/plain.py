"""Typed, bounded values from parsed JSON.

Code that reads a file from outside takes each value through one of these functions. They refuse a
value of a wrong type or size before it reaches a loop, an allocation or an index. Every ValueError
names the field, the rule and the value that breaks it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megatron_lite.config.json_text import parse_json

LONGEST_SHOWN = 60
LONGEST_LINE = 400
# A reader builds something for each layer that a file names. No model has more layers than this.
MOST_LAYERS = 2**16
MOST_SIZE, MOST_RANKS = 2**48, 2**20


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns the JSON object that a text holds.

    Raises ValueError if the text is no JSON, holds another JSON value, or is nested too deeply.
    """
    return as_object(parse_json(text, longest=None), "the text")


def as_object(value: object, name: str) -> dict[str, Any]:
    """Returns the value if it is a JSON object. Raises ValueError otherwise."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object (got {shown(value)})")
    return value


def as_list(value: object, name: str) -> list[Any]:
    """Returns the value if it is a JSON list. Raises ValueError otherwise."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list (got {shown(value)})")
    return value


def field(values: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field. Raises ValueError if the field is missing."""
    if name not in values:
        raise ValueError(f"{name} is missing")
    return values[name]


def check_names(values: Mapping[str, Any], known: Collection[str], name: str) -> None:
    """Raises ValueError if an object has a field that is not among the known ones."""
    for unknown in sorted(set(values) - set(known)):
        raise ValueError(f"{name} has no field {shown(unknown)}")


def as_whole(value: object, name: str, low: int, high: int) -> int:
    """Returns the value if it is a whole number from `low` to `high`. Raises ValueError otherwise.

    true, false and 1.0 are no whole numbers.
    """
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high} (got {shown(value)})")
    return value


def whole(values: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Returns the field's value if it is a whole number from `low` to `high`.

    Raises ValueError otherwise.
    """
    return as_whole(field(values, name), name, low, high)


def finite(values: Mapping[str, Any], name: str) -> float:
    """Returns the field's value as a float if it is a finite number.

    Raises ValueError otherwise.
    """
    value = field(values, name)
    try:
        if type(value) in (int, float) and math.isfinite(number := float(value)):
            return number
    except OverflowError:
        pass
    raise ValueError(f"{name} must be a finite number (got {shown(value)})")


def boolean(values: Mapping[str, Any], name: str) -> bool:
    """Returns the field's value if it is true or false. Raises ValueError otherwise."""
    value = field(values, name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false (got {shown(value)})")
    return value


def as_line(value: object, name: str) -> str:
    """Returns the value if it is a text of one line that a terminal can show.

    Raises ValueError otherwise, and if it is longer than LONGEST_LINE.
    """
    if not isinstance(value, str) or len(value) > LONGEST_LINE or not (value + " ").isprintable():
        raise ValueError(f"{name} must be one line of text (got {shown(value)})")
    return value


def check_sizes(values: object) -> None:
    """Raises ValueError if a run's JSON has a size larger than that of any model or machine.

    The rules of RunConfig loop over layers and stages, so such a size could keep them busy for very
    long.
    """
    topics = values if isinstance(values, dict) else {}
    for topic, most in (("model", MOST_SIZE), ("parallel", MOST_RANKS)):
        found = topics.get(topic)
        for name, value in found.items() if isinstance(found, dict) else ():
            if type(value) is int and value > 0:
                as_whole(value, name, 1, MOST_LAYERS if name == "num_layers" else most)


def shown(value: object) -> str:
    """Returns the value for an error message: only its beginning if it is long."""
    try:
        text = repr(value)
    except ValueError:  # a whole number with more digits than Python prints
        return "a number of several thousand digits"
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + ".."
