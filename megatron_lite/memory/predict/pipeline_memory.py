"""The bytes that each pipeline rank holds for backward, action by action of its schedule.

They are those of all its micro-batches in flight. Only hidden states on their way between ranks
come on top (pipeline/links.py): one [s, b, h] that arrives early, and those whose send has not
ended. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, most_in_flight, stages, stages_of_rank
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import replay_flops
from megatron_lite.memory.predict.kept_tensors import activation_bytes, activation_terms
from megatron_lite.memory.predict.peak import peak
from megatron_lite.pipeline.order import Action, keeping_all, order
from megatron_lite.recompute.recompute_plan import RecomputePlan, keep_everything
from megatron_lite.recompute.schedule import plan_stage


class Tick(NamedTuple):
    """The state of a rank after an action.

    in_flight: the number of forwards whose backward has not run.
    kept_bytes: the kept bytes of all of them together.
    """

    action: Action
    in_flight: int
    kept_bytes: int


class RankMemory(NamedTuple):
    """The memory of one pipeline rank.

    kept_bytes: the kept bytes of a step's first micro-batch, in all stages of the rank.
    in_flight: the most forwards, each of one stage, that wait for their backward at once.
    held_bytes: the most bytes that the waiting forwards keep together.
    peak_bytes: the peak: what the waiting forwards keep and what a backward rebuilds.
    """

    rank: int
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
    own_stages = stages_of_rank(config.parallel, config.model.num_layers, rank)
    actions, whole = _schedule(config, rank, num_microbatches, len(own_stages))
    kept: dict[tuple[int, bool], int] = {}
    tables: dict[int, int] = {}
    for chunk, stage in enumerate(own_stages):
        for keeps_all in {action in whole for action in actions if action.kind == "forward"}:
            own = {False: 0, True: 0}  # by whether it is a table that all layers share
            for term in activation_terms(
                config.model, _plan(config, stage, keeps_all), _sizes(config, device, stage)
            ):
                table = term.tensor.shared and not term.tensor.given
                own[table] += 0 if term.on_host else term.num_bytes
            kept[chunk, keeps_all], tables[chunk] = own[False], max(tables.get(chunk, 0), own[True])
    # A stage's first forward adds its shared tables, hence the pop. Nothing subtracts them again,
    # because the model holds them beyond the step.
    number = held = 0
    for action in actions:
        sign = 1 if action.kind == "forward" else -1
        number += sign
        held += sign * kept[action.chunk, action._replace(kind="forward") in whole] + tables.pop(
            action.chunk, 0
        )
        yield Tick(action, number, held)


def step_microbatches(config: RunConfig) -> int:
    """Returns the micro-batches of a step if one data-parallel rank runs --global-batch-size alone.

    If the batch size changes in the run, it is the number of the largest batch. Without
    --global-batch-size it is 1.
    Virtual stages cannot run 1 micro-batch, so with them it is 2p, which fills the pipeline.
    ValueError: the batch is not divisible by the micro-batch size.
    """
    size = config.parallel.pipeline_model_parallel_size
    if config.training.global_batch_size is not None:
        return config.training.most_microbatches(1)
    return 1 if len(stages(config.parallel, config.model.num_layers)) == size else 2 * size


def ranks_memory(config: RunConfig, device: str) -> tuple[RankMemory, ...]:
    """Returns the memory of every pipeline rank."""
    return tuple(
        rank_memory(config, device, rank)
        for rank in range(config.parallel.pipeline_model_parallel_size)
    )


def fullest_rank(config: RunConfig, device: str) -> RankMemory:
    """Returns the memory of the rank with the highest peak; of several equal ones the first."""
    found = (rank_memory(config, device, rank) for rank in distinct_ranks(config))
    return max(found, key=lambda memory: memory.peak_bytes)


def recomputing_microbatches(config: RunConfig, num_microbatches: int) -> tuple[int, ...]:
    """Returns, for each stage of the model, how many micro-batches follow the recompute policy.

    The others of the step keep everything
    (--num-microbatches-with-partial-activation-checkpoints).
    """
    all_stages = stages(config.parallel, config.model.num_layers)
    if config.recompute.num_microbatches_with_partial_activation_checkpoints is None:
        return (num_microbatches,) * len(all_stages)
    size = config.parallel.pipeline_model_parallel_size
    whole = [
        _schedule(config, rank, num_microbatches, len(all_stages) // size)[1]
        for rank in range(size)
    ]
    return tuple(
        num_microbatches - sum(action.chunk == stage.chunk for action in whole[stage.rank])
        for stage in all_stages
    )


def spared_flops(
    config: RunConfig, num_microbatches: int, *, samples_per_microbatch: int, device: str
) -> int:
    """Returns the replay FLOPs that a step saves because some micro-batches keep everything.

    The figure is the sum over all stages and all their ranks.
    num_microbatches: the micro-batches of a step on one data-parallel rank.
    samples_per_microbatch: the samples of one micro-batch on all data-parallel ranks together.
    """
    counts, parallel = recomputing_microbatches(config, num_microbatches), config.parallel
    return sum(
        (num_microbatches - count)
        * replay_flops(
            config.model,
            _plan(config, stage, False),
            batch=samples_per_microbatch,
            seq_length=config.data.seq_length,
            device=device,
            tp_size=parallel.tensor_model_parallel_size,
            cp_size=parallel.context_parallel_size,
            first_layer=stage.first_layer,
        )
        for stage, count in zip(stages(parallel, config.model.num_layers), counts, strict=True)
        if count < num_microbatches
    )


def distinct_ranks(config: RunConfig) -> Iterator[int]:
    """Yields the pipeline ranks, without those whose stages are like those of an earlier one.

    Such a rank has fewer forwards in flight, so its peak is not higher.
    """
    seen = set()
    for rank in range(config.parallel.pipeline_model_parallel_size):
        own = stages_of_rank(config.parallel, config.model.num_layers, rank)
        alike = tuple(_likeness(config, stage) for stage in own)
        if alike not in seen:
            seen.add(alike)
            yield rank


def _likeness(config: RunConfig, stage: Stage) -> tuple[object, ...]:
    """Returns a key that alike stages share."""
    model, layers = config.model, range(stage.first_layer, stage.first_layer + stage.num_layers)
    kinds = [
        (model.layer_reach(layer, config.data.seq_length), model.layer_rotates(layer))
        for layer in layers
        if model.window_size is not None or model.no_rope_freq is not None
    ]
    return stage.is_first, stage.is_last, _plan(config, stage, False), tuple(kinds)


def enough_microbatches(
    config: RunConfig, rank: int, num_chunks: int, *, most: int | None = None
) -> int:
    """Returns the micro-batches of a step, or fewer if a rank reaches its peak with fewer.

    most: those of a step; None: see `step_microbatches`.

    From 2p micro-batches on the schedule repeats. If some micro-batches keep everything, schedule
    and windows repeat together after the least common multiple of their lengths.
    """
    size = config.parallel.pipeline_model_parallel_size
    most = step_microbatches(config) if most is None else most
    repeats = 0
    if config.recompute.num_microbatches_with_partial_activation_checkpoints is not None:
        window = most_in_flight(size=size, rank=rank, num_microbatches=most, num_chunks=num_chunks)
        repeats = math.lcm(window, num_chunks * size) // num_chunks
    return min(most, 2 * size + repeats)


def rank_memory(config: RunConfig, device: str, rank: int) -> RankMemory:
    """Returns the memory of one pipeline rank, with the micro-batches that a step of the run has.

    The vocabulary size must be known.
    """
    own_stages = stages_of_rank(config.parallel, config.model.num_layers, rank)
    num_microbatches = enough_microbatches(config, rank, len(own_stages))
    _, whole = _schedule(config, rank, num_microbatches, len(own_stages))
    all_ticks = list(ticks(config, device, rank=rank, num_microbatches=num_microbatches))
    rebuilt: dict[tuple[int, bool], int] = {}

    # A backward adds only what its own micro-batch holds beyond its kept bytes. The kept bytes are
    # part of the tick before it, so the peak is the most of (kept before a backward + rebuilt).
    def rebuilds(action: Action) -> int:
        chunk, keeps_all = action.chunk, action._replace(kind="forward") in whole
        if (chunk, keeps_all) not in rebuilt:
            plan = _plan(config, own_stages[chunk], keeps_all)
            sizes = _sizes(config, device, own_stages[chunk])
            rebuilt[chunk, keeps_all] = peak(
                config.model, plan, sizes
            ).held_bytes - activation_bytes(config.model, plan, sizes)
        return rebuilt[chunk, keeps_all]

    one = sum(
        activation_bytes(
            config.model,
            _plan(config, stage, Action("forward", 0, chunk) in whole),
            _sizes(config, device, stage),
        )
        for chunk, stage in enumerate(own_stages)
    )
    return RankMemory(
        rank=rank,
        stages=own_stages,
        kept_bytes=one,
        in_flight=max(tick.in_flight for tick in all_ticks),
        held_bytes=max(tick.kept_bytes for tick in all_ticks),
        peak_bytes=max(
            before.kept_bytes + rebuilds(tick.action)
            for before, tick in itertools.pairwise(all_ticks)
            if tick.action.kind == "backward"
        ),
    )


def _schedule(
    config: RunConfig, rank: int, num_microbatches: int, num_chunks: int
) -> tuple[list[Action], frozenset[Action]]:
    """Returns the actions of a step, and the forwards that keep everything."""
    size = config.parallel.pipeline_model_parallel_size
    num_kept = config.recompute.num_microbatches_with_partial_activation_checkpoints or 0
    return (
        order(size=size, rank=rank, num_microbatches=num_microbatches, num_chunks=num_chunks),
        keeping_all(
            size=size,
            rank=rank,
            num_microbatches=num_microbatches,
            num_kept=num_kept,
            num_chunks=num_chunks,
        ),
    )


def _plan(config: RunConfig, stage: Stage, keeps_all: bool) -> RecomputePlan:
    return (
        keep_everything(stage.num_layers)
        if keeps_all
        else plan_stage(config.recompute, stage.num_layers, stage.number)
    )


def _sizes(config: RunConfig, device: str, stage: Stage) -> Sizes:
    return Sizes.of(config, device=device, stage=stage)
