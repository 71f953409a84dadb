"""The orthogonal matrix nearest to a given one, without an SVD, by Newton-Schulz iteration.

    X <- a X + b (X X^T) X + c (X X^T)^2 X        from X = M / |M|, the Frobenius norm

Each step maps every singular value s of X to a s + b s^3 + c s^5 and leaves the singular vectors as
they are. A few steps bring all singular values near 1 (within about 0.3), which Muon is content
with. The norm counts as EPSILON if it is less, so that a matrix of zeros stays one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-7


class Coefficients(NamedTuple):
    """a, b and c of one step."""

    a: float
    b: float
    c: float


# Keller Jordan, kellerjordan.github.io/posts/muon: the steepest polynomial at 0, in every step.
SIMPLE = (Coefficients(3.4445, -4.7750, 2.0315),)
# leloykun.github.io/ponder/muon-opt-coeffs: five steps to a narrow band of singular values.
QUINTIC = (
    Coefficients(4.0848, -6.8946, 2.9270),
    Coefficients(3.9505, -6.3029, 2.6377),
    Coefficients(3.7418, -5.5913, 2.3037),
    Coefficients(2.8769, -3.1427, 1.2046),
    Coefficients(2.8366, -3.0525, 1.2012),
)
# arXiv 2505.16932, with its safety factor of 1.01: the last step repeats.
POLAR_EXPRESS = (
    Coefficients(8.2051, -22.9019, 16.4607),
    Coefficients(4.0664, -2.8612, 0.5184),
    Coefficients(3.9096, -2.8234, 0.5250),
    Coefficients(3.2856, -2.4153, 0.4853),
    Coefficients(2.2779, -1.6198, 0.3985),
    Coefficients(1.8726, -1.2307, 0.3585),
    Coefficients(1.8564, -1.2132, 0.3568),
    Coefficients(1.8750, -1.2500, 0.3750),
)
# By the name of --muon-coefficient-type: the coefficients of the first so many steps.
STEPS: Mapping[str, Callable[[int], tuple[Coefficients, ...]]] = {
    "simple": lambda number: SIMPLE * number,
    "quintic": lambda number: (QUINTIC * number)[:number],
    "polar_express": lambda number: (POLAR_EXPRESS + POLAR_EXPRESS[-1:] * number)[:number],
}
# By the name of --muon-scale-mode: what an update of m rows and n columns is multiplied by.
SCALES: Mapping[str, Callable[[int, int], float]] = {
    "spectral": lambda m, n: math.sqrt(max(m, n)),
    "unit_rms_norm": lambda m, n: math.sqrt(m / n),
    "shape_scaling": lambda m, n: math.sqrt(max(1, m / n)),
}


def orthogonalize(matrix: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """Returns about the nearest orthogonal matrix: [m, n] -> [m, n], a new tensor of that dtype.

    The Gram matrix is that of the shorter side, l = min(m, n): a step costs 4 l m n + 2 l^3 FLOPs.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    iterate = matrix.T if is_tall else matrix
    iterate = iterate / iterate.norm().clamp(min=EPSILON)
    # With G = X X^T, [l, l], one step is a X + (b G + c G G) X.
    for a, b, c in steps:
        gram = torch.mm(iterate, iterate.T)
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        iterate = torch.addmm(iterate, polynomial, iterate, beta=a)
    return iterate.T if is_tall else iterate
