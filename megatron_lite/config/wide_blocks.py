"""The blocks in which 16-bit matrix products are computed in float32, and the bytes they take.

parallel/wide_products.py computes them, and description/wide_workspace.py predicts their memory.
Standard library only.
"""

from __future__ import annotations

WIDE_BYTES = 4
# The elements of an operand that are cast at a time, and the fewest and the most of its rows; of
# the right operand: columns. In larger blocks a product was no faster.
ELEMENTS, FEWEST, MOST = 2**19, 64, 512
# MKL sums a product of one to three rows in another order. With at least so many, the bits of a row
# do not depend on the other rows, so chunks of the loss have the bits of the whole.
LEAST_ROWS = 8


def block(k: int) -> int:
    """Returns how many rows of [.., k] are cast at a time, and how many columns of [k, ..]."""
    return min(MOST, max(FEWEST, ELEMENTS // max(1, k)))


def even_rows(m: int, k: int) -> int:
    """Returns how many rows of [m, k] are cast at a time: all blocks have about equally many."""
    blocks = -(-m // block(k))
    return -(-m // blocks) if blocks else 0


def wide_bytes(m: int, n: int, k: int, *, bias: bool = False) -> tuple[int, ...]:
    """Returns the bytes that [m, k] x [k, n] takes besides its result.

    They are those of a block of the left operand, of the right one, of their product, and of the
    bias that is added to it.
    """
    rows, columns = max(LEAST_ROWS, even_rows(m, k)), min(n, block(k))
    elements = rows * k, columns * k, rows * columns, columns * bias
    return tuple(WIDE_BYTES * number for number in elements)
