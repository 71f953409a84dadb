"""Values that differ from others in a few fields."""

from dataclasses import replace
from typing import Any, TypeVar

Value = TypeVar("Value", bound=Any)


def with_fields(value, **fields):
    """Returns a NamedTuple or a frozen dataclass like `value`, with these fields changed.

    `copy.replace` of Python 3.13 does the same.
    """
    return value._replace(**fields) if isinstance(value, tuple) else replace(value, **fields)


def with_settings(config, **settings):
    """Returns the run with other values of these fields, which are given by name."""
    return config.with_fields(settings)
