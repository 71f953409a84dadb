"""The memory that a plan may take: that of the card, less a reserve. Standard library only.

The prediction counts what a run allocates through torch. The reserve is for what it does not see:
the context of CUDA and the libraries' workspaces, the buffers of NCCL, and memory that torch's
allocator cannot use because it lies in pieces.
"""

from __future__ import annotations

from typing import NamedTuple

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
