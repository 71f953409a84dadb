"""Layouts of a model over ranks, and the engine that runs a training step in one of them."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.engines import DTYPES, LEARNING_RATE, SEED, Setting, our_model, our_optimizer
from benchmarks.harness import Progress, clock_of
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import stages_of_rank
from megatron_lite.model.sharding import shard_model_
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.sequence_spans import select
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.pipeline.links import Links
from megatron_lite.training.batches import MicroBatch
from megatron_lite.training.micro_batches import StageRunner
from megatron_lite.training.step import train_step

ALONE = "one process"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A row of the table: its number of ranks and its flags."""

    ranks: int = 2
    parallel: ParallelConfig = field(
        default_factory=lambda: ParallelConfig(distributed_backend="gloo")
    )
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)


def split(**sizes: Any) -> Layout:
    """Returns the layout of two ranks that split one model."""
    return Layout(parallel=ParallelConfig(distributed_backend="gloo", **sizes))


def layouts(bucket_size: int, num_layers: int = 4) -> dict[str, Layout]:
    """Returns all layouts by name.

    bucket_size: the bucket size of layouts with overlapped reductions.
    The layout with virtual stages is left out unless `num_layers` is a multiple of 4.
    """
    overlap = dict(overlap_grad_reduce=True, ddp_bucket_size=bucket_size)
    sharded = dict(use_torch_fsdp2=True)
    rows = {
        ALONE: Layout(ranks=1),
        "TP 2": split(tensor_model_parallel_size=2),
        "TP 2, sequence parallel": split(tensor_model_parallel_size=2, sequence_parallel=True),
        "PP 2": split(pipeline_model_parallel_size=2),
        "PP 2, 2 virtual stages": split(
            pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2
        ),
        "CP 2": split(context_parallel_size=2),
        "DP 2": Layout(),
        "DP 2, overlap": Layout(data_parallel=DataParallelConfig(**overlap)),
        "DP 2, distributed optimizer": Layout(
            data_parallel=DataParallelConfig(use_distributed_optimizer=True)
        ),
        "DP 2, distributed optimizer, overlap": Layout(
            data_parallel=DataParallelConfig(
                use_distributed_optimizer=True, overlap_param_gather=True, **overlap
            )
        ),
        "FSDP 2": Layout(data_parallel=DataParallelConfig(**sharded)),
        "FSDP 2, no reshard": Layout(
            data_parallel=DataParallelConfig(torch_fsdp2_reshard_after_forward=False, **sharded)
        ),
        "FSDP 2, memory-efficient": Layout(
            data_parallel=DataParallelConfig(fsdp_memory_efficient_wrapping=True, **sharded)
        ),
    }
    return {name: row for name, row in rows.items() if "virtual" not in name or num_layers % 4 == 0}


class Kept(NamedTuple):
    """The bytes that a rank holds between two steps."""

    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A layout on this rank. shapes: the shapes of the parameters before FSDP2 shards them."""

    name: str
    layout: Layout
    model: ModelStages
    optimizer: Optimizer
    step: Callable[[], Tensor]
    shapes: Mapping[str, Sequence[int]]

    def kept(self) -> Kept:
        """Returns the bytes kept after a step.

        Masters of bf16 weights count for the optimizer. Masters that are the weights themselves
        count for the weights only.
        """
        weights = {
            _storage(local(parameter)): _num_bytes(local(parameter))
            for parameter in self.model.parameters()
        }
        gradients = {
            _storage(piece.grad): _num_bytes(piece.grad) for piece in self.optimizer.layout.pieces
        }
        states = {
            _storage(value): _num_bytes(value)
            for state in self.optimizer.states.values()
            for value in state.values()
        }
        return Kept(
            sum(weights.values()),
            sum(gradients.values()),
            sum(size for storage, size in states.items() if storage not in weights),
        )


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's part of a parameter, which FSDP2 may have sharded."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def build_engine(
    name: str,
    layout: Layout,
    setting: Setting,
    batch: MicroBatch,
    micro_batches: int,
    parallel: ParallelState,
) -> Engine:
    """Returns the engine: its step is train_step over this rank's part of the micro-batches.

    All micro-batches are the same batch. micro_batches: their number in a step, over all ranks.
    """
    config, shape = layout.parallel, setting.shape
    model = ModelStages(
        [
            our_model(setting, parallel, sequence_parallel=config.sequence_parallel, stage=stage)
            for stage in stages_of_rank(config, shape.num_layers, parallel.pp_rank)
        ]
    )
    shapes = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    for chunk in model:
        shard_model_(chunk, parallel, layout.data_parallel)
    optimizer = our_optimizer(model, parallel, layout.data_parallel)
    links = None
    if parallel.pp_size > 1:
        links = Links(
            parallel.pp_direction_groups,
            shape=(shape.seq_length, shape.batch_size, shape.hidden_size),
            dtype=DTYPES[setting.dtype],
            device=parallel.device,
        )
    runner = StageRunner(model, parallel, links=links)
    spans = next(iter(model)).context.cp.spans(shape.seq_length // parallel.cp_size)
    own = MicroBatch(select(batch.tokens, spans, 1), select(batch.labels, spans, 1))
    mine = micro_batches // parallel.dp_size

    def step() -> Tensor:
        return train_step(runner, optimizer, (own,) * mine, learning_rate=LEARNING_RATE).loss

    return Engine(
        name=name, layout=layout, model=model, optimizer=optimizer, step=step, shapes=shapes
    )


def state_of(layout: Layout) -> Any:
    """Returns a context manager that yields this rank's state in the layout.

    The state of a layout of one rank has no groups.
    """
    if layout.ranks > 1:
        return parallel_state(layout.parallel, seed=SEED)
    device = torch.device("cpu")
    return contextmanager(
        lambda: (yield ParallelState(device=device, rng=RngStreams(device, seed=SEED)))
    )()


def time_in_rounds(
    names: Sequence[str],
    engines: Mapping[str, Engine],
    args: argparse.Namespace,
    title: str,
    progress: Progress,
) -> dict[str, list[float]]:
    """Returns the milliseconds of every layout in every round, on the slowest rank.

    Each round begins with another layout.
    """
    clock = clock_of(args)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.repeats):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            progress(f"{title}: round {number + 1} of {args.repeats}, {name}")
            gc.collect()
            dist.barrier()
            engine = engines.get(name)
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, 0.0 if engine is None else clock.ms(engine.step))
            samples[name].append(max(of_ranks))
    return samples
