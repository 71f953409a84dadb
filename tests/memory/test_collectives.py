"""The collectives of a plan against those that torch dispatches in a real forward and backward, to
the byte."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SHIFT,
    Collective,
)
from tests.support.collectives import recorded_collectives
from tests.support.equality import LATENT, LLAMA, variant_config
from tests.support.models import BATCH, SEQ_LENGTH, Layout, plan_of, sample_tokens, tiny_config
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks
from tests.support.traffic import plan_collectives

NUM_LAYERS = 3
LATENTS = dict(LLAMA, **LATENT, q_lora_rank=8, qk_layernorm=True, num_layers=NUM_LAYERS)
MODELS = {
    "gpt, dropout": tiny_config(
        num_layers=NUM_LAYERS, hidden_dropout=0.1, attention_backend="unfused"
    ),
    "flash": variant_config("llama", num_layers=NUM_LAYERS, attention_backend="flash"),
    "unfused": variant_config("llama", num_layers=NUM_LAYERS, attention_backend="unfused"),
    "latents": tiny_config(**LATENTS, attention_backend="flash"),
    "unfused latents": tiny_config(**LATENTS, attention_backend="unfused"),
}
TORCH_NAMES = {
    "allreduce_": ALL_REDUCE,
    "_allgather_base_": ALL_GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "send": SHIFT,
    "alltoall_base_": ALL_TO_ALL,
}


POLICIES = (
    "*:none",
    "*:core_attn",
    "*:mlp",
    "*:layernorm+activation",
    "*:layernorm+mlp+core_attn",
    "*:full",
    "*:full/2",
    "0:full; *:none",
    "*:ops(matmul)",
    "*:ops(collective)",
    "*:ops(collective/2,attention)",
    "0:ops(collective);1:none;2:mlp",
)
SPLIT = ("*:full@split", "*:full/2@split", "*:full/3@split", "0:mlp;1:none;2:full@split")


def policies(*, can_split):
    """Every policy, with and without its tail; NUM_LAYERS is not divisible by 2."""
    plans = {
        policy: plan_of(policy, NUM_LAYERS) for policy in (*POLICIES, *(SPLIT if can_split else ()))
    }
    return plans | {
        f"{name}, whole tail": replace(plan, skip_tail=False) for name, plan in plans.items()
    }


def by_kind_and_bytes(sent, element_bytes, *, tokens=BATCH * SEQ_LENGTH):
    """Sums of the cross-entropy are float32: one or two numbers per token."""
    found = Counter()
    for one in sent:
        if one.name == "recv_":  # the other half of a shift
            continue
        elements = torch.Size(one.shape).numel()
        width = 4 if elements <= 2 * tokens else element_bytes
        found[Collective(TORCH_NAMES[one.name], elements * width)] += 1
    return found


def issued(rank, world_size, layout, config, plans, dtype, fields):
    """By policy: what the forward issued, and what the backward did, its replays included."""
    found = {}
    with layout.state(**fields) as parallel:
        for name, plan in plans.items():
            model = layout.model(config, parallel, dtype=dtype, plan=plan)
            with recorded_collectives() as forward:
                loss = model(*sample_tokens(parallel=parallel)).mean()
            with recorded_collectives() as backward:
                loss.backward()
            found[name] = forward, backward
    return found


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize(
    "layout, name, dtype",
    [
        (Layout(2), "gpt, dropout", torch.float32),
        (Layout(2, True), "gpt, dropout", torch.float32),
        (Layout(2, True), "gpt, dropout", torch.bfloat16),
        (Layout(2, True, 2, "a2a"), "latents", torch.bfloat16),
        (Layout(cp=2), "flash", torch.bfloat16),
        (Layout(cp=3, cp_comm_type="allgather"), "flash", torch.bfloat16),
        (Layout(cp=2), "unfused", torch.bfloat16),
        (Layout(cp=2), "latents", torch.bfloat16),
        (Layout(2, True, 2), "flash", torch.bfloat16),
        (Layout(2, cp=2, cp_comm_type="allgather"), "flash", torch.bfloat16),
        (Layout(cp=2, cp_comm_type="a2a"), "flash", torch.bfloat16),
        (Layout(cp=2, cp_comm_type="a2a"), "unfused", torch.bfloat16),
        (Layout(cp=2), "unfused latents", torch.bfloat16),
        (Layout(cp=2, cp_comm_type=("allgather", "p2p", "a2a")), "flash", torch.bfloat16),
    ],
)
def test_every_policy_sends_what_is_predicted(layout, name, dtype):
    named = list(policies(can_split=layout.can_split).items())
    # More than two ranks run every third: they are slow.
    plans = dict(sampled(named[:: 3 if layout.ranks > 2 else 1], every=3, at_most=2))
    tokens = BATCH * SEQ_LENGTH // layout.cp
    for found in run_ranks(issued, layout.ranks, layout, MODELS[name], plans, dtype, {}):
        for policy, plan in plans.items():
            sent = [by_kind_and_bytes(one, dtype.itemsize, tokens=tokens) for one in found[policy]]
            told = plan_collectives(plan, layout.sizes(MODELS[name], dtype))
            assert sent == [Counter(told.forward), Counter(told.backward + told.replay)], policy


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_replay_of_experts_repeats_the_collectives_that_its_policy_says(dispatcher):
    """The counts of rows are exchanged in the forward alone; `moe_act` sends no row again."""
    config = variant_config("mixtral", num_layers=NUM_LAYERS)
    plans = {one: plan_of(one, NUM_LAYERS) for one in ("*:none", "*:moe", "*:moe_act", "*:full")}
    fields = dict(expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)
    sizes = Layout().sizes(config, ep_size=2, gathers_tokens=dispatcher == "allgather")
    for found in run_ranks(issued, 2, Layout(), config, plans, torch.float32, fields):
        sent = {
            policy: [Counter(TORCH_NAMES[one.name] for one in part) for part in parts]
            for policy, parts in found.items()
        }
        for policy, plan in plans.items():
            told = plan_collectives(plan, sizes)
            for part, expected in zip(
                sent[policy], (told.forward, told.backward + told.replay), strict=True
            ):
                assert part == Counter(one.kind for one in expected), policy
        assert sent["*:moe"][1] > sent["*:moe_act"][1] == sent["*:none"][1]
