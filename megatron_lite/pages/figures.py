"""Numbers as short texts, and round numbers for the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class MeasureUnit(NamedTuple):
    """A unit of measurement. Values are divided by `size` before they are shown."""

    name: str = ""
    size: float = 1.0

    def shown(self, value: float | None) -> str:
        """Returns a value, before the division, with its unit."""
        if value is None:
            return "none"
        return f"{number(value / self.size)} {self.name}".rstrip()


NO_UNIT = MeasureUnit()
MOST_TICKS = 7


def byte_unit(most: float) -> MeasureUnit:
    """Returns the largest binary unit that is not larger than `most` bytes."""
    power = 0
    while power + 1 < len(BYTE_UNITS) and most >= 1024 ** (power + 1):
        power += 1
    return MeasureUnit(BYTE_UNITS[power], 1024.0**power)


def time_unit(most_seconds: float) -> MeasureUnit:
    """Returns milliseconds for less than a second, else seconds. Values are in seconds."""
    return MeasureUnit("ms", 1e-3) if most_seconds < 1.0 else MeasureUnit("s")


def number(value: float, digits: int = 4) -> str:
    """Returns a value with so many significant digits and thousands separators."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 12:
        return f"{value:.{digits - 1}e}"
    text = f"{value:,.{max(digits - 1 - magnitude, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def short(value: float, digits: int = 4) -> str:
    """Returns a value for the tick of an axis: from a million on with M, G or T.

    Values beyond these, and those below 1e-4, have a power of ten, such as "1e-5".
    """
    if value and math.isfinite(value) and not 1e-4 <= abs(value) < 1e15:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(power)}"
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{number(value / size, digits)}{suffix}"
    return number(value, digits)


def count(value: float) -> str:
    """Returns a number of things: from ten million on in words, such as "84.12 billion"."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= max(size, 1e7):
            return f"{number(value / size)} {word}"
    return f"{value:,.0f}"


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


class AxisRange(NamedTuple):
    """The range of an axis. A logarithmic one needs low > 0."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def around(
        cls, values: Sequence[float], *, may_be_log: bool = True, from_zero: bool = False
    ) -> AxisRange:
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
        found = self._log_ticks() if self.is_log else []
        if len(found) >= 2:
            return found
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [count * step for count in range(first, last + 1)]

    def labels(self) -> list[tuple[float, str]]:
        """Returns the ticks with their texts, which differ from each other."""
        values, digits = self.ticks(), 4
        while len({short(value, digits) for value in values}) < len(values) and digits < 12:
            digits += 1
        return [(value, short(value, digits)) for value in values]

    def _log_ticks(self) -> list[float]:
        """Returns at most seven ticks: powers of ten, and values between them if there is room."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in (range(1, 10), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
            for stride in (1,) if len(factors) > 1 else (1, 2, 5, 10, 50):
                values = [
                    factor * 10.0**power
                    for power in range(first, last + 1)
                    for factor in factors
                    if power % stride == 0
                ]
                found = [value for value in values if self.low <= value <= self.high]
                if len(found) <= MOST_TICKS:
                    return found
        return []
