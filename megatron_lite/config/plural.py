"""A number with its noun. Standard library only."""

from __future__ import annotations


def plural(number: int, noun: str, several: str = "") -> str:
    """Returns a text such as "1 rank" or "2 ranks". several: the plural, if it is not with an s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"
