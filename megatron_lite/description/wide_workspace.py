"""The memory of 16-bit matrix products that a CPU computes in float32 (parallel/wide_products.py).

Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.wide_blocks import wide_bytes
from megatron_lite.description.operations import Course, course
from megatron_lite.description.sizes import Sizes


def inside_product(sizes: Sizes, m: int, n: int, k: int, *, bias: bool = False) -> Course:
    """Returns the course inside [m, k] x [k, n], whose result exists already.

    Nothing happens if the product is not computed in float32.
    """
    if not (sizes.widens and sizes.inside_operators):
        return Course()
    parts = wide_bytes(m, n, k, bias=bias)
    return course(*parts, -sum(parts))
