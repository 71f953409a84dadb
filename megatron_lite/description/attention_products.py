"""The blocks and the memory of causal attention by products (model/causal_products.py).

Standard library only.
"""

from __future__ import annotations

from typing import NamedTuple

WIDE_BYTES = 4
# The queries of a block, and the scores of a tile.
QUERY_ROWS = 128
TILE_ELEMENTS = 2**19
# The lengths that gain. The kernel for shorter sequences computes one block, and for longer ones it
# skips most of the later keys.
SHORTEST, LONGEST = 128, 2048


def attends_by_products(seq_length: int, element_bytes: int, device: str) -> bool:
    """Returns whether causal attention in 16 bits gains from products on such a processor."""
    return device == "cpu" and element_bytes == 2 and SHORTEST <= seq_length <= LONGEST


def query_rows(seq_length: int) -> list[slice]:
    """Returns the blocks of queries, in their order."""
    return [
        slice(start, min(start + QUERY_ROWS, seq_length))
        for start in range(0, seq_length, QUERY_ROWS)
    ]


class PartShape(NamedTuple):
    """The shape of the heads that are computed at a time.

    groups: the number of their query groups. each: the heads of a group. longest: the queries of
    the longest block. seq_length: of the whole sequence. head_dim: the channels of a head.
    """

    groups: int
    each: int
    longest: int
    seq_length: int
    head_dim: int

    @classmethod
    def of(cls, seq_length: int, heads: int, groups: int, head_dim: int) -> PartShape:
        """Returns the shape for a rank's heads and groups. One group at least is computed."""
        each, longest = heads // groups, min(QUERY_ROWS, seq_length)
        most = TILE_ELEMENTS // (each * longest * seq_length)
        return cls(max(1, min(groups, most)), each, longest, seq_length, head_dim)

    @property
    def tile(self) -> int:
        """The most scores of a block."""
        return self.groups * self.each * self.longest * self.seq_length

    @property
    def keys(self) -> int:
        """The elements of the part's keys."""
        return self.groups * self.seq_length * self.head_dim

    @property
    def rows(self) -> int:
        """The elements of the longest block of queries."""
        return self.groups * self.each * self.longest * self.head_dim

    @property
    def row_values(self) -> int:
        """The most rows of a tile."""
        return self.groups * self.each * self.longest

    def forward_bytes(self, element_bytes: int) -> int:
        """Returns the bytes that a forward takes besides its results.

        element_bytes: of the operands of products with weights.
        """
        mask = self.longest**2
        wide = self.tile + self.keys + self.rows + 2 * self.row_values + mask
        return WIDE_BYTES * wide + element_bytes * (self.tile + self.keys + self.rows)

    def backward_bytes(self, element_bytes: int) -> int:
        """Returns the bytes that a backward takes besides its results."""
        wide = self.tile + 4 * self.keys + self.rows
        more = WIDE_BYTES * wide + element_bytes * (self.keys + self.rows)
        return self.forward_bytes(element_bytes) + more
