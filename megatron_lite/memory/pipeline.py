"""What each pipeline rank holds for backward: its micro-batches in flight, action by action, as the schedule has them.

Only hidden states on their way between ranks come on top (pipeline/links.py): one [s, b, h] that arrives early, and those that
have not left yet. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, stages_of_rank
from megatron_lite.memory.activations import ROTARY_TABLES, activation_bytes, activation_terms
from megatron_lite.memory.layer_tensors import Sizes
from megatron_lite.memory.peak import peak
from megatron_lite.pipeline.order import Action, keeping_all, order
from megatron_lite.recompute.plan import RecomputePlan, keep_everything
from megatron_lite.recompute.schedule import plan_stage


class Tick(NamedTuple):
    """After an action. in_flight: forwards whose backward has not run. kept_bytes: of all of them together."""

    action: Action
    in_flight: int
    kept_bytes: int


class RankMemory(NamedTuple):
    """One pipeline rank. kept_bytes: of one micro-batch in all its stages. in_flight: the most forwards that wait, each of one
    stage. held_bytes: what they keep at the fullest; peak_bytes: with what a backward rebuilds."""

    rank: int
    stages: tuple[Stage, ...]
    kept_bytes: int
    in_flight: int
    held_bytes: int
    peak_bytes: int


def ticks(config: RunConfig, device: str, *, rank: int, num_microbatches: int) -> Iterator[Tick]:
    """What a rank keeps after each action of a step. Rotary tables are one storage for all micro-batches of a stage."""
    stages = stages_of_rank(config.parallel, config.model.num_layers, rank)
    actions, whole = _schedule(config, rank, num_microbatches, len(stages))
    kept: dict[tuple[int, bool], int] = {}
    tables: dict[int, int] = {}
    for chunk, stage in enumerate(stages):
        for keeps_all in {action in whole for action in actions if action.kind == "forward"}:
            own = {False: 0, True: 0}  # by whether it is a rotary table
            for term in activation_terms(config.model, _plan(config, stage, keeps_all), _sizes(config, device, stage)):
                own[term.tensor.name == ROTARY_TABLES] += 0 if term.on_host else term.num_bytes
            kept[chunk, keeps_all], tables[chunk] = own[False], max(tables.get(chunk, 0), own[True])
    number = held = 0
    for action in actions:
        sign = 1 if action.kind == "forward" else -1
        number += sign
        held += sign * kept[action.chunk, action._replace(kind="forward") in whole] + tables.pop(action.chunk, 0)
        yield Tick(action, number, held)


def ranks_memory(config: RunConfig, device: str) -> tuple[RankMemory, ...]:
    """Of every pipeline rank."""
    return tuple(rank_memory(config, device, rank) for rank in range(config.parallel.pipeline_model_parallel_size))


def rank_memory(config: RunConfig, device: str, rank: int) -> RankMemory:
    """Of one pipeline rank, with micro-batches enough to fill the pipeline. The vocabulary must be known."""
    size = config.parallel.pipeline_model_parallel_size
    stages = stages_of_rank(config.parallel, config.model.num_layers, rank)
    num_microbatches = 2 * size  # the window repeats from there on
    _, whole = _schedule(config, rank, num_microbatches, len(stages))
    all_ticks = list(ticks(config, device, rank=rank, num_microbatches=num_microbatches))
    rebuilt: dict[tuple[int, bool], int] = {}

    def rebuilds(action: Action) -> int:
        chunk, keeps_all = action.chunk, action._replace(kind="forward") in whole
        if (chunk, keeps_all) not in rebuilt:
            plan, sizes = _plan(config, stages[chunk], keeps_all), _sizes(config, device, stages[chunk])
            rebuilt[chunk, keeps_all] = (peak(config.model, plan, sizes).held_bytes
                                         - activation_bytes(config.model, plan, sizes))
        return rebuilt[chunk, keeps_all]

    one = sum(activation_bytes(config.model, _plan(config, stage, False), _sizes(config, device, stage)) for stage in stages)
    return RankMemory(rank=rank, stages=stages, kept_bytes=one, in_flight=max(tick.in_flight for tick in all_ticks),
                      held_bytes=max(tick.kept_bytes for tick in all_ticks),
                      peak_bytes=max(before.kept_bytes + rebuilds(tick.action)
                                     for before, tick in itertools.pairwise(all_ticks) if tick.action.kind == "backward"))


def _schedule(config: RunConfig, rank: int, num_microbatches: int, chunks: int) -> tuple[list[Action], frozenset[Action]]:
    """The actions of a step, and the forwards that keep everything."""
    size = config.parallel.pipeline_model_parallel_size
    num_kept = config.recompute.num_microbatches_with_partial_activation_checkpoints or 0
    return (order(size=size, rank=rank, num_microbatches=num_microbatches, chunks=chunks),
            keeping_all(size=size, rank=rank, num_microbatches=num_microbatches, num_kept=num_kept, chunks=chunks))


def _plan(config: RunConfig, stage: Stage, keeps_all: bool) -> RecomputePlan:
    return keep_everything(stage.num_layers) if keeps_all else plan_stage(config.recompute, stage.num_layers, stage.number)


def _sizes(config: RunConfig, device: str, stage: Stage) -> Sizes:
    return Sizes.of(config, device=device, stage=stage)
