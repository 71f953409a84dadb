"""The large float32 products that oneDNN may compute, and the parts of a weight's gradient.

parallel/products.py computes them, and description/weight_gradients.py predicts their memory.
Standard library only.
"""

from __future__ import annotations

from typing import NamedTuple

# Below, a call of oneDNN costs about as much as it saves.
LEAST_MULTIPLICATIONS = 2**26
# The parts of a weight's gradient that oneDNN computes at a time. Larger ones are no faster, since
# these stay in the cache.
TOKENS, ROWS, COLUMNS = 512, 512, 256
ELEMENT_BYTES = 4


def is_large(m: int, n: int, k: int) -> bool:
    """Tells whether the product [m, k] x [k, n] gains from oneDNN."""
    return m * n * k >= LEAST_MULTIPLICATIONS


class GradientParts(NamedTuple):
    """The bytes that oneDNN's gradient of a weight takes at a time.

    transposed: the copy of the narrower operand, transposed.
    copied: the copy of a part of the wider operand, if it has more than one part.
    product: the product of the two, before it is added to the gradient.
    """

    transposed: int
    copied: int
    product: int


def gradient_parts(tokens: int, outputs: int, inputs: int) -> GradientParts:
    """Returns the most bytes that dy^T x takes at a time. dy: [tokens, outputs]. x: [.., inputs].

    oneDNN's own scratchpad is left out.
    """
    narrow, wide = sorted((outputs, inputs))
    rows, columns = min(tokens, TOKENS), min(wide, COLUMNS)
    return GradientParts(
        ELEMENT_BYTES * rows * narrow,
        ELEMENT_BYTES * rows * columns if wide > columns else 0,
        ELEMENT_BYTES * min(narrow, ROWS) * columns,
    )
