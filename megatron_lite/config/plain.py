"""JSON from outside, read within bounds: texts, typed values, and config classes.

Code that reads a file from outside takes its text through `parse_json` and each value through one
of the functions below. They refuse a value of a wrong type or size before it reaches a loop, an
allocation or an index. Every ValueError names the field, the rule and the value that breaks it.
Standard library only.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from megatron_lite.config.checks import quoted

LARGEST_TEXT = 1 << 20  # characters; a whole run has about 5,000
SHOWN = 80
Values = dict[str, Any]  # of an object of JSON, or of the fields of a run, by name
INT64 = range(-(2**63), 2**63)


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """Returns the value of a JSON text.

    strict: whether the three faults inside the JSON count; not for documents and logs, which may
        hold any number.

    Raises ValueError if the text is not JSON, or is nested too deeply for Python's
    parser. Three faults inside the JSON raise ValueError too: a whole number beyond 64 bits, NaN or
    an infinity, and an object with the same name twice, since json would drop one of the values.
    """
    try:
        return json.loads(text, **STRICT if strict else {})
    except RecursionError:
        raise ValueError("brackets nested too deeply: a run is an object of objects") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def parse_whole_number(text: str) -> int:
    """Returns the whole number that the text spells.

    Raises ValueError if it spells none, or one beyond 64 bits. No size is so large, and arithmetic
    with it would overflow.
    """
    try:
        number = int(text)  # which refuses texts of more than 4300 digits
    except ValueError:
        number = INT64.stop
    if number not in INT64:
        raise ValueError(f"{shown(text)} is no whole number of at most 64 bits")
    return number


def shown(text: str) -> str:
    """Returns the text for an error message: only its beginning if it is long."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def without_repetition(pairs: list[tuple[str, Any]]) -> Values:
    """Returns a JSON object as a dict.

    Raises ValueError if a name occurs twice, since json would drop one of the values.
    """
    values = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{quoted(name)} is given twice")
        values[name] = value
    return values


STRICT: Values = dict(
    parse_int=parse_whole_number,
    parse_constant=_refuse_constant,
    object_pairs_hook=without_repetition,
)
# A reader builds something for each layer that a file names. No model has more layers than this.
MOST_LAYERS = 2**16
MOST_SIZE, MOST_RANKS = 2**48, 2**20


def parse_object(text: str | bytes) -> Values:
    """Returns the JSON object that a text holds.

    Raises ValueError if the text is no JSON, holds another JSON value, or is nested too deeply.
    """
    return as_object(parse_json(text), "the text")


def as_object(value: object, name: str) -> Values:
    """Returns the value if it is a JSON object. Raises ValueError otherwise."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object (got {quoted(value)})")
    return value


def as_list(value: object, name: str) -> list[Any]:
    """Returns the value if it is a JSON list. Raises ValueError otherwise."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list (got {quoted(value)})")
    return value


def field(values: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field. Raises ValueError if the field is missing."""
    if name not in values:
        raise ValueError(f"{name} is missing")
    return values[name]


def as_whole(value: object, name: str, low: int, high: int) -> int:
    """Returns the value if it is a whole number from `low` to `high`. Raises ValueError otherwise.

    true, false and 1.0 are no whole numbers.
    """
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"{name} must be a whole number from {low} to {high} (got {quoted(value)})"
        )
    return value


types_of = functools.cache(typing.get_type_hints)  # it evaluates texts, and a run has 13 classes


def from_plain(cls: type, values: Any, where: str, ignored: Collection[str] = ()) -> Any:
    """Returns the config class built from a JSON object.

    where: the path of the object in the file, for error messages.
    ignored: fields that an older version had, and that have no effect any more.
    """
    given = as_object(values, where).items()
    values = {name: value for name, value in given if name not in ignored}
    hints = types_of(cls)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(
            f"{where}: unknown field {shown(', '.join(unknown))} (known: "
            f"{', '.join(sorted(hints))})"
        )
    missing = sorted(
        one.name
        for one in dataclasses.fields(cls)
        if one.name not in values and one.default is one.default_factory is dataclasses.MISSING
    )
    if missing:
        raise ValueError(f"{where}: missing field {', '.join(missing)}")
    return cls(
        **{
            name: _value(hints[name], value, f"{where}.{name}", ignored)
            for name, value in values.items()
        }
    )


def _value(hint: Any, value: Any, where: str, ignored: Collection[str]) -> Any:
    """Returns the JSON value as the type that the field's annotation `hint` names."""
    for kind in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if dataclasses.is_dataclass(kind) and (value is not None or kind is hint):
            return from_plain(typing.cast(type, kind), value, where, ignored)
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        # JSON has no tuple: a list stands for it.
        if origin is tuple and type(value) is list and {*map(type, value)} <= {inside[0]}:
            return tuple(value)
        if origin is Mapping and type(value) is dict:
            return {
                name: _value(inside[1], one, f"{where}[{quoted(name)}]", ignored)
                for name, one in value.items()
            }
        if type(value) is kind or kind is Any:
            return value
        if kind is float and type(value) is int:  # may be written without a decimal point
            return float(value)
    raise ValueError(
        f"{where}: expected {str(hint) if typing.get_args(hint) else hint.__name__}, got "
        f"{quoted(value)}"
    )
