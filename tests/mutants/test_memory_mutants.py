"""Mistakes in counting kept bytes, in reading choices and in the chunked loss, each put back: a
named test must fail."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megatron_lite.config import model as config_model
from megatron_lite.description import norm_statistics as norms
from megatron_lite.memory.explain import difference
from megatron_lite.memory.measure import step_meter
from megatron_lite.memory.measure.kept_bytes import KeptBytesMeter
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.tensor_parallel import cross_entropy
from tests import test_unknown_choices
from tests.memory import test_difference, test_kept_bytes, test_live_storages
from tests.support.mutants import Mutant, assert_seen, replaces
from tests.tensor_parallel import test_cross_entropy
from tests.training import test_dry_run

Patch = pytest.MonkeyPatch


@replaces("add_weight_product_", cross_entropy)
def chunks_add_up_in_bf16(
    add: Any, total: Tensor, rows: Tensor, grad_rows: Tensor, *, first: bool
) -> None:
    add(total, rows, grad_rows, first=first)
    total.copy_(total.bfloat16())


@replaces("bytes_beside", LiveStorages)
def only_hooks_count(_, self, known):
    return 0


@replaces("measure", KeptBytesMeter)
def outputs_always_count(measure, self, outputs=()):
    return measure(self)


@replaces("chosen", norms, config_model)
def an_unknown_norm_passes_for_the_last_one(_, what, name, table):
    return table.get(name, [*table.values()][-1])


@replaces("layer", difference.Saved)
def tensors_of_any_layer_are_paired_at_once(_, self):
    return None


@replaces("is_allocating_on_host", step_meter)
def host_memory_is_memory_of_the_device(_):
    return False


@replaces("_read", LiveStorages)
def a_resized_storage_keeps_its_size(_, self, known):
    return None


MUTANTS: list[Any] = [
    Mutant(
        host_memory_is_memory_of_the_device,
        test_dry_run.test_beside_a_gpu_host_memory_is_no_part_of_the_peak,
    ),
    Mutant(
        a_resized_storage_keeps_its_size,
        test_live_storages.test_a_resize_outside_of_operators_counts_once_it_is_read_again,
    ),
    Mutant(
        chunks_add_up_in_bf16,
        test_cross_entropy.test_bf16_chunks_add_less_than_one_rounding_to_the_error_of_the_weights_gradient,
        dict(seq_length=64, vocab_size=512, spread=0.05),
    ),
    Mutant(
        only_hooks_count, test_kept_bytes.test_what_a_checkpoint_holds_outside_of_the_hooks_counts
    ),
    Mutant(
        outputs_always_count,
        test_kept_bytes.test_an_output_that_the_caller_holds_counts_only_where_it_is_saved,
    ),
    Mutant(
        an_unknown_norm_passes_for_the_last_one,
        test_unknown_choices.test_a_new_choice_of_the_model_is_an_error_for_every_reader,
        dict(field="normalization", reader="its memory"),
    ),
    Mutant(
        tensors_of_any_layer_are_paired_at_once,
        test_difference.test_one_more_saved_tensor_is_named_with_layer_module_shape_and_dtype,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
