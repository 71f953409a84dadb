"""The measured peak of a training step of one rank: what torch's CPU allocator had at most.

    measured = measure(config, parallel)

The trainer's own parts run two steps, and the peak is that of the second one, so that states built
by the first step count. The figure has every tensor of the process, with the allocator's rounding,
and the copies that gloo's collectives make. Memory outside of torch's allocator is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function

from megatron_lite.config.run import RunConfig
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.timing import gloo_has_freed
from megatron_lite.training.apex_kernels import fuse_weight_gradients_
from megatron_lite.training.batches import MicroBatches, document_rules
from megatron_lite.training.build_trainer import build_stages
from megatron_lite.training.loss_mask import masked_mean_of
from megatron_lite.training.step import StageRunner, train_step

STEP = "the measured step"
LEARNING_RATE = 1e-4


class Block(NamedTuple):
    """Memory that was allocated at the peak. where: the operators that allocated it, outermost
    first."""

    num_bytes: int
    where: str


@dataclass(frozen=True, kw_only=True)
class MeasuredPeak:
    """The most bytes that were allocated at once in the step, and the blocks of that moment, the
    largest first."""

    num_bytes: int
    blocks: tuple[Block, ...]


def measure(config: RunConfig, parallel: ParallelState, *, num_microbatches: int) -> MeasuredPeak:
    """Measures this rank's second step. Every rank of the run calls it at the same time.

    num_microbatches: those of one data-parallel rank.
    """
    activities = [ProfilerActivity.CPU]
    # The profiler sees the main thread alone, so gloo's threads must free nothing.
    with (
        gloo_has_freed(),
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        model = build_stages(config, parallel)
        optimizer = Optimizer(model, config.optimizer, parallel, config.data_parallel)
        fuse_weight_gradients_(config.training, parallel, model, optimizer)
        runner = StageRunner.of(config, model, parallel)
        batches = MicroBatches(
            dataset=samples(config),
            consumed_samples=0,
            micro_batch_size=config.training.micro_batch_size,
            num_microbatches=num_microbatches,
            parallel=parallel,
            rules=document_rules(config),
        )
        # The profiler sees the allocations of its own thread and of threads that it starts.
        with torch.autograd.set_multithreading_enabled(False):
            per_token = config.training.calculate_per_token_loss
            masked = masked_mean_of(batches, per_token=per_token)
            step = partial(
                train_step, runner, optimizer, batches, learning_rate=LEARNING_RATE, masked=masked
            )
            step()
            with record_function(STEP):
                step()
    return _peak(profile)


def samples(config: RunConfig) -> _Samples:
    """Returns a dataset of random token ids for the run."""
    return _Samples(config)


class _Samples:
    """A dataset of random token ids."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> np.ndarray:
        size = self._config.data.seq_length + 1
        return np.random.default_rng(index).integers(
            self._config.tokenizer.true_vocab_size, size=size, dtype=np.int64
        )


def _peak(profile: Any) -> MeasuredPeak:
    events = sorted(_events(profile), key=lambda event: event[0])
    alive: dict[int, Block] = {}
    total = most = 0
    at_most: list[Block] = []
    begins, ends = (
        next(time for time, address, _, where in events if address is None and where == mark)
        for mark in ("begin", "end")
    )
    best: int = 0
    # The second pass collects the blocks, since copying them at every event takes too long.
    for collects in (False, True):
        alive.clear()
        total = 0
        for time, address, size, where in events:
            if address is None:
                continue
            if size > 0:
                if address in alive:  # another thread freed it
                    total -= alive[address].num_bytes
                alive[address] = Block(size, where)
                total += size
            elif address in alive:
                total -= alive.pop(address).num_bytes
            if begins <= time <= ends:
                if not collects and total > most:
                    most, best = total, time
                elif collects and time == best and total == most:
                    at_most = list(alive.values())
    return MeasuredPeak(
        num_bytes=most, blocks=tuple(sorted(at_most, key=lambda block: -block.num_bytes))
    )


def _events(profile: Any) -> Iterator[tuple[int, int | None, int, str]]:
    """Yields (time, address, bytes, where) of each allocation, and the marks of the step."""
    pending = [(event, "") for event in profile.profiler.kineto_results.experimental_event_tree()]
    while pending:
        event, where = pending.pop()
        if event.name == STEP:
            yield event.start_time_ns, None, 0, "begin"
            yield event.end_time_ns, None, 0, "end"
        inside = f"{where} > {event.name}" if where else event.name
        pending += [(child, inside) for child in event.children]
        if not type(event.extra_fields).__name__.endswith("Allocation"):
            continue
        fields = event.extra_fields
        yield event.start_time_ns, fields.ptr, fields.alloc_size, where
