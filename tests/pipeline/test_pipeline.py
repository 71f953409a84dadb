"""A pipeline trains as one process does: losses, gradients, norms and weights, in every layout of
its ranks."""

import itertools
from functools import cache

import pytest
import torch

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from tests.support.equality import DIFFERING, VARIANTS, difference
from tests.support.models import tiny_config
from tests.support.pipelines import Layout, train
from tests.support.ranks import run_ranks
from tests.support.saves import same

STEPS, MICRO_BATCHES = 2, 4
LAYOUTS = [
    Layout(pp=2),
    Layout(pp=4),
    Layout(pp=2, num_chunks=2),
    Layout(pp=4, num_chunks=2),
    Layout(pp=2, dp=2),
    Layout(pp=2, tp=2),
    Layout(pp=2, tp=2, sequence_parallel=True),
    Layout(pp=2, first=3),
    Layout(pp=2, cut="Et|t*4||ttt,L"),
    Layout(pp=4, cut="E|(tttt|)*2L"),
    Layout(pp=2, tp=2, dp=2, num_chunks=2, sequence_parallel=True),
]
MODELS = {"gpt2": VARIANTS["gpt2"], "llama": VARIANTS["llama"], "windows": DIFFERING}


def config_of(variant, **overrides):
    return tiny_config(**{**MODELS[variant], "num_layers": 8, **overrides})


@cache
def single_process(variant, dtype):
    return train(
        Layout(), config_of(variant), steps=STEPS, micro_batches=MICRO_BATCHES, dtype=dtype
    )


DATA_PARALLEL = (
    dict(overlap_grad_reduce=True, ddp_bucket_size=2000),
    dict(use_distributed_optimizer=True),
    dict(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_bucket_size=2000,
    ),
)
SHARED = (Layout(pp=2, dp=2, num_chunks=2), Layout(pp=2, dp=2, tp=2, sequence_parallel=True))
CASES = [
    *itertools.product(LAYOUTS, MODELS, [{}]),
    # tied embeddings, whose two ends are shared out alike
    *itertools.product(SHARED, ["gpt2"], DATA_PARALLEL),
]


@pytest.mark.runs(daily=2, ci=6)
@pytest.mark.parametrize("layout, variant, flags", CASES)
def test_a_pipeline_trains_as_one_process_does(layout, variant, flags):
    expected = single_process(variant, torch.float64)

    def work(rank, world_size):
        got = train(
            layout,
            config_of(variant),
            steps=STEPS,
            micro_batches=MICRO_BATCHES,
            dtype=torch.float64,
            data_parallel=DataParallelConfig(**flags) if flags else None,
        )
        errors = {
            f"{kind} {name}": difference(getattr(expected, kind)[name], value)
            for kind in ("first_grads", "weights")
            for name, value in getattr(got, kind).items()
        }
        return got.losses, got.grad_norms, max(errors.values()), sorted(got.weights)

    names = set()
    for losses, grad_norms, worst, held in run_ranks(work, layout.ranks, detail=False):
        assert losses == pytest.approx(expected.losses, rel=1e-10) and grad_norms == pytest.approx(
            expected.grad_norms, rel=1e-10
        )
        assert worst < 1e-9
        names |= set(held)
    assert names == expected.weights.keys()


POLICIES = {
    "uniform 2": dict(recompute_policy="*:full/2"),
    "block 1": dict(recompute_policy="0:full; *:none"),
    "core_attn and mlp": dict(recompute_policy="*:core_attn+mlp"),
    "pointwise": dict(recompute_policy="*:pointwise"),
    "units split over the ranks": dict(recompute_policy="*:full@split"),
    "one buffer": dict(recompute_policy="*:full", contiguous_saved_activations=True),
    "by stage": dict(
        recompute_policy="stage0/*:full; stage1/0:mlp; stage1/*:ops(matmul); *:full/2@host"
    ),
}

# Each policy is tried in one of the two layouts.
WITH_TENSOR_PARALLEL = {"block 1", "pointwise", "units split over the ranks", "by stage"}


@pytest.mark.runs
@pytest.mark.parametrize("layout", [Layout(pp=4), Layout(pp=2, tp=2, num_chunks=2)])
def test_no_recompute_policy_changes_a_bit(layout):
    """With dropout, so that every replay has to draw what its forward drew, with others in
    between."""
    policies = {
        name: flags
        for name, flags in POLICIES.items()
        if (name in WITH_TENSOR_PARALLEL) == (layout.tp > 1)
    }

    def work(rank, world_size):
        def outcome(num_kept=0, overlap=True, **flags):
            config = config_of("gpt2", hidden_dropout=0.1, attention_dropout=0.1)
            return train(
                layout,
                config,
                steps=1,
                micro_batches=layout.pp,
                dtype=torch.float32,
                num_kept=num_kept,
                overlap=overlap,
                recompute=RecomputeConfig(**flags),
            )

        plain = outcome()
        others = {name: outcome(**flags) for name, flags in policies.items()}
        others["some micro-batches keep everything"] = outcome(num_kept=1, **POLICIES["uniform 2"])
        others["no overlap"] = outcome(overlap=False)
        return {
            name: other.losses == plain.losses
            and other.grad_norms == plain.grad_norms
            and same(other.first_grads, plain.first_grads)
            and same(other.weights, plain.weights)
            for name, other in others.items()
        }

    for equal in run_ranks(work, layout.ranks, detail=False):
        assert len(equal) == len(policies) + 2 and all(equal.values()), equal
