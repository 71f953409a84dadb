"""No recompute policy changes a bit over context-parallel ranks: loss and every gradient
torch.equal to keeping everything."""

from dataclasses import replace

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.recompute.schedule import plan_stage
from tests.recompute.test_equality import EXPERT_MODELS, MODELS, changed, policies
from tests.support.models import build_tiny_model, loss_and_grads, tp_state, with_new_streams
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks

NUM_LAYERS = 3  # not divisible by the units of 2
CONTEXT_MODELS = {
    "gpt": MODELS["gpt, SDPA, no dropout"],
    "llama": replace(
        MODELS["llama, SDPA, residual dropout"], group_query_attention=True, num_query_groups=2
    ),
    "latents": EXPERT_MODELS["deepseek"],
    "unfused": MODELS["gpt, unfused, dropout"],
}


def faults(rank, world_size, tp_size, sequence_parallel, name, comm_type, dtype):
    """{policy: what it changed}, empty if nothing did. Four ranks run every third policy: they are
    slow."""
    outcomes, found = {}, {}
    config = replace(CONTEXT_MODELS[name], num_layers=NUM_LAYERS)
    with tp_state(tp_size, cp_size=world_size // tp_size) as parallel:
        named = list(policies(can_split=tp_size > 1 and not sequence_parallel).items())[
            :: 3 if world_size == 4 else 1
        ]
        named = sampled(named, every=3, at_most=2)
        for policy, recompute in [("none", RecomputeConfig()), *named]:
            fresh = with_new_streams(parallel)
            model = build_tiny_model(
                config,
                fresh,
                sequence_parallel=sequence_parallel,
                dtype=dtype,
                plan=plan_stage(recompute, NUM_LAYERS),
                cp_comm_type=comm_type,
            )
            outcomes[policy] = loss_and_grads(model, fresh, micro_batches=1)
            if differences := changed(outcomes["none"], outcomes[policy]):
                found[policy] = differences
    return found


@pytest.mark.runs(daily=1, ci=3)
@pytest.mark.parametrize(
    ("tp_size", "cp_size", "sequence_parallel", "name", "comm_type", "dtype"),
    [
        (1, 2, False, "gpt", "p2p", torch.float32),
        (1, 2, False, "latents", "p2p", torch.float32),
        (2, 2, True, "latents", "a2a", torch.bfloat16),
        (1, 2, False, "latents", "allgather", torch.bfloat16),
        (1, 2, False, "llama", "allgather", torch.bfloat16),
        (1, 2, False, "unfused", "p2p", torch.float32),
        (2, 2, True, "llama", "p2p", torch.float32),
        (2, 2, False, "gpt", "allgather", torch.bfloat16),
        (1, 2, False, "unfused", "a2a", torch.float32),
    ],
)
def test_gradients_are_unchanged_to_the_bit(
    tp_size, cp_size, sequence_parallel, name, comm_type, dtype
):
    arguments = (tp_size, sequence_parallel, name, comm_type, dtype)
    assert (
        run_ranks(faults, tp_size * cp_size, *arguments, detail=False) == [{}] * tp_size * cp_size
    )
