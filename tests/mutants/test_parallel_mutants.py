"""Mistakes of the model, of the layouts over ranks and of the optimizer, each put back: a named
test must fail."""

from importlib.util import find_spec

import torch

from megatron_lite.context_parallel import attention_kernels
from megatron_lite.model import router
from megatron_lite.optim import grad_buffer, host_link, layouts, stored
from megatron_lite.optim.muon_update import MOMENTUM
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel import fsdp, state
from megatron_lite.recompute import region_runner
from megatron_lite.training.step import MicroBatchLoss
from tests.model import test_experts as test_model_experts
from tests.optim import test_host_link, test_stored, test_zero1
from tests.parallel import test_equality, test_fsdp
from tests.pipeline import test_pipeline
from tests.support.mutants import Mutant, each_is_seen, replaces
from tests.support.pipelines import Layout
from tests.training import test_experts, test_loss_in_one_pass, test_resume


@replaces("_arrived", host_link.HostLink)
def the_host_reads_a_stale_gradient(real, self, mark):
    pass


@replaces("join", host_link.HostLink)
def a_gradient_is_clipped_before_it_has_left(real, self):
    pass


@replaces("take_", layouts.Piece)
def a_loaded_weight_leaves_the_copy_on_the_host(real, self, target, whole):
    if not (self.on_host and target is self.master):
        real(self, target, whole)


@replaces("write_", stored)
def a_moment_is_rounded_twice(real, state, part, values, chances=None):
    real(state, part, values.bfloat16().float(), chances)


@replaces("noise", stored)
def every_update_has_the_same_noise(real, key, update, *place):
    return real(key, update * 0, *place)


@replaces("__init__", grad_buffer.Bucket)
def gradients_of_experts_are_summed_over_all_ranks(real, self, layout, flat, place, *, tied):
    real(self, layout, flat, place, tied=tied)
    if torch.distributed.is_initialized() and any(".experts." in name for name in layout.places):
        self.others = torch.distributed.group.WORLD


@replaces("start_step", router.Router)
def the_losses_of_a_router_are_scaled_twice(real, self, scale):
    real(self, scale * scale)


@replaces("of", region_runner.Choices)
def a_replay_chooses_experts_anew(real, self, layer, choose):
    return choose()


@replaces("gradient", MicroBatchLoss)
def the_loss_mask_is_forgotten(gradient, self, labels, mask, number):
    return gradient(self, labels, torch.ones_like(mask) if mask is not None else None, number)


@replaces("positions_by_rank", attention_kernels)
def unfused_masks_as_if_keys_were_gathered_in_order(real, num_tokens, size, device):
    return real(num_tokens, size, device).flatten().sort().values.view(size, num_tokens)


@replaces("_embedding_group", state)
def each_end_keeps_its_own_gradient_of_a_tied_embedding(_, ranks, pp_group):
    return None


@replaces("whole_states", Optimizer)
def the_momentum_is_not_saved(real, self, name):
    return {
        key: value if key != MOMENTUM else torch.zeros_like(value)
        for key, value in real(self, name).items()
    }


def gradients_are_freed_whoever_reads_them(patch):
    for fault in (
        replaces("FREE_TO_DROP", fsdp)(lambda _: 100),
        replaces("_owns_storage_alone", fsdp)(lambda _, tensor: True),
    ):
        fault(patch)


@replaces("_wait_before_use", layouts.Bucketed)
def nobody_waits_for_weights(_, self, model):
    pass


ONE_PASS = dict(layout="one", model=test_loss_in_one_pass.TIED, policy="*:none", chunk_size=5)
MUTANTS = [
    Mutant(
        the_loss_mask_is_forgotten,
        test_loss_in_one_pass.test_one_pass_has_the_bits_of_two,
        dict(ONE_PASS, mask="--eod-mask-loss"),
    ),
    Mutant(
        unfused_masks_as_if_keys_were_gathered_in_order,
        test_equality.check,
        dict(layout=test_equality.Layout(cp=2), cases=[("qwen", torch.float64)]),
    ),
    Mutant(
        each_end_keeps_its_own_gradient_of_a_tied_embedding,
        test_pipeline.test_a_pipeline_trains_as_one_process_does,
        dict(layout=Layout(pp=2), variant="gpt2", flags={}),
    ),
    Mutant(
        the_momentum_is_not_saved,
        test_resume.test_three_iterations_a_restart_and_three_more_equal_six,
        dict(name="muon"),
    ),
    Mutant(
        gradients_are_freed_whoever_reads_them,
        test_fsdp.test_a_gradient_that_someone_else_can_read_is_not_freed,
    ),
    Mutant(
        nobody_waits_for_weights,
        test_zero1.test_every_weight_is_waited_for_before_it_is_used,
        dict(name="gpt2", chunk_size=None),
    ),
    Mutant(
        the_host_reads_a_stale_gradient,
        test_host_link.test_overlap_changes_no_bit,
        dict(name="fp16, some on the host, skipped steps"),
    ),
    Mutant(
        a_gradient_is_clipped_before_it_has_left,
        test_host_link.test_streams_use_no_memory_in_no_order,
    ),
    Mutant(
        a_loaded_weight_leaves_the_copy_on_the_host,
        test_stored.test_states_load_across_formats_and_places,
        dict(writer={}, reader=test_stored.HOST),
    ),
    Mutant(
        a_moment_is_rounded_twice,
        test_stored.test_an_update_is_torchs_of_what_was_stored_and_is_rounded_once,
        dict(formats=test_stored.FP16, part=2**24, place={}),
    ),
    Mutant(
        every_update_has_the_same_noise, test_stored.test_small_updates_add_up_if_rounding_is_random
    ),
    Mutant(
        gradients_of_experts_are_summed_over_all_ranks,
        test_experts.test_every_layout_trains_as_one_process_does,
        dict(layout="ep2"),
    ),
    Mutant(
        a_replay_chooses_experts_anew,
        test_model_experts.test_a_replay_sends_every_token_to_the_same_experts,
        dict(policy="*:full/2", variant="mixtral", after=False),
    ),
]
if find_spec("megatron"):  # else its test cannot be imported
    from tests.model.test_megatron_core_experts import test_four_steps_equal_those_of_megatron_core

    four_steps = test_four_steps_equal_those_of_megatron_core
    MUTANTS.append(
        Mutant(the_losses_of_a_router_are_scaled_twice, four_steps, dict(case="aux_loss"))
    )


test_is_seen = each_is_seen(MUTANTS)
