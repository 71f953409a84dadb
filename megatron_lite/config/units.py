"""Numbers with units as readable texts, and amounts of memory read from texts such as 80GiB.

Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from .checks import quoted

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})")


def parse_bytes(flag: str, text: str, *, least: int = 0, needs_unit: bool = False) -> int:
    """Returns the bytes of "40GiB", "80GB", "512 MiB" or "1073741824".

    flag: the option that has the amount, for the message. least: the smallest amount.
    needs_unit: whether a number alone is refused.
    Raises ValueError for anything else.
    """
    found = AMOUNT.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None or found[2].upper() not in UNITS or (needs_unit and not found[2]):
        raise ValueError(
            f"{flag} {quoted(text)}: give a number of bytes with a unit, such as 40GiB or 80GB"
        )
    num_bytes = round(float(found[1]) * UNITS[found[2].upper()])
    if num_bytes < least:
        raise ValueError(f"{flag} {quoted(text)} must be at least {least} bytes")
    return num_bytes


def plural(number: int, noun: str, several: str = "") -> str:
    """Returns a text such as "1 rank" or "2 ranks". several: the plural, if it is not with an s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


KIB, MIB, GIB = 2**10, 2**20, 2**30


class ByteUnit(NamedTuple):
    """A unit of bytes, for one number or for a whole column of a table."""

    name: str
    num_bytes: int

    @classmethod
    def of(cls, num_bytes: int) -> ByteUnit:
        """Returns KiB, MiB or GiB, by the (largest) number."""
        if num_bytes >= GIB:
            return cls("GiB", GIB)
        return cls("MiB", MIB) if num_bytes >= MIB else cls("KiB", KIB)

    def number(self, num_bytes: int) -> str:
        """Returns the bytes as a number of this unit, without its name."""
        return f"{num_bytes / self.num_bytes:,.3f}"


def size(num_bytes: int) -> str:
    """Returns a text such as "12.250 MiB"."""
    unit = ByteUnit.of(abs(num_bytes))
    return f"{unit.number(num_bytes)} {unit.name}"


def flops(number: int) -> str:
    """Returns a text such as "1.324 TFLOP"."""
    return _scaled(number, {10**15: "PFLOP", 10**12: "TFLOP", 10**9: "GFLOP", 10**6: "MFLOP"})


def count(number: int) -> str:
    """Returns a text such as "8.030 billion"."""
    return (
        _scaled(number, {10**9: "billion", 10**6: "million"}) if number >= 10**6 else f"{number:,}"
    )


def _scaled(number: int, names: Mapping[int, str]) -> str:
    factor = next((one for one in names if number >= one), min(names))
    return f"{number / factor:,.3f} {names[factor]}"


def percent(share: float) -> str:
    """Returns a text such as "+22.5%"."""
    return f"{100 * share:+.1f}%"
