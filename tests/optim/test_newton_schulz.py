"""Newton-Schulz iteration against the singular value decomposition, and its coefficients by what
they do to singular values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.optim.muon_update import STEPS, orthogonalize

SHAPES = [(7, 7), (5, 9), (9, 5), (12, 1)]


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float64
    )


def by_svd(value: Tensor, kind: str, num_steps: int) -> Tensor:
    """The polynomials applied to singular values: a s + b s^3 + c s^5, step by step."""
    left, singular, right = torch.linalg.svd(
        value / value.square().sum().sqrt(), full_matrices=False
    )
    for a, b, c in STEPS[kind](num_steps):
        singular = a * singular + b * singular**3 + c * singular**5
    return left @ singular.diag() @ right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [
        ("simple", 1),
        ("simple", 5),
        ("quintic", 5),
        ("quintic", 7),
        ("polar_express", 3),
        ("polar_express", 10),
    ],
)
def test_every_singular_value_goes_through_the_polynomials(
    shape: tuple[int, int], kind: str, num_steps: int
) -> None:
    """Float64; a step may enlarge a rounding error by its slope, at most 8.3."""
    value = matrix(*shape)
    found = orthogonalize(value, STEPS[kind](num_steps))
    torch.testing.assert_close(found, by_svd(value, kind, num_steps), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "num_steps", "least", "most"),
    [
        ("simple", 5, 0.68, 1.14),
        ("quintic", 5, 0.977, 1.032),
        ("quintic", 10, 0.977, 1.032),
        ("polar_express", 5, 0.87, 1.13),
        ("polar_express", 8, 1.0 - 1e-12, 1.0 + 1e-12),
        ("polar_express", 30, 1.0 - 1e-12, 1.0 + 1e-12),
    ],
)
def test_singular_values_from_a_hundredth_on_come_near_1(
    kind: str, num_steps: int, least: float, most: float
) -> None:
    """The published figures: 0.7 to 1.2 for the simple coefficients, and a small band or
    convergence for the others."""
    singular = torch.logspace(-2, 0, 20001, dtype=torch.float64)
    for a, b, c in STEPS[kind](num_steps):
        singular = a * singular + b * singular**3 + c * singular**5
    assert singular.min() >= least and singular.max() <= most


def test_more_steps_than_coefficients_start_again_or_repeat_the_last() -> None:
    """As in NVIDIA's Emerging-Optimizers, which Megatron calls."""
    assert STEPS["quintic"](7)[5:] == STEPS["quintic"](2)
    assert STEPS["polar_express"](10)[7:] == ((1.8750, -1.2500, 0.3750),) * 3
    assert all(len(steps(number)) == number for steps in STEPS.values() for number in (1, 5, 99))


def test_a_matrix_of_zeros_stays_one_and_a_tiny_one_is_scaled_up() -> None:
    assert not orthogonalize(torch.zeros(3, 5), STEPS["quintic"](5)).any()
    value = matrix(3, 5)
    torch.testing.assert_close(
        orthogonalize(value * 1e-6, STEPS["quintic"](5)), orthogonalize(value, STEPS["quintic"](5))
    )
