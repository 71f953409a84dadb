"""Mistakes in the use of NVIDIA apex's kernels, each put back: a named test must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.description import norm_statistics, query_key_norms, transformer_layer
from megatron_lite.model import norm
from megatron_lite.model.attention import SelfAttention
from megatron_lite.optim import adam_update
from megatron_lite.optim.adam_update import ApexAdamW
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel import weight_gradient
from megatron_lite.tensor_parallel import cross_entropy, linear
from megatron_lite.training import apex_kernels as kernels
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
def the_operands_are_in_the_wrong_order(add, kernel, total, parameter, x, grad):
    return add(kernel, total, parameter, grad, x)


@replaces("_add", weight_gradient)
def each_micro_batch_starts_from_zero(add: Any, kernel: Any, total: Tensor, *rest: Any) -> None:
    add(kernel, total.zero_(), *rest)


@replaces("contiguous", Tensor)
def the_kernel_is_given_views(_, self):
    return self


def the_loss_in_chunks_adds_the_first_rows_every_time(patch: Patch) -> None:
    whole: list[Tensor] = []

    @replaces("weight_gradient", cross_entropy)
    def first(real: Any, add: Any, rows: Tensor, logits: Tensor) -> Tensor | None:
        whole.append(rows)
        return real(add, whole[0][: len(rows)], logits)

    first(patch)


@replaces("_compiled_weights", kernels)
def compiled_weights_are_given_the_kernel(_, model):
    return set()


@replaces("_matmul_weights", kernels)
def a_tied_weight_counts_as_one_of_a_linear_layer(real, model):
    """The log would say that the kernel sums all of its gradient."""
    return [(name, weight, False) for name, weight, _ in real(model)]


@replaces("_check_inf_per_device", adam_update._Skipping)
def fused_adam_is_not_told_to_skip(_, self, optimizer):
    return {self._skipped.device: torch.zeros_like(self._skipped)}


@replaces("set_num_updates", ApexAdamW)
def a_skipped_step_is_taken_back_from_what_was_loaded(_: Any, self: ApexAdamW, number: int) -> None:
    for adam in self._adams:
        adam.param_groups[0]["step"] = torch.full((1,), number, dtype=torch.int32)


@replaces("norm_statistics", norm_statistics, query_key_norms)
def statistics_are_priced_in_the_rows_dtype(real, name, model, sizes, rows):
    return real(name, replace(model, norm_impl="torch"), sizes, rows)


@replaces("attention_operations", transformer_layer)
def contiguous_copies_of_query_and_key_are_not_priced(real, model, sizes, layer):
    return real(replace(model, norm_impl="torch"), sizes, layer)


@replaces("_split_heads", SelfAttention)
def value_holds_the_whole_of_qkv(real: Any, self: SelfAttention, qkv: Tensor) -> Any:
    config, self.config = self.config, replace(self.config, norm_impl="torch")
    try:
        return real(self, qkv)
    finally:
        self.config = config


@replaces("apex", norm.IMPLEMENTATIONS)
def weight_and_bias_of_a_norm_change_places(real: Any, config: Any, device_type: str) -> Any:
    function = real(config, device_type)
    return lambda x, weight, bias, epsilon: (
        function(x, weight, bias, epsilon) if bias is None else function(x, bias, weight, epsilon)
    )


OVERLAP = (
    test_weight_gradient.test_overlap_sends_what_the_kernel_has_written,
    dict(name="gpt2", policy="*:none"),
)
SUMS = (
    test_weight_gradient.test_gradients_are_those_without_the_kernel_but_for_one_rounding,
    dict(tp_size=1, sequence_parallel=False, dtype=torch.bfloat16, name="gpt2"),
)
BY_HAND = test_weight_gradient.test_the_sum_is_that_of_unrounded_products
SKIPS = (
    test_adam_update.test_skipped_steps_change_nothing_and_do_not_count,
    dict(impl="apex", fault=float("inf"), bad_steps=(1, 2)),
)
LOADS = (
    test_adam_update.test_states_load_across_implementations,
    dict(writer="torch", reader="apex", last_is_skipped=True),
)
BYTES = (
    test_apex_norm.test_predicted_bytes_are_the_measured_ones_and_all_that_lives,
    dict(tp_size=1, sequence_parallel=False, name="neox"),
)
MUTANTS = [
    Mutant(the_kernel_writes_after_the_hook, *OVERLAP),
    Mutant(
        the_kernel_writes_after_the_hook,
        test_weight_gradient.test_hooks_that_wait_for_a_gradient_run_once_and_see_all_of_it,
    ),
    Mutant(the_gradient_is_added_and_returned_too, *SUMS),
    Mutant(the_operands_are_in_the_wrong_order, BY_HAND, error="is out of bounds"),
    Mutant(each_micro_batch_starts_from_zero, *SUMS),
    Mutant(the_kernel_is_given_views, BY_HAND, error="not contiguous"),
    Mutant(
        the_loss_in_chunks_adds_the_first_rows_every_time,
        test_weight_gradient.test_the_loss_in_chunks_adds_each_chunk_by_the_kernel,
        dict(name="gpt2", dtype=torch.float32),
    ),
    Mutant(
        compiled_weights_are_given_the_kernel,
        test_weight_gradient.test_under_the_compiler_only_what_it_does_not_compile_uses_the_kernel,
    ),
    Mutant(
        a_tied_weight_counts_as_one_of_a_linear_layer,
        test_weight_gradient.test_a_run_uses_the_kernel_where_it_may_and_says_so,
        dict(
            training=dict(bf16=True),
            model={},
            num_calls=9,
            expected="the layer's backward for the lookup",
        ),
    ),
    Mutant(fused_adam_is_not_told_to_skip, *SKIPS),
    Mutant(a_skipped_step_is_taken_back_from_what_was_loaded, *LOADS),
    Mutant(statistics_are_priced_in_the_rows_dtype, *BYTES),
    Mutant(contiguous_copies_of_query_and_key_are_not_priced, *BYTES),
    Mutant(value_holds_the_whole_of_qkv, *BYTES),
    Mutant(
        weight_and_bias_of_a_norm_change_places,
        test_apex_norm.test_losses_and_gradients_are_torchs,
        dict(tp_size=1, sequence_parallel=False),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, calls=apex.install(monkeypatch), tmp_path=tmp_path)
