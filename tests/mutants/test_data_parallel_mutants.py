"""Mistakes in the layouts over data-parallel ranks, each put back: a named test must fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.optim import grad_buffer, layouts
from megatron_lite.parallel import fsdp as units
from tests.optim import test_layouts, test_zero1
from tests.parallel import test_fsdp
from tests.pipeline import test_pipeline
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.support.pipelines import Layout

Patch = pytest.MonkeyPatch


def gradients_are_freed_whoever_reads_them(patch: Patch) -> None:
    @replaces("FREE_TO_DROP", units)
    def many_users(_: int) -> int:
        return 100

    @replaces("_owns_storage_alone", units)
    def always(_: Any, tensor: Tensor) -> bool:
        return True

    for part in (many_users, always):
        part(patch)


@replaces("__init__", grad_buffer.Bucket)
def tied_gradients_are_not_added(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    self.tied = False


@replaces("_wait_before_use", layouts.Zero1)
def nobody_waits_for_weights(_, self, model):
    pass


@replaces("publish", layouts.Zero1)
def masters_are_not_rounded_into_the_weights(_: Any, self: layouts.Zero1) -> None:
    for weights in self._weights.values():
        layouts.start_all_gather_into_(weights.flat, weights.own, self.shard_group).wait()


SAME_BITS = test_layouts.test_zero1_and_overlap_change_no_bit
DP2 = dict(world_size=2, tp_size=1, layouts=("zero1, overlap",), dtype=torch.bfloat16, rule="adam")
WAITED = test_zero1.test_every_weight_is_waited_for_before_it_is_used
MUTANTS = [
    Mutant(
        tied_gradients_are_not_added,
        test_pipeline.test_data_parallel_layouts_train_a_pipeline_alike,
        dict(layout=Layout(pp=2, dp=2, num_chunks=2)),
    ),
    Mutant(nobody_waits_for_weights, WAITED, dict(name="gpt2", chunk_size=None)),
    Mutant(masters_are_not_rounded_into_the_weights, SAME_BITS, DP2),
    Mutant(
        gradients_are_freed_whoever_reads_them,
        test_fsdp.test_a_gradient_that_someone_else_can_read_is_not_freed,
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Any) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
