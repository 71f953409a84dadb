"""Mistakes in the layouts over data-parallel ranks, each put back: a named test must fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_lite.optim import fsdp_layout as fsdp
from megatron_lite.optim import grad_buffer, optimizer, zero1
from megatron_lite.optim import grad_norms as norms
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.pieces import Piece
from megatron_lite.parallel import fsdp as units
from megatron_lite.parallel.fsdp import UnitGradients
from megatron_lite.recompute import stores
from tests.optim import test_grad_buffer, test_layouts, test_zero1
from tests.parallel import test_fsdp
from tests.support.changes import with_fields
from tests.support.layouts import LAYOUTS
from tests.support.mutants import Mutant, assert_seen, parameters, replaces
from tests.training import test_layouts as test_runs

Patch = pytest.MonkeyPatch


@replaces("free_", UnitGradients)
def a_unit_holds_on_to_its_last_gradient(_, self):
    pass


def gradients_are_freed_whoever_reads_them(patch: Patch) -> None:
    @replaces("FREE_TO_DROP", units)
    def many_users(_: int) -> int:
        return 100

    @replaces("_owns_storage_alone", units)
    def always(_: Any, tensor: Tensor) -> bool:
        return True

    for part in (many_users, always):
        part(patch)


@replaces("forget", fsdp.FullySharded)
def the_optimizer_keeps_the_gradients_of_the_step_before(_: Any, self: fsdp.FullySharded) -> None:
    for parameter in self._parameters.values():
        parameter.grad = None


@replaces("_arrived", GradBuffer)
def buckets_are_sent_in_every_micro_batch(arrived: Any, self: GradBuffer, name: str) -> None:
    self._last.add(name)
    arrived(self, name)


@replaces("_arrived", GradBuffer)
def late_gradients_are_lost(arrived: Any, self: GradBuffer, name: str) -> None:
    if self.bucket_of[name].started is None:
        arrived(self, name)


@replaces("_arrived", GradBuffer)
def buckets_are_sent_as_they_become_complete(_: Any, self: GradBuffer, name: str) -> None:
    """Not in their order: ranks that skip other weights would send other buckets first."""
    bucket = self.bucket_of[name]
    bucket.awaited.discard(name)
    if name in self._last and not bucket.awaited and bucket is self.buckets[-1]:
        self._start(bucket)


@replaces("bucket_layouts", grad_buffer)
def a_tied_weight_shares_a_bucket(layouts: Any, gradients: Any, **sizes: Any) -> Any:
    return layouts([with_fields(one, tied=False) for one in gradients], **sizes)


@replaces("__init__", grad_buffer.Bucket)
def tied_gradients_are_not_added(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    self.tied = False


@replaces("_counts_here", norms)
def copies_count_in_the_norm(counts_here, spec, parallel):
    return counts_here(replace(spec, is_copy=False), parallel)


@replaces("_sum_over_model", GradBuffer)
def partial_sums_stop_at_the_part(real, self, part):
    """Under TP only the elements before this rank's part are summed."""
    return None if part is None else real(self, part)


@replaces("global_norms", optimizer)
def the_norm_is_that_of_a_part(real, pieces, values, parallel, shard_group, *, loss=None):
    return real(pieces, values, parallel, None, loss=loss)


@replaces("_wait_before_use", zero1.Zero1)
def nobody_waits_for_weights(_, self, model):
    pass


@replaces("publish", zero1.Zero1)
def masters_are_not_rounded_into_the_weights(_: Any, self: zero1.Zero1) -> None:
    for weights in self._weights.values():
        zero1.start_all_gather_parts_(weights.flat, self.shard_group).wait()


@replaces("take_", Piece)
def a_piece_takes_the_first_elements(_: Any, self: Piece, target: Tensor, whole: Tensor) -> None:
    with torch.no_grad():
        target.copy_(whole.reshape(-1)[: target.numel()].view(target.shape))


@replaces("set_gradient_divide_factor", FSDPModule)
def fsdp_averages(_, self, factor):
    pass


@replaces("all_reduce_", fsdp)
def fsdp_sums_nothing_over_tp(_, tensor, group):
    return tensor


@replaces("_reshard_unless_backward_follows", units)
def fsdp_keeps_the_root_whole_after_an_evaluation(*_):
    pass


@replaces("__call__", units._StandIns)
def gathered_weights_count_as_activations(_, self):
    return []


@replaces("weights_in_use", stores)
def gathered_weights_are_moved_to_the_host(_, module):
    return module.parameters()


SENT = test_grad_buffer.test_with_overlap_every_bucket_is_sent_during_the_last_backward
TIED = (
    test_grad_buffer.test_first_and_last_stage_add_the_gradients_of_a_tied_weight_and_count_it_once
)
TRAINS = test_layouts.test_every_layout_trains_as_a_single_process
SAME_BITS = test_layouts.test_zero1_and_overlap_change_no_bit
DP2 = dict(world_size=2, tp_size=1, layouts=("zero1, overlap",), dtype=torch.bfloat16)
WAITED = test_zero1.test_every_weight_is_waited_for_before_it_is_used
MUTANTS = [
    Mutant(buckets_are_sent_in_every_micro_batch, SENT, error="came after its bucket was sent"),
    Mutant(
        late_gradients_are_lost,
        test_grad_buffer.test_a_gradient_that_comes_after_its_bucket_was_sent_is_an_error,
    ),
    Mutant(buckets_are_sent_as_they_become_complete, SENT),
    Mutant(
        a_tied_weight_shares_a_bucket,
        TIED,
        dict(layout=LAYOUTS["zero1"]),
        error="Detected mismatch",
    ),
    Mutant(tied_gradients_are_not_added, TIED, dict(layout=LAYOUTS["zero1"])),
    Mutant(copies_count_in_the_norm, TIED, dict(layout=LAYOUTS["replicated"])),
    Mutant(
        partial_sums_stop_at_the_part,
        TRAINS,
        dict(mesh="dp2-tp2-sequence-parallel", dtype=torch.float64),
        long=True,
    ),
    Mutant(the_norm_is_that_of_a_part, TRAINS, dict(mesh="dp2", dtype=torch.float64), long=True),
    Mutant(nobody_waits_for_weights, WAITED, dict(name="gpt2", chunk_size=None)),
    Mutant(masters_are_not_rounded_into_the_weights, SAME_BITS, DP2),
    Mutant(
        a_piece_takes_the_first_elements,
        test_zero1.test_a_weight_is_set_whole_and_its_master_without_rounding,
        dict(dtype=torch.bfloat16),
    ),
    Mutant(
        a_unit_holds_on_to_its_last_gradient,
        test_fsdp.test_a_gradient_that_only_torchs_loop_names_is_freed_once_it_is_copied,
    ),
    Mutant(
        gradients_are_freed_whoever_reads_them,
        test_fsdp.test_a_gradient_that_someone_else_can_read_is_not_freed,
    ),
    Mutant(
        the_optimizer_keeps_the_gradients_of_the_step_before,
        test_fsdp.test_the_gradients_of_a_step_are_gone_when_the_next_one_begins,
    ),
    Mutant(fsdp_averages, TRAINS, dict(mesh="dp2", dtype=torch.float64), long=True),
    Mutant(
        fsdp_sums_nothing_over_tp,
        TRAINS,
        dict(mesh="dp2-tp2-sequence-parallel", dtype=torch.float64),
        long=True,
    ),
    Mutant(
        fsdp_keeps_the_root_whole_after_an_evaluation,
        test_runs.test_three_iterations_a_restart_and_three_more_equal_six,
        dict(layout="fsdp2", bf16=False),
        error="carries no ParameterSpec",
    ),
    Mutant(
        gathered_weights_count_as_activations,
        test_fsdp.test_gathered_weights_are_known_to_whoever_counts_what_is_kept,
    ),
    Mutant(
        gathered_weights_are_moved_to_the_host,
        test_runs.test_kept_bytes_are_as_predicted_with_recomputation_and_sharded_weights,
        dict(policy="*:pointwise@host"),
        error="of 2 failed|recompute-verify",
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Any) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
