"""How many rows of a matrix are held in float32 at a time.

The kernels and the predictions of their memory both read it. Standard library only.
"""

from __future__ import annotations


def rows_at_a_time(width: int, device: str) -> int:
    """Returns how many rows are computed in float32 at a time by the loss and by weight gradients.

    The float32 copy of these rows fits in a CPU core's cache (1 MiB). On a GPU it takes at most
    256 MiB.
    """
    return max(1, (2**20 if device == "cpu" else 2**28) // (4 * max(1, width)))


def product_rows(width: int, device: str) -> int:
    """Returns how many rows of a 16-bit weight's gradient are computed at a time.

    They take 8 MiB on a CPU: larger tensors come from the kernel in each step, filled with zeros.
    On a GPU they take 256 MiB, so that only the products of large vocabularies have parts.
    """
    return max(1, (2**23 if device == "cpu" else 2**28) // (2 * max(1, width)))
