"""Mistakes in the use of NVIDIA apex's kernels, each put back: a named test must fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.model import norm
from megatron_lite.optim import adam_update
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel import weight_gradient
from megatron_lite.tensor_parallel import cross_entropy, linear
from tests.model import test_apex_norm
from tests.optim import test_adam_update
from tests.parallel import test_weight_gradient
from tests.support import apex
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


def the_kernel_writes_after_the_hook(patch: Patch) -> None:
    """When all buckets have been sent: right without overlap."""
    waiting: list[Callable[[], None]] = []

    @replaces("_add", weight_gradient)
    def later(add: Any, kernel: Any, total: Tensor, parameter: Any, *operands: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = total.zero_()
        waiting.append(partial(add, kernel, total, parameter, *operands))

    @replaces("reduce_", GradBuffer)
    def reduced(reduce_: Any, self: GradBuffer) -> None:
        with torch.no_grad():
            while waiting:
                waiting.pop(0)()
        reduce_(self)

    for part in (later, reduced):
        part(patch)


@replaces("weight_gradient", linear)
def the_gradient_is_added_and_returned_too(
    real: Any, add: Any, hidden_states: Tensor, grad_output: Tensor
) -> Tensor | None:
    real(add, hidden_states, grad_output)
    return real(None, hidden_states, grad_output)


@replaces("_add", weight_gradient)
def each_micro_batch_starts_from_zero(add: Any, kernel: Any, total: Tensor, *rest: Any) -> None:
    add(kernel, total.zero_(), *rest)


def the_loss_in_chunks_adds_the_first_rows_every_time(patch: Patch) -> None:
    whole: list[Tensor] = []

    @replaces("weight_gradient", cross_entropy)
    def first(real: Any, add: Any, rows: Tensor, logits: Tensor) -> Tensor | None:
        whole.append(rows)
        return real(add, whole[0][: len(rows)], logits)

    first(patch)


@replaces("_check_inf_per_device", adam_update._Skipping)
def fused_adam_is_not_told_to_skip(_, self, optimizer):
    return {self._skipped.device: torch.zeros_like(self._skipped)}


@replaces("apex", norm.IMPLEMENTATIONS)
def weight_and_bias_of_a_norm_change_places(real: Any, config: Any, context: Any) -> Any:
    function = real(config, context)
    return lambda x, *vectors: function(x, *reversed(vectors))


OVERLAP = (
    test_weight_gradient.test_overlap_sends_what_the_kernel_has_written,
    dict(name="gpt2", policy="*:none"),
)
SUMS = (
    test_weight_gradient.test_gradients_are_those_without_the_kernel_but_for_one_rounding,
    dict(tp_size=1, sequence_parallel=False, dtype=torch.bfloat16, name="gpt2"),
)
SKIPS = (
    test_adam_update.test_skipped_steps_change_nothing_and_do_not_count,
    dict(impl="apex", fault=float("inf"), bad_steps=(1, 2)),
)
MUTANTS = [
    Mutant(the_kernel_writes_after_the_hook, *OVERLAP),
    Mutant(the_gradient_is_added_and_returned_too, *SUMS),
    Mutant(each_micro_batch_starts_from_zero, *SUMS),
    Mutant(
        the_loss_in_chunks_adds_the_first_rows_every_time,
        test_weight_gradient.test_the_loss_in_chunks_adds_each_chunk_by_the_kernel,
        dict(name="gpt2", dtype=torch.float32),
    ),
    Mutant(fused_adam_is_not_told_to_skip, *SKIPS),
    Mutant(
        weight_and_bias_of_a_norm_change_places,
        test_apex_norm.test_losses_and_gradients_are_torchs,
        dict(tp_size=1, sequence_parallel=False),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, calls=apex.install(monkeypatch), tmp_path=tmp_path)
