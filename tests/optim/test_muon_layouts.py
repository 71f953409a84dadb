"""Muon in every layout of ranks, and in whole runs: resumed, loaded elsewhere, under every
recompute policy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.checks import InputError
from megatron_lite.config.optimizer_settings import LossScaleConfig, OptimizerConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.optim.muon_update import STEPS, orthogonalize
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.parameter_spec import ParameterSpec, mark
from megatron_lite.parallel.state import ParallelState
from tests.optim.test_muon import HIGH
from tests.support.equality import difference
from tests.support.models import tp_state
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run, with_checkpoint


class Split(nn.Module):
    """A weight split by rows and one split by columns over 2 ranks, with prescribed gradients."""

    def __init__(self, parallel: ParallelState) -> None:
        super().__init__()
        for dim, name in enumerate(("by_rows", "by_columns")):
            whole = torch.randn(
                8, 12, generator=torch.Generator().manual_seed(dim), dtype=torch.float64
            )
            shard = (
                whole
                if parallel.tp_group is None
                else whole.chunk(2, dim)[parallel.tp_rank].contiguous()
            )
            spec = ParameterSpec(global_shape=(8, 12), tp_dim=dim, matrices=(1,))
            self.register_parameter(name, mark(nn.Parameter(shard), spec))


def _update_split(rank: int, world_size: int, mode: str) -> dict[str, Tensor]:
    """By name the change of this rank's shard in a step of size 1 without weight decay, whose
    gradient is the weight."""
    with tp_state(world_size) as parallel:
        model = Split(parallel)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        optimizer = Optimizer(
            model,
            OptimizerConfig(**HIGH, muon_tp_mode=mode, weight_decay=0.0, clip_grad=0.0),  # type: ignore[arg-type]
            parallel,
        )
        optimizer.zero_grad()
        sum(value.square().sum() / 2 for value in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step(1.0)
        return {name: before[name] - value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("mode", ["duplicated", "blockwise"])
def test_over_tp_ranks_the_whole_matrix_or_each_block_is_orthogonalized(mode: str) -> None:
    """Blocks are matrices of their own, with scales of their own, as in Megatron."""
    updates = run_ranks(_update_split, 2, mode, detail=False)
    for dim, name in enumerate(("by_rows", "by_columns")):
        whole = torch.randn(
            8, 12, generator=torch.Generator().manual_seed(dim), dtype=torch.float64
        )
        blocks = [whole] if mode == "duplicated" else whole.chunk(2, dim)
        expected = torch.cat(
            [
                orthogonalize(block, STEPS["quintic"](5)) * math.sqrt(max(block.shape))
                for block in blocks
            ],
            dim,
        )
        assert difference(expected, torch.cat([update[name] for update in updates], dim)) < 1e-12, (
            name
        )


def muon_run(config: RunConfig, **settings: Any) -> RunConfig:
    return replace(config, optimizer=OptimizerConfig(optimizer="muon", **settings))


REPLICATED = DataParallelConfig()
ZERO1 = DataParallelConfig(use_distributed_optimizer=True)


def _run(rank: int, world_size: int, config: RunConfig) -> None:
    run_to_end(config)


@pytest.mark.parametrize(
    ("ranks", "sizes", "data_parallel", "training"),
    [
        (1, {}, REPLICATED, dict(fp16=True)),
        pytest.param(
            4,
            dict(tensor_model_parallel_size=2, sequence_parallel=True),
            ZERO1,
            dict(bf16=True),
            marks=pytest.mark.long,
        ),
    ],
    ids=["fp16", "TP 2, ZeRO-1, bf16"],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    ranks: int,
    sizes: dict[str, Any],
    data_parallel: DataParallelConfig,
    training: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Six iterations, with dropout, in one start and in two: metrics and files."""
    scaling = (
        LossScaleConfig(initial_loss_scale=1024.0) if "fp16" in training else LossScaleConfig()
    )

    def run(name: str, iterations: int, *, load: bool = False) -> None:
        config = tiny_run(
            model=dict(num_layers=4),
            training=dict(train_iters=iterations, eval_iters=0, **training),
            data_parallel=data_parallel,
            metrics=tmp_path / f"{name}.jsonl",
        )
        config = muon_run(
            replace(config, parallel=replace(config.parallel, **sizes), loss_scaling=scaling),
            muon_nesterov=True,
        )
        folder = str(tmp_path / name)
        config = with_checkpoint(
            config, save=folder, save_interval=3, load=folder if load else None
        )
        if ranks == 1:
            run_to_end(config)
        else:
            run_ranks(_run, ranks, config, detail=False)

    run("once", 6)
    run("twice", 3)
    run("twice", 6, load=True)
    assert rows(tmp_path / "twice.jsonl")[-3:] == rows(tmp_path / "once.jsonl")[-3:]
    assert all(row["skipped"] == 0 for row in rows(tmp_path / "once.jsonl"))
    assert step_bytes(tmp_path / "twice", 6) == step_bytes(tmp_path / "once", 6) != {}


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(("saved", "loaded"), [("adam", "muon"), ("muon", "adam")])
def test_states_of_the_other_rule_are_refused_and_may_be_left_behind(
    saved: str, loaded: str, tmp_path: Path
) -> None:
    def config_of(rule: str, **checkpoint: Any) -> RunConfig:
        return replace(
            tiny_run(training=dict(train_iters=2, eval_iters=0), checkpoint=checkpoint),
            optimizer=OptimizerConfig(optimizer=rule),
        )

    run_to_end(config_of(saved, save=str(tmp_path)))
    with pytest.raises(
        InputError,
        match=f"iter_0000002 holds the optimizer states of --optimizer {saved}, from which "
        f"--optimizer {loaded} cannot go on: give --optimizer {saved}, or --no-load-optim",
    ):
        run_to_end(config_of(loaded, load=str(tmp_path)))
    for options in (dict(no_load_optim=True), dict(finetune=True)):
        trainer = run_to_end(config_of(loaded, load=str(tmp_path), **options))
        assert trainer.optimizer.num_updates == (0 if "no_load_optim" in options else 2)
