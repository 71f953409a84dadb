"""Whole runs with --context-parallel-size: data, loss, evaluation, checkpoints, reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpointing.load import load_checkpoint
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.models import whole_tensor
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run, with_checkpoint

NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)
LLAMA = dict(
    NO_DROPOUT,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    ffn_hidden_size=48,
    add_bias_linear=False,
    group_query_attention=True,
    num_query_groups=2,
)
ITERATIONS = 10


def shared(config: RunConfig, cp_size: int, **fields: Any) -> RunConfig:
    return replace(
        config, parallel=replace(config.parallel, context_parallel_size=cp_size, **fields)
    )


def run_of(model: dict[str, Any], **fields: Any) -> RunConfig:
    return tiny_run(model=model, training=dict(train_iters=ITERATIONS), **fields)


def validated(rank: int, world_size: int, config: RunConfig) -> float:
    trainer = run_to_end(config)
    assert trainer.datasets.valid is not None
    return trainer.evaluations.loss(trainer.datasets.valid).loss


ZERO_1 = DataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    ("model", "world_size", "layout", "data_parallel"),
    [
        (NO_DROPOUT, 2, {}, DataParallelConfig()),
        pytest.param(
            NO_DROPOUT, 2, {}, DataParallelConfig(use_torch_fsdp2=True), marks=pytest.mark.long
        ),
        (LLAMA, 4, dict(cp_comm_type="allgather"), ZERO_1),
        pytest.param(
            LLAMA,
            4,
            dict(pipeline_model_parallel_size=2),
            DataParallelConfig(),
            marks=pytest.mark.long,
        ),
    ],
    ids=["gpt-cp2", "gpt-cp2-fsdp2", "llama-cp2-dp2-zero1", "llama-cp2-pp2"],
)
def test_ten_losses_and_the_validation_loss_are_those_of_one_rank(
    tmp_path: Path,
    model: dict[str, Any],
    world_size: int,
    layout: dict[str, Any],
    data_parallel: DataParallelConfig,
) -> None:
    alone = validated(0, 1, run_of(model, metrics=tmp_path / "one"))
    config = replace(
        shared(run_of(model, metrics=tmp_path / "several"), 2, **layout),
        data_parallel=data_parallel,
    )
    of_ranks = run_ranks(validated, world_size, config, detail=False)
    expected, found = rows(tmp_path / "one"), rows(tmp_path / "several")
    for field in ("lm_loss", "grad_norm"):
        assert [row[field] for row in found] == pytest.approx(
            [row[field] for row in expected], rel=1e-5
        )
    assert (
        len(found) == ITERATIONS
        and set(of_ranks) == {of_ranks[0]}
        and of_ranks[0] == pytest.approx(alone, rel=1e-5)
    )
    assert {
        row["activation_bytes_predicted"] == row["activation_bytes_measured"] for row in found
    } == {True}


def state(trainer: Any) -> dict[str, Tensor]:
    parameters = dict(trainer.model.named_parameters())
    moments = {
        f"{name}/{key}": (value, parameters[name])
        for name, values in trainer.optimizer.states.items()
        for key, value in values.items()
    }
    return {
        name: whole_tensor(value, like, trainer.parallel)
        for name, (value, like) in {
            **{name: (value, value) for name, value in parameters.items()},
            **moments,
        }.items()
    }


def trained(rank: int, world_size: int, config: RunConfig) -> dict[str, Tensor]:
    return state(run_to_end(config))


def loaded(
    rank: int, world_size: int, config: RunConfig
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)
        notices = load_checkpoint(
            trainer.start, config, parallel, trainer.model, trainer.optimizer
        ).notices
        return state(trainer), notices


def test_a_checkpoint_of_two_context_parallel_ranks_loads_anywhere_and_says_what_starts_anew(
    tmp_path: Path,
) -> None:
    config = tiny_run(
        model=dict(attention_dropout=0.0),
        training=dict(train_iters=3),
        checkpoint=dict(save=str(tmp_path)),
    )
    saved = run_ranks(trained, 2, shared(config, 2))[0]
    for cp_size, tp_size in ((1, 1), (2, 1), (1, 2)):
        other = with_checkpoint(
            shared(config, cp_size, tensor_model_parallel_size=tp_size), load=str(tmp_path)
        )
        found, notices = run_ranks(loaded, cp_size * tp_size, other, detail=False)[0]
        assert found.keys() == saved.keys() and all(
            torch.equal(found[name], saved[name]) for name in saved
        )
        told = [notice for notice in notices if "random-number streams" in notice]
        assert told == (
            []
            if cp_size == 2
            else [
                "the checkpoint was saved on TP 1 x CP 2 x PP 1 x DP 1, this run has "
                f"TP {tp_size} x CP 1 x PP 1 x DP 1: random-number streams (dropout) start "
                "from --seed"
            ]
        )
