"""Trains small models as a pipeline, in any layout of ranks, and on one rank."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.stages import stages
from megatron_lite.model.embedding import residual_dtype
from megatron_lite.model.gpt import ModelStages
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import parallel_state
from megatron_lite.pipeline.executor import Links
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.training.batches import MicroBatch
from megatron_lite.training.step import StageRunner
from tests.support.models import (
    BATCH,
    SEQ_LENGTH,
    build_tiny_model,
    sample_tokens,
    specs_of,
    whole_tensors,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes of the parallel axes. num_chunks: the number of stages on each pipeline rank."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    num_chunks: int = 1
    sequence_parallel: bool = False
    first: int | None = None  # layers of the first pipeline rank
    cut: str | None = None  # --pipeline-model-parallel-layout, instead of `first` and `num_chunks`

    @property
    def ranks(self):
        return self.tp * self.pp * self.dp

    @property
    def config(self):
        return ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            num_virtual_stages_per_pipeline_rank=self.num_chunks if self.num_chunks > 1 else None,
            decoder_first_pipeline_num_layers=self.first,
            pipeline_model_parallel_layout=self.cut,
            sequence_parallel=self.sequence_parallel,
            distributed_backend="gloo",
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of a training.

    losses, grad_norms: the figures of each step, the same on every rank.
    first_grads: the first step's gradients of this rank's stages, as whole tensors.
    weights: the final weights of this rank's stages, as whole tensors.
    """

    losses: list[float]
    grad_norms: list[float]
    first_grads: dict[str, Tensor]
    weights: dict[str, Tensor]


@contextmanager
def runner_of(
    layout,
    config,
    *,
    dtype=torch.float64,
    num_kept=0,
    overlap=True,
    recompute=None,
    loss_chunk_size=None,
    everywhere=False,
):
    """Yields the runner of this rank's stages, in the initialised default group, if one exists."""
    with parallel_state(layout.config, seed=7) as parallel:
        chunks = [
            build_tiny_model(
                config,
                parallel,
                sequence_parallel=layout.sequence_parallel,
                dtype=dtype,
                stage=stage,
                plan=plan_stage(recompute or RecomputeConfig(), stage.num_layers, stage.number),
                loss_chunk_size=loss_chunk_size,
            )
            for stage in stages(layout.config, config.num_layers)
            if stage.rank == parallel.pp_rank
        ]
        seq_length = SEQ_LENGTH // layout.tp if layout.sequence_parallel else SEQ_LENGTH
        links = (
            None
            if layout.pp == 1
            else Links(
                parallel.pp_direction_groups,
                shape=(seq_length, BATCH, config.hidden_size),
                dtype=residual_dtype(config, chunks[0].context),
                device=parallel.device,
            )
        )
        yield StageRunner(
            ModelStages(chunks),
            parallel,
            links=links,
            num_kept=num_kept,
            overlap=overlap,
            everywhere=everywhere,
        )


def train(layout, config, *, steps, micro_batches, data_parallel=None, **options):
    """Trains by AdamW over `micro_batches` micro-batches in all, the same in each step.

    data_parallel: the layout of the optimizer. With it the result has no first gradients, since the
        layout may shard them.
    """
    with runner_of(layout, config, **options) as runner:
        parallel = runner.parallel
        optimizer = Optimizer(runner.model, OptimizerConfig(), parallel, data_parallel)
        # All ranks together have the same micro-batches as a single process.
        own = range(parallel.dp_rank, micro_batches, parallel.dp_size)
        samples = [MicroBatch(*sample_tokens(number)) for number in own]
        losses, grad_norms, first_grads = [], [], {}
        for step in range(steps):
            optimizer.zero_grad()
            loss = runner.train(
                samples, loss_factor=1.0 / micro_batches, before_last=optimizer.sync_next_backward
            )
            losses.append(
                all_reduce_(all_reduce_(loss, parallel.dp_group), parallel.pp_group).item()
            )
            if step == 0 and data_parallel is None:
                optimizer.layout.gradients.reduce_()
                first_grads = whole_tensors(
                    optimizer.layout.gradients.grads, specs_of(runner.model), parallel
                )
                optimizer.zero_grad()
                runner.train(samples, loss_factor=1.0 / micro_batches)
            grad_norms.append(optimizer.step(learning_rate=0.003).grad_norm.item())
        optimizer.finish()
        parameters = dict(runner.model.named_parameters())
        weights = whole_tensors(parameters, specs_of(runner.model), parallel)
        return Trained(
            losses=losses, grad_norms=grad_norms, first_grads=first_grads, weights=weights
        )
