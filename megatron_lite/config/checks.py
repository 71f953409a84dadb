"""The faults of what comes from outside, and JSON that is read within bounds.

Every error message names the value, the rule and the fix. Code that reads a file from outside takes
its text through `parse_json` and each value through one of the functions below. They refuse a value
of a wrong type or size before it reaches a loop, an allocation or an index. Standard library only.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

LONGEST_SHOWN = 60


class InputError(ValueError):
    """A fault in the user's input that is found after the flags were parsed.

    The input is a file, a directory or a launch. `pretrain_gpt.py` and the tools print the message
    as one line and exit with status 2, without a traceback.
    """


class PeerError(InputError):
    """A fault that another rank met and reports. This rank only knows that it exists."""


@contextmanager
def input_faults(before: str = "", after: str = "") -> Iterator[None]:
    """Turns a rule that is broken inside the block (ValueError) into an InputError.

    before, after: what its message adds. An InputError is raised unchanged: it names its input.
    """
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{before}{error}{after}") from error


def flag(field: str) -> str:
    """Returns the flag of a config field: `num_layers` -> `--num-layers`."""
    return f"--{field.replace('_', '-')}"


def quoted(value: object) -> str:
    """Returns the value for an error message: only its beginning if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints no such whole number or list
        return "a value of several thousand digits or brackets"
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + ".."


LARGEST_TEXT = 1 << 20  # characters; a whole run has about 5,000
SHOWN = 80
Values = dict[str, Any]  # of an object of JSON, or of the fields of a run, by name
INT64 = range(-(2**63), 2**63)


def parse_json(text: str | bytes, *, strict: bool = True) -> Any:
    """Returns the value of a JSON text.

    strict: whether the three faults inside the JSON count; not for documents, logs and the files of
        other libraries, which may hold any number where we do not read. A whole number of 19 digits
        is a float then.

    Raises ValueError if the text is not JSON, or is nested too deeply for Python's
    parser. Three faults inside the JSON raise ValueError too: a whole number beyond 64 bits, NaN or
    an infinity, and an object with the same name twice, since json would drop one of the values.
    """
    try:
        return json.loads(text, **STRICT if strict else LOOSE)
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


def printable(text: str) -> str:
    """Returns the text with escapes for what a terminal would obey, such as a name may have.

    A line break stays if an indented line follows: any other one would begin another message.
    """
    return re.sub(r"[^ -~\n]|\n(?! )", lambda one: repr(one[0])[1:-1], text)


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
LOOSE = {"parse_int": lambda text: int(text) if len(text) < 19 else float(text)}
# A reader builds something for each layer that a file names. No model has more layers than this.
MOST_LAYERS = 2**16
MOST_SIZE = 2**48


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
