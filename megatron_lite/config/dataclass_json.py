"""Builds config dataclasses from a JSON value. Each field is checked against its annotation."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from megatron_lite.config.json_text import shown
from megatron_lite.config.megatron_flags import RETIRED_FIELDS


def from_plain(cls: type, values: Any, where: str) -> Any:
    """Returns the config class built from a JSON object.

    where: the path of the object in the file, for error messages.
    Fields that an older version had, and that have no effect any more, are left out.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected an object, got {type(values).__name__}")
    values = {name: value for name, value in values.items() if name not in RETIRED_FIELDS}
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ValueError(
            f"{where}: unknown field {shown(', '.join(unknown))} (known: "
            f"{', '.join(sorted(hints))})"
        )
    missing = sorted(
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    )
    if missing:
        raise ValueError(f"{where}: missing field {', '.join(missing)}")
    return cls(
        **{name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    )


def _value(hint: Any, value: Any, where: str) -> Any:
    """Returns the JSON value as the type that the field's annotation `hint` names."""
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) is Mapping:
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
            raise ValueError(f"{where}: expected an object of texts, got {shown(repr(value))}")
        return value
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    # JSON has no tuple: a list stands for it.
    lists = [kind for kind in allowed if typing.get_origin(kind) is tuple]
    if lists and (isinstance(value, list) or len(allowed) == 1):
        kind = typing.get_args(lists[0])[0]
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ValueError(
                f"{where}: expected a list of {'strings' if kind is str else 'whole numbers'}, got "
                f"{shown(repr(value))}"
            )
        return tuple(value)
    allowed = tuple(kind for kind in allowed if kind not in lists)
    # bool is a subclass of int in Python: without this test `true` would pass as a whole number.
    if isinstance(value, bool) and bool not in allowed:
        raise ValueError(f"{where}: expected {hint}, got {shown(repr(value))}")
    # A float field may be written without a decimal point.
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and float in allowed
        and int not in allowed
    ):
        return float(value)
    if not isinstance(value, allowed):
        raise ValueError(f"{where}: expected {hint}, got {shown(repr(value))}")
    return value
