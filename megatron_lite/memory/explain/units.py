"""Bytes, FLOPs and counts as readable text with three decimals, and shares in percent with one."""

from __future__ import annotations

from typing import NamedTuple

KIB, MIB, GIB = 2**10, 2**20, 2**30


class ByteUnit(NamedTuple):
    """A unit of bytes, for one number or for a whole column of a table."""

    name: str
    num_bytes: int

    @classmethod
    def of(cls, num_bytes: int, *, gib_from: int = GIB) -> ByteUnit:
        """Returns KiB, MiB or GiB, by the (largest) number. gib_from: the least number in GiB."""
        if num_bytes >= gib_from:
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
    for factor, prefix in ((10**15, "P"), (10**12, "T"), (10**9, "G")):
        if number >= factor:
            return f"{number / factor:,.3f} {prefix}FLOP"
    return f"{number / 10**6:,.3f} MFLOP"


def count(number: int) -> str:
    """Returns a text such as "8.030 billion"."""
    for factor, name in ((10**9, "billion"), (10**6, "million")):
        if number >= factor:
            return f"{number / factor:,.3f} {name}"
    return f"{number:,}"


def percent(share: float) -> str:
    """Returns a text such as "+22.5%"."""
    return f"{100 * share:+.1f}%"
