"""Bytes kept for backward: the closed form against what torch's hooks see and against the storages
that live. No tolerance."""

import itertools
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.recompute.schedule import plan_stage
from tests.recompute.test_equality import DIFFERING_MODELS as MODELS
from tests.support.equality import VARIANTS, variant_config
from tests.support.models import Layout, sample_tokens
from tests.support.pairs import sampled, subsets
from tests.support.ranks import run_ranks
from tests.support.storages import addresses

NUM_LAYERS = 3  # not divisible by the units of 2
OPS_POLICIES = (
    "*:ops(matmul)",
    "*:ops(attention)",
    "*:ops(matmul,attention)@host",
    "*:ops(matmul/2,attention,collective)",
    "1:ops(collective/2,aten.addmm.default); *:full",
    "0:ops(max); 1:none; *:ops(aten.mm.default/2)",
)
HOST_POLICIES = (
    "*:none@host",
    "*:full/2@host",
    "*:pointwise@host",
    "*:core_attn+mlp@host",
    "0:full@host; 1:none; *:mlp@host",
)
MODULES = ("core_attn", "layernorm", "mlp", "activation", "dropout")


class Figures(NamedTuple):
    """saved: by torch's hooks, or in an arena. predicted: ours. unaccounted: alive after the
    forward, and neither saved nor the loss, nor memory that is used again. on_host: the first two
    in host memory."""

    saved: int
    predicted: int
    unaccounted: int | None
    saved_on_host: int
    predicted_on_host: int

    @property
    def agree(self):
        return (self.saved, self.saved_on_host) == (self.predicted, self.predicted_on_host)


def policies(*, can_split):
    """None, every set of regions, units of one and two layers, results of operators; some in host
    memory or in one allocation."""
    split = ("*:full@split", "0:full@split;*:none", "*:full/2@split+host")
    for policy in (
        "*:none",
        *(f"*:{'+'.join(names)}" for names in subsets(MODULES)),
        *("*:full", "*:full/2", "0:full; *:none", "0-1:full; *:none"),
        *HOST_POLICIES,
        *((*split, "0:full@split; *:full/2@split+host") if can_split else ()),
    ):
        yield RecomputeConfig(recompute_policy=policy)
        if "full" in policy:
            yield RecomputeConfig(recompute_policy=policy, contiguous_saved_activations=True)
    for policy, tail_skip in itertools.product(OPS_POLICIES, (True, False)):
        yield RecomputeConfig(recompute_policy=policy, recompute_tail_skip=tail_skip)


def figures(config, recompute, parallel, layout, dtype, *, live=None, loss_chunk_size=None):
    plan, chunks = plan_stage(recompute, config.num_layers), dict(loss_chunk_size=loss_chunk_size)
    model = layout.model(config, parallel, dtype=dtype, plan=plan, **chunks)
    with kept_for_backward(exclude=model.parameters()) as meter, live or nullcontext():
        loss = model(*sample_tokens(parallel=parallel)).mean()
    known = addresses([loss, *model.parameters(), *model.constants()])
    stores = model.decoder.stores
    unaccounted = (
        None
        if live is None
        else live.bytes_beside(known | meter.storages().keys() | stores.storages())
    )
    sizes = layout.sizes(config, dtype, **chunks)
    return Figures(
        meter.total_bytes() + stores.device_bytes,
        activation_bytes(plan, sizes),
        unaccounted,
        stores.host_bytes,
        activation_bytes(plan, sizes, on_host=True),
    )


def models():
    """Every variant x attention x dropout in attention, in the residual, in both or in neither."""
    for name, backend, softmax_in_fp32 in itertools.product(
        VARIANTS, ("flash", "unfused"), (False, True)
    ):
        for hidden, attention in ((0.0, 0.0), (0.1, 0.1), (0.1, 0.0), (0.0, 0.1)):
            yield variant_config(
                name,
                num_layers=NUM_LAYERS,
                attention_backend=backend,
                hidden_dropout=hidden,
                attention_dropout=attention,
                attention_softmax_in_fp32=softmax_in_fp32,
            )


def some_cases(layout, every):
    """Returns each `every`-th of all cases, and in the default run fewer."""
    # A run refuses windows in a ring of flash attention.
    rings = layout.cp > 1 and layout.cp_comm_type != "a2a"
    configs = [
        config
        for config in models()
        if not (rings and config.window_size and config.attention_backend == "flash")
    ]
    cases = itertools.product(
        configs,
        policies(can_split=layout.can_split),
        (torch.float32, torch.bfloat16, torch.float16, torch.float64),
        (None, 1, 7, 1000),
    )
    return [
        case
        for case in sampled(list(cases)[::every], every=5, at_most=3)
        # In float64, which no run has, experts are a loop of products for `ops` to keep.
        if not (case[0].num_experts and case[2] == torch.float64 and "ops" in str(case[1]))
    ]


def wrong_bytes(rank, world_size, layout, cases):
    """Returns the cases in which prediction and measurement differ."""
    wrong = []
    with layout.state() as parallel:
        for config, recompute, dtype, chunk in cases:
            found = figures(config, recompute, parallel, layout, dtype, loss_chunk_size=chunk)
            if not found.agree:
                wrong.append(f"{config} {recompute} {dtype} {chunk}: {found}")
    return wrong


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize(
    "layout, every",
    [
        (Layout(), 367),
        (Layout(2), 787),
        (Layout(2, True), 787),
        (Layout(4, True), 3121),
        (Layout(cp=3, cp_comm_type="allgather"), 1193),
        (Layout(cp=2), 1013),
        (Layout(2, cp=2), 1013),
        (Layout(2, True, 2, "allgather"), 1013),
        (Layout(cp=2, cp_comm_type="a2a"), 1193),
        (Layout(cp=2, cp_comm_type=("a2a", "p2p") * 4), 1193),
    ],
)
def test_predicted_bytes_are_the_measured_ones(layout, every):
    cases = some_cases(layout, every)
    assert len(cases) > 8
    assert run_ranks(wrong_bytes, layout.ranks, layout, cases) == [[]] * layout.ranks


def living(rank, world_size, layout):
    found = []
    with layout.state() as parallel:
        for name, recompute in sampled(
            itertools.product(("gpt2", "llama"), policies(can_split=layout.can_split)),
            every=5,
            at_most=3,
        ):
            # which has no kernel with dropout on a CPU
            flash = recompute.recompute_policy is not None
            config = variant_config(
                name, num_layers=2, hidden_dropout=0.1, attention_dropout=0.0 if flash else 0.1
            )
            found.append(
                figures(
                    config,
                    recompute,
                    parallel,
                    layout,
                    torch.bfloat16,
                    live=LiveStorages(),
                    loss_chunk_size=7 if flash else None,
                )
            )
    return found


@pytest.mark.runs
@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, True)])
def test_what_is_saved_is_all_that_lives(layout):
    """Nothing hides from the hooks on a Function's context, in a cache or in a closure."""
    for found in run_ranks(living, layout.ranks, layout):
        assert len(found) > 10 and all(each.agree and each.unaccounted == 0 for each in found), (
            found
        )


POLICIES = (
    "*:none",
    "*:full",
    "*:full/2",
    "1:none; *:full/3",
    "every-2:full; *:core_attn+layernorm",
    "*:pointwise",
    "0-2:full/3@host; *:mlp@host",
    "*:ops(matmul,attention)",
    "1:none; *:ops(matmul/2)",
    "*:core_attn+activation",
)


@pytest.mark.runs
@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, True)])
def test_the_bytes_of_layers_that_differ_are_the_measured_ones(layout):
    policies = [RecomputeConfig(recompute_policy=policy) for policy in POLICIES]
    cases = [*itertools.product(MODELS.values(), policies, (torch.float32, torch.bfloat16), [None])]
    assert run_ranks(wrong_bytes, layout.ranks, layout, cases) == [[]] * layout.ranks
