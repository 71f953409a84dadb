"""Amounts of memory as texts, such as 80GiB. Standard library only."""

from __future__ import annotations

import re

UNITS = {
    "B": 1,
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGT", 1)},
}
BY_LOWER_CASE = {unit.lower(): unit for unit in UNITS}
AMOUNT = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{1,3})\s*")
MOST_BYTES = 2**60


def parse_bytes(flag: str, text: str) -> int:
    """Returns the bytes of an amount such as 80GiB, 512 MiB or 1.5GB.

    flag: the option that has the amount, for the message.
    Raises ValueError if the text is not a number with a unit, or not a whole byte at least.
    """
    found = AMOUNT.fullmatch(text)
    unit = None if found is None else BY_LOWER_CASE.get(found[2].lower())
    if found is None or unit is None:
        raise ValueError(
            f"{flag} must be a number with a unit of {', '.join(UNITS)}, such as 80GiB "
            f"(got {text[:40]!r})"
        )
    num_bytes = int(float(found[1]) * UNITS[unit])
    if not 1 <= num_bytes <= MOST_BYTES:
        raise ValueError(f"{flag} must be at least one byte and at most 2^60 (got {text[:40]!r})")
    return num_bytes
