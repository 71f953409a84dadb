"""Amounts of memory as texts, such as 80GiB. Standard library only."""

from __future__ import annotations

import re

from megatron_lite.config.json_text import shown

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})")


def parse_bytes(flag: str, text: str, *, least: int = 0) -> int:
    """Returns the bytes of "40GiB", "80GB", "512 MiB" or "1073741824".

    flag: the option that has the amount, for the message. least: the smallest amount.
    Raises ValueError for any other text.
    """
    found = AMOUNT.fullmatch(text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(
            f"{flag} {shown(repr(text))}: give a number of bytes with a unit, such as 40GiB or 80GB"
        )
    num_bytes = round(float(found[1]) * UNITS[found[2].upper()])
    if num_bytes < least:
        raise ValueError(f"{flag} {shown(repr(text))} must be at least {least} bytes")
    return num_bytes
