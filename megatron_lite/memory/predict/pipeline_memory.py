"""The bytes that each pipeline rank holds for backward, action by action of its schedule.

They are those of all its micro-batches in flight. Only hidden states on their way between ranks
come on top (pipeline/executor.py): one [s, b, h] that arrives early, and those whose send has not
ended. Standard library only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.sizes import Sizes, first_like_stage
from megatron_lite.pipeline.order import Action, StepOrder
from megatron_lite.recompute.schedule import stage_plan

from .flops import replay_flops
from .kept_tensors import activation_bytes
from .stage_course import stage_course


class RankSchedule(NamedTuple):
    """The actions of a pipeline rank in a step. stages: its stages, by model chunk.

    whole: the forwards of micro-batches that keep everything.
    """

    stages: tuple[Stage, ...]
    actions: list[Action]
    whole: frozenset[Action]

    @classmethod
    def of(cls, config: RunConfig, rank: int, num_microbatches: int) -> RankSchedule:
        """Returns the schedule of a step with so many micro-batches."""
        own = config.stages_of_rank(rank)
        size = config.parallel.pipeline_model_parallel_size
        order = StepOrder(size, rank, num_microbatches, len(own))
        kept = config.recompute.num_microbatches_with_partial_activation_checkpoints or 0
        return cls(own, order.actions(), order.keeping_all(kept) if kept else frozenset())

    def keeps_all(self, action: Action) -> bool:
        """Returns whether the action's micro-batch keeps everything."""
        return action._replace(kind="forward") in self.whole


class Tick(NamedTuple):
    """The state of a rank after an action.

    in_flight: the number of forwards whose backward has not run.
    kept_bytes: the kept bytes of all of them together.
    most_bytes: the most that was held in the action: what they keep, and what a backward rebuilds.
    """

    action: Action
    in_flight: int
    kept_bytes: int
    most_bytes: int


class RankMemory(NamedTuple):
    """The memory of one pipeline rank.

    kept_bytes: the kept bytes of a step's first micro-batch, in all stages of the rank.
    in_flight: the most forwards, each of one stage, that wait for their backward at once.
    held_bytes: the most bytes that the waiting forwards keep together.
    peak_bytes: the peak: what the waiting forwards keep and what a backward rebuilds.
    """

    stages: tuple[Stage, ...]
    kept_bytes: int
    in_flight: int
    held_bytes: int
    peak_bytes: int


def ticks(config: RunConfig, device: str, *, rank: int, num_microbatches: int) -> Iterator[Tick]:
    """Yields the state of a rank after each action of a step.

    Tables that the layers share, such as rotary tables, are one storage for all micro-batches of a
    stage.
    """
    schedule = RankSchedule.of(config, rank, num_microbatches)

    @cache
    def held_by(chunk: int, keeps_all: bool) -> tuple[int, int, int]:
        """Returns the bytes of tables, of all else that is kept, and of what is rebuilt."""
        stage = schedule.stages[chunk]
        sizes = Sizes.of(config, device, stage)
        # An input in an arena counts with its own bytes.
        plan = replace(stage_plan(config, stage, keeps_all), contiguous=False)
        course = stage_course(plan, sizes)
        kept, own = activation_bytes(plan, sizes), course.forward.kept
        most = max((one.num_bytes for one in course.replays), default=0)
        return kept - own, own, max(0, most - kept)

    number = held = before = 0
    tables = Counter[int]()  # by chunk; the model holds them beyond the step
    for action in schedule.actions:
        forward = action.kind == "forward"
        of_tables, own, rebuilt = held_by(action.chunk, schedule.keeps_all(action))
        sign = 1 if forward else -1
        number, held = number + sign, held + sign * own
        tables |= Counter({action.chunk: of_tables})
        kept = held + tables.total()
        yield Tick(action, number, kept, kept if forward else before + rebuilt)
        before = kept


def rank_memory(config: RunConfig, device: str, rank: int, dp_size: int = 1) -> RankMemory:
    """Returns the memory of one pipeline rank, with the micro-batches that a step of the run has on
    one of so many data-parallel ranks.

    The vocabulary size must be known.
    """
    number = enough_microbatches(config, rank, step_microbatches(config, dp_size))
    course = list(ticks(config, device, rank=rank, num_microbatches=number))
    schedule = RankSchedule.of(config, rank, number)
    kept = (
        activation_bytes(
            stage_plan(config, stage, schedule.keeps_all(Action("forward", 0, chunk))),
            Sizes.of(config, device, stage),
        )
        for chunk, stage in enumerate(schedule.stages)
    )
    most = (max(column) for column in list(zip(*course, strict=True))[1:])
    return RankMemory(schedule.stages, sum(kept), *most)


def step_microbatches(config: RunConfig, dp_size: int = 1) -> int:
    """Returns the micro-batches of a step on one of so many data-parallel ranks.

    If the batch size changes in the run, it is the number of the largest batch. Without
    --global-batch-size it is 1.
    Virtual stages cannot run 1 micro-batch, so with them it is 2p, which fills the pipeline.
    ValueError: the batch is not divisible by the micro-batch size.
    """
    size = config.parallel.pipeline_model_parallel_size
    if config.training.global_batch_size is None and len(config.stages()) > size:
        return 2 * size
    return config.training.most_microbatches(dp_size)


def spared_flops(
    config: RunConfig, num_microbatches: int, *, samples_per_microbatch: int, device: str
) -> int:
    """Returns the replay FLOPs that a step saves because some micro-batches keep everything.

    The figure is the sum over all stages and all their ranks.
    num_microbatches: the micro-batches of a step on one data-parallel rank.
    samples_per_microbatch: the samples of one micro-batch on all data-parallel ranks together.
    """
    spared = 0
    if config.recompute.num_microbatches_with_partial_activation_checkpoints is None:
        return 0
    for rank in range(config.parallel.pipeline_model_parallel_size):
        schedule = RankSchedule.of(config, rank, num_microbatches)
        for chunk, stage in enumerate(schedule.stages):
            sizes = replace(
                Sizes.of(config, device, stage), micro_batch_size=samples_per_microbatch
            )
            number = sum(action.chunk == chunk for action in schedule.whole)
            spared += number * replay_flops(sizes, stage_plan(config, stage))
    return spared


def alike_ranks(config: RunConfig) -> list[int]:
    """Returns for each pipeline rank the first one whose stages are like its own.

    That rank has at least as many forwards in flight, so its peak is no lower.
    """
    kinds = [
        [
            (one.is_first, one.is_last, stage_plan(config, one), first_like_stage(config, one))
            for one in config.stages_of_rank(rank)
        ]
        for rank in range(config.parallel.pipeline_model_parallel_size)
    ]
    return [*map(kinds.index, kinds)]


def enough_microbatches(config: RunConfig, rank: int, most: int) -> int:
    """Returns the micro-batches of a step, or fewer if a rank reaches its peak with fewer.

    most: those of a step.

    From 2p micro-batches on the schedule repeats. If some micro-batches keep everything, schedule
    and windows repeat together after the least common multiple of their lengths.
    """
    size = config.parallel.pipeline_model_parallel_size
    repeats = 0
    if config.recompute.num_microbatches_with_partial_activation_checkpoints is not None:
        num_chunks = len(config.stages_of_rank(rank))
        repeats = math.lcm(config.most_in_flight(most, rank), num_chunks * size) // num_chunks
    return min(most, 2 * size + repeats)
