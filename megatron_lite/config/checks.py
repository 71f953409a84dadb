"""Small helpers for the rules of the config classes: every message names the value, the rule and the fix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class InputError(ValueError):
    """A fault in what the user gave (a file, a directory, a launch), found after the flags were parsed.

    `pretrain_gpt.py` and the tools print its message as one line and exit with status 2, without a traceback.
    """


class PeerError(InputError):
    """The same, found by another rank, whose message says what it is."""


def flag(field: str) -> str:
    """The command-line spelling of a config field: `num_layers` -> `--num-layers`."""
    return "--" + field.replace("_", "-")


def require_at_least(config: Any, minimum: float, *fields: str) -> None:
    """Raises ValueError unless every named field of `config` that is set (not None) is >= `minimum`, and finite."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not minimum <= value < math.inf:
            finite = " and finite" if value == math.inf else ""
            raise ValueError(f"{flag(field)} must be at least {minimum}{finite} (got {value})")


def require_within(config: Any, low: float, high: float, *fields: str) -> None:
    """Raises ValueError unless every named field that is set lies in [low, high)."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not low <= value < high:
            raise ValueError(f"{flag(field)} must be in [{low}, {high}) (got {value})")


def require_not_empty(config: Any, *fields: str) -> None:
    """Raises ValueError where a named path is the empty string, as an unset shell variable makes it."""
    for field in fields:
        if getattr(config, field) == "":
            raise ValueError(f"{flag(field)} is empty: give a path, or leave the flag out")


def require_one_of(config: Any, field: str, allowed: Sequence[str]) -> None:
    """Raises ValueError unless the field's value is one of `allowed`."""
    value = getattr(config, field)
    if value not in allowed:
        raise ValueError(f"{flag(field)} must be one of {', '.join(allowed)} (got {value!r})")


def resolve(config: Any, field: str, value: Any) -> None:
    """Fills a None field of a frozen config with its derived value. Only for use inside `__post_init__`."""
    if getattr(config, field) is None:
        object.__setattr__(config, field, value)
