"""Values that differ from others in a few fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

Value = TypeVar("Value", bound=Any)


def with_fields(value: Value, **fields: Any) -> Value:
    """Returns a NamedTuple or a frozen dataclass like `value`, with these fields changed.

    `copy.replace` of Python 3.13 does the same.
    """
    return value._replace(**fields) if isinstance(value, tuple) else replace(value, **fields)
