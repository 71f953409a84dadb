"""Norms by NVIDIA apex's kernels: torch's results, the same gradients under every recompute policy,
and bytes that are known."""

from __future__ import annotations

import contextlib
import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpointing.metadata import read_config
from megatron_lite.config.checks import InputError
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tools.generation import config_for_ranks, load_model
from tests.memory import test_activations
from tests.recompute import test_equality
from tests.support import apex
from tests.support.apex import Calls
from tests.support.equality import VARIANTS, difference, variant_config
from tests.support.models import Outcome, build_tiny_model, loss_and_grads, tp_state
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A norm over all heads is refused with apex, whose kernel sees the heads of one rank.
WITH_APEX = [name for name in VARIANTS if variant_config(name).qk_layernorm_scope != "all-heads"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
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
    calls: Calls, tp_size: int, sequence_parallel: bool
) -> None:
    """To the bit in float32 LayerNorm, where the stand-in runs torch's kernel. 16-bit norms round
    other intermediate values, and RMSNorm sums in another order; the bound is of the whole model's
    gradients, relative to the largest of each parameter."""

    def work(rank: int, world_size: int) -> None:
        for name, dtype in itertools.product(WITH_APEX, DTYPES):
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
        assert (
            min(calls["forward_affine"], calls["rms_forward_affine"], calls["backward_affine"]) > 0
        )

    if tp_size == 1:
        work(0, 1)
    else:
        run_ranks(work, tp_size, detail=False)


@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel", "dtype"),
    [
        (1, False, torch.bfloat16),
        pytest.param(1, False, torch.float32, marks=pytest.mark.long),
        pytest.param(2, True, torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_no_recompute_policy_changes_a_bit(
    calls: Calls, tp_size: int, sequence_parallel: bool, dtype: torch.dtype
) -> None:
    """layernorm, which discards and rebuilds what apex's Function returned, among them; dropout is
    on."""
    models = {
        name: replace(config, norm_impl="apex", num_layers=3)
        for name, config in list(test_equality.MODELS.items())[:2]
    }
    kept = [
        name
        for name in test_equality.policies(can_split=False)
        if "@split" not in name
        and ("layernorm" in name or "pointwise" in name or name in ("uniform 2", "*:ops(matmul)"))
    ]
    assert len(kept) > 8
    test_equality.check(
        tp_size, sequence_parallel, dtype, dict.fromkeys(models, sampled(kept, every=3)), models
    )


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


@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel", "name"),
    [
        (1, False, "gpt2"),
        (1, False, "qwen"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (1, False, "llama"),
                (1, False, "neox"),
                (1, False, "nemotron"),
                (2, True, "neox"),
                (2, True, "qwen"),
            )
        ),
    ],
)
def test_predicted_bytes_are_the_measured_ones_and_all_that_lives(
    calls: Calls, tp_size: int, sequence_parallel: bool, name: str
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


def test_16_bit_statistics_of_a_layernorm_are_float32() -> None:
    """Twice the bytes of torch's CPU kernel; as many as those of torch's CUDA kernel."""
    from megatron_lite.description.sizes import Sizes
    from megatron_lite.description.transformer_layer import describe_layer

    def statistics(impl: str, device: str) -> int:
        sizes = Sizes(
            micro_batch_size=3, seq_length=12, padded_vocab_size=72, element_bytes=2, device=device
        )
        keeps = describe_layer(variant_config("gpt2", norm_impl=impl), sizes).operations[0].keeps
        return next(tensor.num_bytes for tensor in keeps if tensor.name == "input norm statistics")

    assert (
        statistics("apex", "cpu")
        == statistics("apex", "cuda")
        == statistics("torch", "cuda")
        == 2 * 36 * 4
    )
    assert statistics("torch", "cpu") == 2 * 36 * 2


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_float32_run_is_the_same_to_the_bit_and_its_bytes_are_verified(
    calls: Calls, tmp_path: Path, tp_size: int
) -> None:
    def work(rank: int, world_size: int) -> int:
        for impl in ("torch", "apex"):
            config = tiny_run(
                training=dict(train_iters=3, eval_iters=0),
                model=dict(norm_impl=impl),
                tp_size=tp_size,
                sequence_parallel=tp_size > 1,
                metrics=tmp_path / impl,
            )
            with contextlib.redirect_stdout(io.StringIO()):
                run_to_end(
                    replace(
                        config,
                        recompute=RecomputeConfig(
                            recompute_policy="*:layernorm", recompute_verify=True
                        ),
                    )
                )
        return calls["forward_affine"]

    counts = [work(0, 1)] if tp_size == 1 else run_ranks(work, tp_size, detail=False)
    assert min(counts) > 3 * 4 * 5
    assert rows(tmp_path / "torch") == rows(tmp_path / "apex")


def test_a_checkpoint_goes_on_and_is_sampled_from_without_apex(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        apex.install(patch)
        run_to_end(
            tiny_run(
                training=dict(train_iters=2, eval_iters=0),
                model=dict(norm_impl="apex"),
                checkpoint=dict(save=str(tmp_path)),
            )
        )
    step = tmp_path / "iter_0000002"
    assert read_config(step).model.norm_impl == "apex"
    with tp_state(1) as parallel:
        model = load_model(step, config_for_ranks(read_config(step), 1, "gloo"), parallel)
        assert model(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_to_end(
            tiny_run(
                training=dict(train_iters=3, eval_iters=0), checkpoint=dict(load=str(tmp_path))
            )
        )
    assert "changed since the checkpoint: --norm-impl apex -> torch" in out.getvalue().splitlines()


def test_without_apex_it_is_an_error() -> None:
    with (
        tp_state(1) as parallel,
        pytest.raises(InputError, match="--norm-impl apex cannot be used: NVIDIA apex has kernels"),
    ):
        build_tiny_model(
            variant_config("gpt2", norm_impl="apex"),
            parallel,
            plan=plan_stage(RecomputeConfig(), 2),
        )
