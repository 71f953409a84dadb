"""Numbers as short texts, and round numbers for the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Unit(NamedTuple):
    """A unit of measurement. Values are divided by `size` before they are shown."""

    name: str = ""
    size: float = 1.0

    def shown(self, value: float | None) -> str:
        """Returns a value, before the division, with its unit."""
        if value is None:
            return "none"
        return f"{number(value / self.size)} {self.name}".rstrip()


NO_UNIT = Unit()


def byte_unit(most: float) -> Unit:
    """Returns the largest binary unit that is not larger than `most` bytes."""
    power = 0
    while power + 1 < len(BYTE_UNITS) and most >= 1024 ** (power + 1):
        power += 1
    return Unit(BYTE_UNITS[power], 1024.0**power)


def time_unit(most_seconds: float) -> Unit:
    """Returns milliseconds for less than a second, else seconds. Values are in seconds."""
    return Unit("ms", 1e-3) if most_seconds < 1.0 else Unit("s")


def number(value: float) -> str:
    """Returns a value with four significant digits and thousands separators."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 12:
        return f"{value:.3e}"
    text = f"{value:,.{max(3 - magnitude, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """Returns a time as "2 d 3 h", "3 h 04 min", "4 min 05 s" or "5.1 s"."""
    whole = round(seconds)
    if seconds < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole // 60 % 60:02d} min"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


class Scale(NamedTuple):
    """The range of an axis. A logarithmic one needs low > 0."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def around(
        cls, values: Sequence[float], *, may_be_log: bool = True, from_zero: bool = False
    ) -> Scale:
        """Returns a range that holds all values with a margin.

        It is logarithmic if all values are above zero and the largest is over 50 times the
        smallest.
        from_zero: the axis starts at 0, unless a value is below it.
        """
        low, high = min(values, default=0.0), max(values, default=1.0)
        if may_be_log and not from_zero and low > 0.0 and high > 50.0 * low:
            return cls(low * 0.9, high * 1.1, is_log=True)
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        if from_zero and low >= 0.0:
            return cls(0.0, high + margin if high > 0.0 else 1.0)
        return cls(low - margin, high + margin)

    def place(self, value: float) -> float:
        """Returns where the value lies: 0 at the low end, 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Returns from two to seven round values within the range."""
        if self.is_log:
            return self._log_ticks()
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [count * step for count in range(first, last + 1)]

    def _log_ticks(self) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        stride = max(1, len(decades) // 5)
        found = [10.0**power for power in decades[::stride] if self.low <= 10.0**power <= self.high]
        return found if len(found) > 1 else [self.low / 0.9, self.high / 1.1]
