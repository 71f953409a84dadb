"""Runs of models with experts: alike in every layout, and resumed to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.parallel import DataParallelConfig, ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run

MODEL: dict[str, Any] = dict(
    num_layers=4,
    swiglu=True,
    ffn_hidden_size=64,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    num_experts=4,
    moe_layer_freq=2,
    moe_shared_expert_intermediate_size=32,
    moe_router_dtype="fp64",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.01,
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.1,
)
LAYOUTS = {
    "tp2": dict(tensor_model_parallel_size=2),
    "tp2-sp": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": dict(pipeline_model_parallel_size=2),
    "cp2": dict(context_parallel_size=2),
    "zero1": {},
    "fsdp2": {},
}
DATA_PARALLEL = {
    "zero1": DataParallelConfig(use_distributed_optimizer=True),
    "fsdp2": DataParallelConfig(use_torch_fsdp2=True),
}


def config_of(layout: str, metrics: Path, **checkpoint: Any) -> RunConfig:
    config = tiny_run(
        model=MODEL,
        training=dict(train_iters=6, exit_interval=checkpoint.pop("until", None)),
        checkpoint=checkpoint,
        metrics=metrics,
    )
    return replace(
        config,
        parallel=ParallelConfig(distributed_backend="gloo", **LAYOUTS.get(layout, {})),  # type: ignore[arg-type]
        data_parallel=DATA_PARALLEL.get(layout, DataParallelConfig()),
        logging=replace(config.logging, log_interval=1),
    )


def _run(
    rank: int, world_size: int, layout: str, metrics: Path, checkpoint: dict[str, Any]
) -> None:
    run_to_end(config_of(layout, metrics, **checkpoint))


def outcome(path: Path) -> list[list[float]]:
    names = ("lm_loss", "grad_norm", "load_balancing_loss", "z_loss", "expert_imbalance")
    found = [[row[name] for name in names] for row in rows(path)]
    for row in rows(path):
        assert row["activation_bytes_predicted"] == row["activation_bytes_measured"]
    return found


@pytest.mark.runs(daily=2, ci=6)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(layout: str, tmp_path: Path) -> None:
    """Losses, the biases' steps (which the later choices show), and kept bytes to the byte."""
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run_ranks(_run, 1, "", one, {}, detail=False)
    run_ranks(_run, 2, layout, other, {}, detail=False)
    for expected, found in zip(outcome(one), outcome(other), strict=True):
        assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize("action", ["shared_experts", "moe+shared_experts"])
def test_only_a_replay_of_the_router_keeps_its_choice_on_the_device(
    action: str, tmp_path: Path
) -> None:
    metrics = tmp_path / "run.jsonl"
    config = replace(
        config_of("", metrics, until=1),
        recompute=RecomputeConfig(recompute_policy=f"*:{action}@host"),
    )
    run_to_end(config)
    assert outcome(metrics)
