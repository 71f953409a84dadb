"""Times a training step in every layout over ranks, beside one process at the same global batch.

The table has three figures for each layout. The step's time comes from rounds in which every layout
has its turn. The bytes that a rank receives in a step are counted and also predicted. The third
figure is the bytes of weights, gradients and optimizer states that a rank keeps between steps.
The ranks are processes on this machine's CPU, which the program starts itself. They communicate
through gloo. benchmarks/README.md explains how to read the table.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # runs from a clone in which nothing was installed

from benchmarks.engines import DTYPES, LEARNING_RATE, SEED, Setting, our_model
from benchmarks.harness import (
    Progress,
    benchmark_parser,
    clock_of,
    heading,
    new_report,
    parse_benchmark,
    write_report,
)
from benchmarks.traffic import Traffic, foretold
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.optimizer_settings import OptimizerConfig
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
MIB = 2.0**20


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
    optimizer = Optimizer(model, OptimizerConfig(), parallel, layout.data_parallel)
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
    own = MicroBatch(*(select(tensor, spans, 1) for tensor in batch))
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


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one layout. Bytes are those of rank 0.

    time_ratio: its time over that of one process, as (median, least, most) of the rounds.
    received_bytes, foretold_bytes: the received bytes of a step by kind of collective, counted and
        predicted. No prediction exists (None) for layouts that are not data-parallel.
    messages: the number of collectives of a step.
    """

    dtype: str
    dropout: float
    layout: str
    ranks: int
    ms: float
    time_ratio: tuple[float, float, float]
    received_bytes: dict[str, int]
    foretold_bytes: dict[str, int] | None
    messages: int
    kept: Kept
    loss: float
    samples_ms: list[float]


def measure(setting: Setting, args: argparse.Namespace, progress: Progress) -> list[Row]:
    """Measures all layouts of one setting. Returns the rows on rank 0, and [] on other ranks.

    All ranks run this at the same time. A rank that has no part in a layout waits.
    """
    title, rank = f"{setting.dtype}, dropout {setting.dropout}", dist.get_rank()
    engines: list[Engine] = []
    for name, layout in layouts(args.ddp_bucket_size, setting.shape.num_layers).items():
        if layout.parallel.context_parallel_size > 1 and setting.dropout > 0.0:
            progress(f"{name} left out: its flash attention has no dropout")
            continue
        # Creating groups is collective, so every rank enters every layout, also without an engine
        # in it. The groups stay alive after the block.
        with state_of(layout) as parallel:
            if rank < layout.ranks and (not args.layouts or name in (ALONE, *args.layouts)):
                engines.append(
                    build_engine(
                        name, layout, setting, setting.batch(), args.micro_batches, parallel
                    )
                )
    names = [engine.name for engine in engines] if rank == 0 else []
    agreed: list[Any] = [names]
    dist.broadcast_object_list(agreed)
    by_name = {engine.name: engine for engine in engines}
    found = {name: _counted(by_name.get(name)) for name in agreed[0]}
    samples = time_in_rounds(agreed[0], by_name, args, title, progress)
    if rank:
        return []
    return [
        Row(
            dtype=setting.dtype,
            dropout=setting.dropout,
            layout=name,
            ranks=by_name[name].layout.ranks,
            ms=statistics.median(times),
            samples_ms=times,
            kept=by_name[name].kept(),
            **found[name],
            time_ratio=spread(times, samples[ALONE]),
            foretold_bytes=_foretold(by_name[name], setting, args.micro_batches),
        )
        for name, times in samples.items()
    ]


def _counted(engine: Engine | None) -> dict[str, Any]:
    """Returns the counted bytes, messages and the loss of the engine's second step.

    The first step is not typical: it gathers FSDP2 units once more, to inspect them.
    """
    if engine is None:
        return {}
    engine.step()
    with torch.autograd.set_multithreading_enabled(False), Traffic() as traffic:
        loss = engine.step().item()
    return dict(
        received_bytes=dict(traffic.bytes), messages=sum(traffic.messages.values()), loss=loss
    )


def _foretold(engine: Engine, setting: Setting, micro_batches: int) -> dict[str, int] | None:
    """Returns the predicted bytes by kind, or None for a layout that no formula covers."""
    ranks = engine.layout.ranks
    if ranks == 1:
        return {}
    if engine.layout.parallel.data_parallel_size(ranks) == 1:
        return None
    width = DTYPES[setting.dtype].itemsize
    return dict(
        foretold(
            engine.layout.data_parallel,
            engine.shapes,
            ranks=ranks,
            micro_batches=micro_batches // ranks,
            element_bytes=width,
        )
    )


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


def spread(times: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    ratios = [time / other for time, other in zip(times, others, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def run_rank(args: argparse.Namespace, rank: int, folder: str) -> Iterator[list[Row]]:
    """Yields the rows of each setting in turn, as one of the ranks."""
    torch.set_num_threads(args.threads or max(1, args.cpu_threads // args.ranks))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=args.ranks,
        timeout=datetime.timedelta(minutes=10),
    )
    try:
        for dtype in args.dtype:
            for dropout in args.dropout:
                setting = Setting(
                    shape=args.shape, device=args.device, dtype=dtype, dropout=dropout
                )
                yield measure(setting, args, Progress(quiet=rank > 0))
    finally:
        dist.destroy_process_group()


def other_rank(args: argparse.Namespace, rank: int, folder: str) -> None:
    """Runs another rank, in a process that `main` starts."""
    for _ in run_rank(args, rank, folder):
        pass


HEADER = (
    f"{'':38}{'time / one':17}{'received':>10} {'in':>4}{'weights':>9}{'grads':>8}{'states':>8}\n"
    f"{'layout':38}{'process':17}{'MiB':>10} {'':>4}{'MiB':>9}{'MiB':>8}{'MiB':>8}"
)


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of one setting."""
    for row in rows:
        ratio = "{:.2f} ({:.2f}-{:.2f})".format(*row.time_ratio)
        kept = "".join(
            f"{size / MIB:{width}.1f}" for size, width in zip(row.kept, (9, 8, 8), strict=True)
        )
        yield (
            f"{row.layout:38}{ratio:17}{sum(row.received_bytes.values()) / MIB:10.2f} "
            f"{row.messages:4}{kept}"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("parallel.py", (__doc__ or "").partition("\n")[0], repeats=9)
    parser.set_defaults(dropout=[0.0])
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=4,
        metavar="N",
        help="of a step, over all ranks; default: 4",
    )
    parser.add_argument(
        "--ddp-bucket-size",
        type=int,
        metavar="N",
        help="parameters of a bucket where reductions overlap; default: a quarter of the model's",
    )
    parser.add_argument(
        "--layouts", nargs="+", default=[], metavar="NAME", help='only these rows and "one process"'
    )
    args = parse_benchmark(parser, argv)
    args.ranks = max(layout.ranks for layout in layouts(1).values())
    args.cpu_threads = torch.get_num_threads()
    if args.device.type != "cpu":
        parser.error(f"the ranks are processes on the CPU: give --device cpu (got {args.device})")
    if args.micro_batches < args.ranks or args.micro_batches % args.ranks:
        parser.error(
            f"--micro-batches {args.micro_batches} must be a multiple of the {args.ranks} "
            "ranks that share them"
        )
    if unknown := sorted(set(args.layouts) - layouts(1).keys()):
        parser.error(f"--layouts {unknown[0]!r} must be one of {', '.join(layouts(1))}")
    shape = args.shape
    total = (
        12 * shape.num_layers * shape.hidden_size**2
        + (shape.vocab_size + shape.seq_length) * shape.hidden_size
    )
    args.ddp_bucket_size = args.ddp_bucket_size or math.ceil(total / 4)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 0, or 1 if the received bytes differ from the prediction."""
    args = parse(argv)
    report: dict[str, Any] = {
        **new_report(args),
        "micro_batches": args.micro_batches,
        "ddp_bucket_size": args.ddp_bucket_size,
    }
    print(
        heading(report),
        f"{args.micro_batches} micro-batches of the batch above in a step",
        sep="\n",
        flush=True,
    )
    status, spawn = 0, multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        others = [
            spawn.Process(target=other_rank, args=(args, rank, folder), daemon=True)
            for rank in range(1, args.ranks)
        ]
        try:
            for process in others:
                process.start()
            for rows in run_rank(args, 0, folder):
                alone = next(row for row in rows if row.layout == ALONE)
                print(
                    f"\n{alone.dtype}, dropout {alone.dropout}: one process takes "
                    f"{alone.ms:.1f} ms",
                    HEADER,
                    *table(rows),
                    sep="\n",
                    flush=True,
                )
                for row in rows:
                    if row.foretold_bytes is not None and row.received_bytes != row.foretold_bytes:
                        print(
                            f"{row.layout}: {row.foretold_bytes} bytes were foretold, "
                            f"{row.received_bytes} received",
                            file=sys.stderr,
                        )
                        status = 1
                report["rows"] += [asdict(row) | {"kept": row.kept._asdict()} for row in rows]
                write_report(report, args.json)
            for process in others:
                process.join(60.0)
        finally:
            for process in others:
                process.kill()
                process.join()
    return status


if __name__ == "__main__":
    sys.exit(main())
