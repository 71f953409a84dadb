"""Mistakes in counting kept bytes, in reading choices and in the chunked loss, each put back: a
named test must fail."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from megatron_lite.memory.measure import step_meter
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.predict import pipeline_memory as pipeline
from megatron_lite.tensor_parallel import cross_entropy
from tests.memory import test_kept_bytes
from tests.pipeline import test_runs
from tests.support.mutants import Mutant, each_is_seen, replaces
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


@replaces("is_allocating_on_host", step_meter)
def host_memory_is_memory_of_the_device(_):
    return False


@replaces("enough_microbatches", pipeline)
def the_windows_repeat_with_the_schedule(_, config, rank, most=None):
    return 2 * 3


MUTANTS = [
    Mutant(
        the_windows_repeat_with_the_schedule,
        test_runs.test_a_rank_never_holds_more_than_with_the_micro_batches_that_are_priced,
        dict(num_kept=8, num_chunks=3),
    ),
    Mutant(
        host_memory_is_memory_of_the_device,
        test_dry_run.test_beside_a_gpu_host_memory_is_no_part_of_the_peak,
    ),
    Mutant(
        chunks_add_up_in_bf16,
        test_cross_entropy.test_bf16_chunks_add_less_than_one_rounding_to_the_error_of_the_weights_gradient,
        dict(seq_length=64, vocab_size=512, spread=0.05),
    ),
    Mutant(
        only_hooks_count, test_kept_bytes.test_what_a_checkpoint_holds_outside_of_the_hooks_counts
    ),
]


test_is_seen = each_is_seen(MUTANTS)
