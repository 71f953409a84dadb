"""The memory that a plan may take: that of the card, less a reserve. Standard library only.

The prediction counts what a run allocates through torch. The reserve is for what it does not see:
the context of CUDA and the libraries' workspaces, the buffers of NCCL, and memory that torch's
allocator cannot use because it lies in pieces.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.json_text import shown

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
# Assumptions, stated in docs/planning.md. 1 GiB for the context, cuBLAS and NCCL; 3 % of the card
# for pieces.
RESERVE_BYTES, RESERVE_SHARE = 2**30, 0.03


class Budget(NamedTuple):
    """The memory of a card and the part of it that stays free."""

    memory_bytes: int
    reserve_bytes: int

    @property
    def plan_bytes(self) -> int:
        """The bytes that a plan may take."""
        return self.memory_bytes - self.reserve_bytes


def default_reserve(memory_bytes: int) -> int:
    """Returns the reserve of a card."""
    return RESERVE_BYTES + round(RESERVE_SHARE * memory_bytes)


def parse_bytes(flag: str, text: str) -> int:
    """Returns the bytes of "40GiB", "80GB", "512MiB" or "1073741824".

    Raises InputError, which names the flag, for any other text.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]{0,3})", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise InputError(
            f"{flag} {shown(repr(text))}: give a number of bytes with a unit, such as 40GiB or 80GB"
        )
    return round(float(match[1]) * UNITS[match[2].upper()])
