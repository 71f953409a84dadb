"""Parses the text of `--window-size`, `--window-attn-skip-freq` and `--no-rope-freq`.

    128,0 or (128,0)                  two numbers
    4                                 a frequency
    ([0]*3+[1])*2                     a list, one number for each layer

Megatron evaluates a list as Python, which would run any code in it. This parser accepts only
numbers, lists, parentheses, + and *. It refuses a text that is too long or nested too deeply, and a
text that stands for too long a list. config/layer_pattern.py defines what the values mean.
"""

from __future__ import annotations

import re

from megatron_lite.config.json_text import shown

Pattern = int | tuple[int, ...]

LONGEST_TEXT = 10_000  # characters
LONGEST_LIST = 10_000  # layers; the deepest models have a few hundred
DEEPEST = 50  # brackets inside brackets
LARGEST_NUMBER = 2**31


def parse_window(text: str) -> tuple[int, int]:
    """Returns (left, right) from "128,0" or "(128,0)".

    Raises ValueError if the text is no pair of whole numbers.
    """
    match = re.fullmatch(r"\(?\s*(-?\d{1,10})\s*,\s*(-?\d{1,10})\s*\)?", text.strip())
    if match is None:
        raise ValueError(
            f"--window-size {shown(repr(text))}: give two numbers, the tokens before and after a "
            "query that it reads, such as 128,0"
        )
    return int(match[1]), int(match[2])


def parse_pattern(flag: str, text: str) -> Pattern:
    """Returns a frequency from "4", or a tuple with one number for each layer from "([0]*3+[1])*2".

    Raises ValueError if the text is neither.
    """
    if len(text) > LONGEST_TEXT:
        raise ValueError(
            f"{flag} has {len(text)} characters, more than the {LONGEST_TEXT} that any list needs: "
            "write repeated parts as [0]*3"
        )
    try:
        value = _PatternParser(text).value()
    except ValueError as fault:
        raise ValueError(
            f"{flag} {shown(repr(text))}: {fault}; give a whole number, or a list with one number "
            "for each layer, such as ([0]*3+[1])*2"
        ) from None
    return value if isinstance(value, int) else tuple(value)


class _PatternParser:
    """A recursive-descent parser of the grammar

        sum      product {+ product}
        product  part {* part}
        part     a number, (sum), or [sum, sum, ..]

    Every intermediate value is bounded, so that a short text such as [0]*9999*9999 cannot fill the
    memory.
    """

    def __init__(self, text: str) -> None:
        self._tokens = re.findall(r"\d+|\S", text)
        self._place, self._depth = 0, 0

    def value(self) -> int | list[int]:
        value = self._sum()
        if self._place < len(self._tokens):
            raise ValueError(
                f"{self._tokens[self._place]!r} is not expected after "
                f"{''.join(self._tokens[: self._place])[-20:]!r}"
            )
        return value

    def _sum(self) -> int | list[int]:
        total = self._product()
        while self._take("+"):
            other = self._product()
            if isinstance(total, int) and isinstance(other, int):
                total = _bounded(total + other)
            elif isinstance(total, list) and isinstance(other, list):
                total = total + other
                _check_length(len(total))
            else:
                raise ValueError("+ adds two lists or two numbers, not one of each")
        return total

    def _product(self) -> int | list[int]:
        product = self._part()
        while self._take("*"):
            other = self._part()
            if isinstance(product, int) and isinstance(other, int):
                product = _bounded(product * other)
            elif isinstance(product, int) and isinstance(other, list):
                product = _repeated(other, product)
            elif isinstance(product, list) and isinstance(other, int):
                product = _repeated(product, other)
            else:
                raise ValueError(
                    "* repeats a list a number of times, and cannot multiply two lists"
                )
        return product

    def _part(self) -> int | list[int]:
        token = self._next()
        if token.isascii() and token.isdigit():
            if len(token) > 10:
                raise ValueError(f"{shown(token)} is too large")
            return _bounded(int(token))
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} brackets inside each other")
        if token == "(":
            value = self._sum()
            self._expect(")")
        elif token == "[":
            value = self._list()
        else:
            raise ValueError(f"{token!r} is no number, list or bracket")
        self._depth -= 1
        return value

    def _list(self) -> list[int]:
        numbers: list[int] = []
        while not self._take("]"):
            number = self._sum()
            if not isinstance(number, int):
                raise ValueError("a list inside a list: join lists with +")
            numbers.append(number)
            if not self._take(","):
                self._expect("]")
                break
        return numbers

    def _take(self, token: str) -> bool:
        if self._place < len(self._tokens) and self._tokens[self._place] == token:
            self._place += 1
            return True
        return False

    def _next(self) -> str:
        if self._place == len(self._tokens):
            raise ValueError("it ends too early")
        self._place += 1
        return self._tokens[self._place - 1]

    def _expect(self, token: str) -> None:
        if (found := self._next()) != token:
            raise ValueError(f"{found!r} stands where {token!r} is expected")


def _repeated(numbers: list[int], times: int) -> list[int]:
    _check_length(len(numbers) * times)
    return numbers * times


def _check_length(length: int) -> None:
    if length > LONGEST_LIST:
        raise ValueError(f"a list of {length} numbers, more than {LONGEST_LIST}")


def _bounded(number: int) -> int:
    if number > LARGEST_NUMBER:
        raise ValueError(f"{number} is too large")
    return number
