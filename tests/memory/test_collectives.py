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
from tests.support.equality import variant_config
from tests.support.models import (
    BATCH,
    SEQ_LENGTH,
    build_tiny_model,
    plan_of,
    sample_tokens,
    tiny_config,
    tiny_sizes,
    tp_state,
)
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks
from tests.support.traffic import plan_collectives

NUM_LAYERS = 3
MODEL = tiny_config(num_layers=NUM_LAYERS, hidden_dropout=0.1, attention_backend="unfused")
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


def some_policies(*, can_split):
    return dict(sampled(policies(can_split=can_split).items(), every=3, at_most=2))


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


def measured(rank, world_size, sequence_parallel, dtype):
    """By policy: what the forward sent, and what the backward did, its replays included."""
    sent = {}
    with tp_state(world_size) as parallel:
        for name, plan in some_policies(can_split=not sequence_parallel).items():
            model = build_tiny_model(
                MODEL, parallel, sequence_parallel=sequence_parallel, dtype=dtype, plan=plan
            )
            with recorded_collectives() as forward:
                loss = model.loss(*sample_tokens()).mean()
            with recorded_collectives() as backward:
                loss.backward()
            sent[name] = tuple(
                by_kind_and_bytes(one, dtype.itemsize) for one in (forward, backward)
            )
    return sent


def predicted(plan, tp_size, *, sequence_parallel, element_bytes=4):
    return plan_collectives(
        MODEL,
        plan,
        tiny_sizes(tp_size, sequence_parallel=sequence_parallel, element_bytes=element_bytes),
    )


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    ("sequence_parallel", "dtype"),
    [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)],
)
def test_every_policy_sends_what_is_predicted(sequence_parallel, dtype):
    plans = some_policies(can_split=not sequence_parallel)
    expected = {}
    for name, plan in plans.items():
        exchange = predicted(
            plan, 2, sequence_parallel=sequence_parallel, element_bytes=dtype.itemsize
        )
        expected[name] = (Counter(exchange.forward), Counter(exchange.backward + exchange.replay))
    assert run_ranks(measured, 2, sequence_parallel, dtype) == [expected] * 2


EXPERT_POLICIES = ("*:none", "*:moe", "*:moe_act", "*:full")


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_replay_of_experts_repeats_the_collectives_that_its_policy_says(dispatcher):
    """The counts of rows are exchanged in the forward alone; `moe_act` sends no row again."""
    config = variant_config("mixtral", num_layers=NUM_LAYERS)
    plans = {policy: plan_of(policy, NUM_LAYERS) for policy in EXPERT_POLICIES}

    def kinds(collectives):
        return Counter(one.kind for one in collectives)

    def sent(rank, world_size):
        found = {}
        layout = dict(expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)
        with tp_state(1, **layout) as parallel:
            for name, plan in plans.items():
                model = build_tiny_model(config, parallel, dtype=torch.float32, plan=plan)
                with recorded_collectives() as forward:
                    loss = model.loss(*sample_tokens()).mean()
                with recorded_collectives() as backward:
                    loss.backward()
                found[name] = tuple(
                    Counter(TORCH_NAMES[one.name] for one in of) for of in (forward, backward)
                )
        return found

    sizes = tiny_sizes(ep_size=2, gathers_tokens=dispatcher == "allgather")
    expected = {}
    for name, plan in plans.items():
        exchange = plan_collectives(config, plan, sizes)
        expected[name] = kinds(exchange.forward), kinds(exchange.backward + exchange.replay)
    assert run_ranks(sent, 2) == [expected] * 2
    assert expected["*:moe"][1] > expected["*:moe_act"][1] == expected["*:none"][1]
