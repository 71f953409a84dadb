"""Mistakes of the loss in one pass, each put back: a named test must fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.tensor_parallel import cross_entropy
from megatron_lite.training.step import MicroBatchLoss
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.training import test_loss_in_one_pass


@replaces("gradient", MicroBatchLoss)
def the_factor_of_the_loss_is_forgotten(
    gradient: Any, self: MicroBatchLoss, labels: Tensor, mask: Tensor | None, number: int
) -> Any:
    found = gradient(self, labels, mask, number)
    return None if found is None else lambda: torch.full(labels.shape, 1.0 / labels.numel())


@replaces("gradient", MicroBatchLoss)
def the_loss_mask_is_forgotten(
    gradient: Any, self: MicroBatchLoss, labels: Tensor, mask: Tensor | None, number: int
) -> Any:
    return gradient(self, labels, torch.ones_like(mask) if mask is not None else None, number)


@replaces("own_sum", cross_entropy)
def a_forward_without_backward_adds_gradients(own_sum: Any, weight: Tensor) -> Any:
    torch.set_grad_enabled(True)
    return own_sum(weight)


CASE = dict(layout="one", model=test_loss_in_one_pass.TIED, policy="*:none", chunk_size=5)
MUTANTS = [
    Mutant(
        the_factor_of_the_loss_is_forgotten,
        test_loss_in_one_pass.test_one_pass_has_the_bits_of_two,
        dict(CASE, mask=""),
    ),
    Mutant(
        the_loss_mask_is_forgotten,
        test_loss_in_one_pass.test_one_pass_has_the_bits_of_two,
        dict(CASE, mask="--eod-mask-loss"),
    ),
    Mutant(
        a_forward_without_backward_adds_gradients,
        test_loss_in_one_pass.test_without_a_backward_to_come_no_gradient_is_added,
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
