"""Reads JSON from outside within bounds. Standard library only.

A bad text raises one clear error, without a traceback and without a long wait.
"""

from __future__ import annotations

import json
from typing import Any

LARGEST_TEXT = 1 << 20  # characters; a whole run has about 5,000
SHOWN = 80
INT64 = range(-(2**63), 2**63)


def parse_json(text: str | bytes, *, longest: int | None = LARGEST_TEXT) -> Any:
    """Returns the value of a JSON text.

    longest: the largest number of characters, or None if the caller has bounded the text.

    Raises ValueError if the text is not JSON, is too long, or is nested too deeply for Python's
    parser. Three faults inside the JSON raise ValueError too: a whole number beyond 64 bits, NaN or
    an infinity, and an object with the same name twice, since json would drop one of the values.
    """
    if longest is not None and len(text) > longest:
        raise ValueError(f"longer than {longest} characters, which no run is")
    try:
        return json.loads(
            text,
            parse_int=parse_whole_number,
            parse_constant=_refuse_constant,
            object_pairs_hook=without_repetition,
        )
    except RecursionError:
        raise ValueError("brackets nested too deeply: a run is an object of objects") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def parse_whole_number(text: str) -> int:
    """Returns the whole number that the text spells.

    Raises ValueError if it spells none, or one beyond 64 bits. No size is so large, and arithmetic
    with it would overflow.
    """
    digits = text.strip().lstrip("+-")
    # int() of more than 4300 digits raises an error that does not name the rule, so the length is
    # tested first. Leading zeros do not count.
    if (
        len(digits) > 19
        and digits.isdigit()
        and (len(digits.lstrip("0")) > 19 or int(digits) > max(INT64))
    ):
        raise ValueError(f"{shown(text)} is beyond 64 bits")
    number = int(text)
    if number not in INT64:
        raise ValueError(f"{shown(text)} is beyond 64 bits")
    return number


def shown(text: str) -> str:
    """Returns the text for an error message: only its beginning if it is long."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict.

    Raises ValueError if a name occurs twice, since json would drop one of the values.
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shown(repr(name))} is given twice")
        values[name] = value
    return values
