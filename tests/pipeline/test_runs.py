"""Whole runs as a pipeline, through the trainer: losses, checkpoints, resuming, what is logged and
what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from arguments import parse_args
from megatron_lite.checkpointing.load import load_checkpoint
from megatron_lite.config.checks import InputError
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.pipeline_memory import rank_memory, ticks
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.build_trainer import build_trainer
from tests.support.models import whole_tensors
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run, with_checkpoint


def in_layout(config: RunConfig, **sizes: object) -> RunConfig:
    return replace(config, parallel=ParallelConfig(distributed_backend="gloo", **sizes))


PIPELINE = dict(pipeline_model_parallel_size=2)
INTERLEAVED = dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)


def _state(rank: int, world_size: int, config: RunConfig, train: bool) -> dict[str, Tensor]:
    """Whole weights and optimizer states of this rank's stages, but for what it holds a copy of."""
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)
        if train:
            trainer.run()
        else:
            load_checkpoint(trainer.start, config, parallel, trainer.model, trainer.optimizer)
        held = {
            f"{name}/{key}": (value, spec_of(parameter))
            for name, parameter in trainer.model.named_parameters()
            for key, value in {"weight": parameter, **trainer.optimizer.states[name]}.items()
        }
        return whole_tensors(
            {name: value for name, (value, _) in held.items()},
            {name: spec for name, (_, spec) in held.items()},
            parallel,
        )


@pytest.mark.long
@pytest.mark.parametrize("untied", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_checkpoint_loads_bit_for_bit_in_every_layout(tmp_path: Path, untied: bool):
    config = tiny_run(
        model=dict(num_layers=4, untie_embeddings_and_output_weights=untied),
        training=dict(train_iters=2, bf16=True),
        checkpoint=dict(save=str(tmp_path)),
    )
    of_ranks = run_ranks(
        _state,
        4,
        in_layout(config, **INTERLEAVED, tensor_model_parallel_size=2),
        True,
        detail=False,
    )
    saved = {name: value for one in of_ranks for name, value in one.items()}
    for one in of_ranks:  # the copies of a tied embedding are alike
        assert all(torch.equal(value, saved[name]) for name, value in one.items())
    load = with_checkpoint(config, load=str(tmp_path))
    for ranks, sizes in (
        (1, {}),
        (2, dict(tensor_model_parallel_size=2)),
        (4, dict(pipeline_model_parallel_size=4)),
        (2, dict(PIPELINE, decoder_first_pipeline_num_layers=1)),
    ):
        loaded = run_ranks(_state, ranks, in_layout(load, **sizes), False, detail=False)
        assert {name for one in loaded for name in one} == saved.keys()
        assert all(
            torch.equal(value, saved[name]) for one in loaded for name, value in one.items()
        ), sizes


def test_micro_batches_that_do_not_fit_the_interleaved_order_are_one_error():
    config = in_layout(
        tiny_run(model=dict(num_layers=4), training=dict(global_batch_size=3)), **INTERLEAVED
    )

    def work(rank, world_size):
        with pytest.raises(
            InputError,
            match="--global-batch-size: a batch of 3 samples.*--pipeline-model-parallel-size 2",
        ):
            run_to_end(config)
        return True

    assert run_ranks(work, 2) == [True, True]


SIZES = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 "
    "--micro-batch-size 1 --vocab-size 99 "
)
KEPT = "--num-microbatches-with-partial-activation-checkpoints 1 "


@pytest.mark.parametrize(("num_chunks", "num_kept"), [(1, 2), (2, 6), (3, 8)])
def test_a_rank_never_holds_more_than_with_the_micro_batches_that_are_priced(num_kept, num_chunks):
    words = (
        SIZES.replace("--num-layers 8", "--num-layers 18")
        + "--pipeline-model-parallel-size 3 --recompute-policy *:full "
        + KEPT.replace("1 ", f"{num_kept} ")
    )
    words += f"--num-virtual-stages-per-pipeline-rank {num_chunks} " if num_chunks > 1 else ""
    config = parse_args((words + "--global-batch-size 120").split()).config
    for rank in range(3):
        longest = max(
            tick.kept_bytes for tick in ticks(config, "cpu", rank=rank, num_microbatches=120)
        )
        assert rank_memory(config, "cpu", rank).held_bytes == longest
