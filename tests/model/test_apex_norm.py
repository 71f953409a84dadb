"""Norms by NVIDIA apex's kernels: torch's results, the same gradients under every recompute policy,
and bytes that are known."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel.rng import RngStreams
from tests.memory import test_activations
from tests.recompute import test_equality
from tests.support import apex
from tests.support.equality import VARIANTS, difference, variant_config
from tests.support.models import Outcome, build_tiny_model, loss_and_grads, tp_state
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A norm over all heads is refused with apex, whose kernel sees the heads of one rank.
WITH_APEX = [name for name in VARIANTS if variant_config(name).qk_layernorm_scope != "all-heads"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return apex.install(monkeypatch)


def outcome(
    name: str, impl: str, dtype: torch.dtype, world_size: int, *, sequence_parallel: bool = False
) -> Outcome:
    with tp_state(world_size) as parallel:
        fresh = replace(parallel, rng=RngStreams(parallel.device, seed=7, tp_rank=parallel.tp_rank))
        model = build_tiny_model(
            variant_config(name, norm_impl=impl, hidden_dropout=0.1),
            fresh,
            dtype=dtype,
            sequence_parallel=sequence_parallel,
        )
        return loss_and_grads(model, fresh)


@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel"), [(1, False), pytest.param(2, True, marks=pytest.mark.long)]
)
def test_losses_and_gradients_are_torchs(
    calls: Counter[str], tp_size: int, sequence_parallel: bool
) -> None:
    """To the bit in float32 LayerNorm, where the stand-in runs torch's kernel. 16-bit norms round
    other intermediate values, and RMSNorm sums in another order; the bound is of the whole model's
    gradients, relative to the largest of each parameter."""

    def work(rank: int, world_size: int) -> None:
        for name, dtype in sampled(itertools.product(WITH_APEX, DTYPES), every=4):
            torchs, apexs = (
                outcome(name, impl, dtype, world_size, sequence_parallel=sequence_parallel)
                for impl in ("torch", "apex")
            )
            bound = 1e-4 if dtype == torch.float32 else 32 * torch.finfo(dtype).eps
            if variant_config(name).normalization == "LayerNorm" and dtype == torch.float32:
                assert test_equality.changed(torchs, apexs) == [], (name, dtype)
            assert apexs.loss.item() == pytest.approx(torchs.loss.item(), rel=bound)
            errors = {key: difference(grad, apexs.grads[key]) for key, grad in torchs.grads.items()}
            assert {key: error for key, error in errors.items() if not error < bound} == {}, (
                name,
                dtype,
            )
        kernels = (
            f"{norm} {way}" for norm in ("LayerNorm", "RMSNorm") for way in ("forward", "backward")
        )
        assert all(calls[kernel] > 0 for kernel in kernels)

    if tp_size == 1:
        work(0, 1)
    else:
        run_ranks(work, tp_size, detail=False)


POLICIES = [
    RecomputeConfig(recompute_policy=policy)
    for policy in (
        "*:none",
        "*:layernorm",
        "*:pointwise",
        "*:core_attn+layernorm+mlp",
        "*:full/2",
        "*:ops(matmul,attention)",
        "*:none@host",
    )
]


@pytest.mark.runs(daily=1, ci=4)
@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel", "name"),
    [
        (1, False, "gpt2"),
        (1, False, "qwen"),
        (1, False, "llama"),
        (1, False, "neox"),
        (1, False, "nemotron"),
        (2, True, "neox"),
        (2, True, "qwen"),
    ],
)
def test_predicted_bytes_are_the_measured_ones_and_all_that_lives(
    calls: Counter[str], tp_size: int, sequence_parallel: bool, name: str
) -> None:
    def work(rank: int, world_size: int) -> list[str]:
        wrong = []
        with tp_state(world_size) as parallel:
            for recompute, dtype in itertools.product(POLICIES, (torch.float32, torch.bfloat16)):
                config = variant_config(name, norm_impl="apex")
                found = test_activations.figures(
                    config,
                    recompute,
                    parallel,
                    sequence_parallel=sequence_parallel,
                    dtype=dtype,
                    live=LiveStorages(),
                )
                if not found.agree or found.unaccounted:
                    wrong.append(f"{recompute.recompute_policy} {dtype}: {found}")
        return wrong

    assert ([work(0, 1)] if tp_size == 1 else run_ranks(work, tp_size, detail=False)) == [
        []
    ] * tp_size
