"""Derives the memory of a step from one with fewer alike layers and fewer micro-batches in flight.

    base         at most three repetitions of a row of alike segments, and two micro-batches
    neighbours   one repetition more of each row, and one micro-batch more

One repetition or micro-batch more adds at least nothing and at most its states and the tensors that
it keeps, which the closed form knows to the byte. If each neighbour holds exactly this much more
than the base, the fullest moment is one that holds all of it. It then stays the fullest for every
larger size, and the peak of the whole step is that of the base plus the closed form of the rest.
Otherwise the step runs in full. So do steps whose update may hold more than that, and steps with
virtual stages or with an arena of saved inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import most_in_flight, stages, stages_of_rank
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.measure.step_meter import FORWARD, HOST, OTHER, STATES, StepPeakMeasured
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.memory.predict.states import RankStates, rank_states
from megatron_lite.memory.predict.update_memory import update_memory
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment
from megatron_lite.recompute.schedule import plan_stage

REPEATS, IN_FLIGHT, LONGEST_PERIOD = 3, 2, 4


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The memory of one optimizer step of one rank, in bytes.

    held: the bytes between two steps, by category (memory/measure/step_meter.py). Under FSDP2 the
        gradients are those at the end of the step.
    host_bytes: the most bytes in host memory.
    num_microbatches: the micro-batches of the step.
    """

    held: dict[str, int]
    peak: StepPeakMeasured
    host_bytes: int
    num_microbatches: int


class StepSize(NamedTuple):
    """A step to measure.

    config: the run, with the step's layers and policy.
    num_microbatches: its micro-batches.
    pipeline_size: the length of the pipeline in whose order they run.
    """

    config: RunConfig
    num_microbatches: int
    pipeline_size: int

    def __str__(self) -> str:
        layers, number = self.config.model.num_layers, self.num_microbatches
        return f"a step of a model of {layers} layers with {number} micro-batches"


class RankPlace(NamedTuple):
    """The place of a rank. device: "cpu" or "cuda"."""

    pp_rank: int
    dp_cp_size: int
    dp_cp_rank: int
    device: str


def _exact(step: StepSize, place: RankPlace) -> Counter[str]:
    """Returns the bytes that the closed form knows, by category: states, kept, in host memory."""
    config = step.config
    (stage,) = stages_of_rank(config.parallel, config.model.num_layers, place.pp_rank)
    found = Counter(dict(zip(STATES, _states(config, place), strict=True)))
    waiting = most_in_flight(
        size=step.pipeline_size, rank=place.pp_rank, num_microbatches=step.num_microbatches
    )
    plan = plan_stage(config.recompute, stage.num_layers, stage.number)
    sizes = Sizes.of(config, device="cpu", stage=stage)
    for term in activation_terms(config.model, plan, sizes):
        if term.tensor.given or not term.tensor.shared:
            found[HOST if term.on_host else FORWARD] += waiting * term.num_bytes
    return found


def _states(config: RunConfig, place: RankPlace) -> RankStates:
    size, rank = place.dp_cp_size, place.dp_cp_rank
    return rank_states(config, place.pp_rank, dp_cp_size=size, dp_cp_rank=rank)


def measured_from_smaller(
    whole: StepSize, place: RankPlace, measure: Callable[[StepSize], MeasuredStep]
) -> MeasuredStep | None:
    """Returns the memory of a step, measured on smaller ones, or None if it must run in full.

    measure: measures a step.
    """
    (base, _), *neighbours = _smaller(whole, place)
    if not neighbours:
        return None
    small, known = measure(base), _exact(base, place)

    def beyond(step: StepSize) -> Counter[str]:
        more = _exact(step, place)
        more.subtract(known)
        return more

    def in_peak(more: Counter[str]) -> int:
        return sum(more.values()) - (0 if place.device == "cpu" else more[HOST])

    counters = 0  # of AdamW's steps, one number for each parameter
    for other, times in neighbours:
        found, more = measure(other), beyond(other)
        more[OTHER] = found.held[OTHER] - small.held[OTHER]
        counters += times * more[OTHER]
        is_linear = found.peak.num_bytes - small.peak.num_bytes == in_peak(more)
        if not is_linear or found.host_bytes - small.host_bytes != more[HOST]:
            return None
    rest = beyond(whole)
    if _update_bytes(whole.config, place) > small.peak.num_bytes + in_peak(rest) - rest[HOST]:
        return None
    rest[OTHER] = counters
    categories = {kind: size + rest[kind] for kind, size in small.peak.by_category.items()}
    return MeasuredStep(
        held={kind: size + rest[kind] for kind, size in small.held.items()},
        peak=small.peak._replace(num_bytes=sum(categories.values()), by_category=categories),
        host_bytes=small.host_bytes + rest[HOST],
        num_microbatches=small.num_microbatches,
    )


def _update_bytes(config: RunConfig, place: RankPlace) -> int:
    """Returns the closed form of what the rank holds at most after the last backward.

    The update's temporaries can grow faster with the number of layers than what a backward holds.
    """
    (stage,) = stages_of_rank(config.parallel, config.model.num_layers, place.pp_rank)
    states = _states(config, place)
    update = update_memory(config, stage, states, dp_cp_size=place.dp_cp_size, device="cpu")
    return states.total + update.num_bytes


def _smaller(whole: StepSize, place: RankPlace) -> Iterator[tuple[StepSize, int]]:
    """Yields the base and its neighbours; only the whole step if nothing can be left out.

    The number beside a neighbour tells how many times what it adds lies between the base and the
    whole.
    """
    config = whole.config
    parallel = config.parallel
    own = stages_of_rank(parallel, config.model.num_layers, place.pp_rank)
    recompute = config.recompute
    partial = recompute.num_microbatches_with_partial_activation_checkpoints is not None
    if len(own) > 1 or partial or recompute.contiguous_saved_activations:
        yield whole, 0
        return
    plan = plan_stage(config.recompute, own[0].num_layers, own[0].number)
    rows = [*_rows(plan.segments)] if _can_lose_layers(config) else []
    long_rows = [number for number, row in enumerate(rows) if row.repeats > REPEATS]
    in_flight = most_in_flight(
        size=whole.pipeline_size, rank=place.pp_rank, num_microbatches=whole.num_microbatches
    )
    fewer = in_flight > IN_FLIGHT + 1

    def step(more_of: int | None = None, more_in_flight: int = 0) -> StepSize:
        found = whole
        if long_rows:
            counts = [min(row.repeats, REPEATS) for row in rows]
            if more_of is not None:
                counts[more_of] += 1
            found = found._replace(config=_with_repeats(config, plan, rows, counts))
        if fewer:
            number = IN_FLIGHT + more_in_flight
            steady = min(whole.num_microbatches - in_flight, 2)
            found = found._replace(
                num_microbatches=number + steady, pipeline_size=place.pp_rank + number
            )
        return found

    yield step(), 0
    for number in long_rows:
        yield step(more_of=number), rows[number].repeats - REPEATS
    if fewer:
        yield step(more_in_flight=1), in_flight - IN_FLIGHT


def _can_lose_layers(config: RunConfig) -> bool:
    """Tells whether all layers are alike, and all stages equally long."""
    lengths = {one.num_layers for one in stages(config.parallel, config.model.num_layers)}
    alike = config.model.window_size is None and config.model.no_rope_freq is None
    return alike and len(lengths) == 1


class _Row(NamedTuple):
    """A row of segments. It repeats the `period` segments from number `first` on."""

    first: int
    period: int
    repeats: int


def _rows(segments: Sequence[Segment]) -> Iterator[_Row]:
    """Yields rows that cover all segments, each of them as long as possible."""
    kinds = [replace(one, first_layer=0) for one in segments]
    first = 0
    while first < len(kinds):
        found = max(
            (
                _Row(first, period, _repeats(kinds[first:], period))
                for period in range(1, LONGEST_PERIOD + 1)
            ),
            key=lambda row: (row.period * row.repeats if row.repeats > 1 else 1, -row.period),
        )
        row = found if found.repeats > 1 else _Row(first, 1, 1)
        yield row
        first += row.period * row.repeats


def _repeats(kinds: Sequence[Segment], period: int) -> int:
    pattern, number = kinds[:period], 1
    while kinds[number * period : (number + 1) * period] == pattern:
        number += 1
    return number


def _with_repeats(
    config: RunConfig, plan: RecomputePlan, rows: Sequence[_Row], counts: Sequence[int]
) -> RunConfig:
    """Returns the run with so many repetitions of each row in every stage."""
    segments: list[Segment] = []
    layers = 0
    for row, count in zip(rows, counts, strict=True):
        for one in plan.segments[row.first : row.first + row.period] * count:
            segments.append(replace(one, first_layer=layers))
            layers += one.num_layers
    num_stages = len(stages(config.parallel, config.model.num_layers))
    return replace(
        config,
        model=replace(config.model, num_layers=layers * num_stages),
        recompute=RecomputeConfig(
            recompute_policy=str(RecomputePlan(tuple(segments))),
            recompute_tail_skip=config.recompute.recompute_tail_skip,
        ),
    )
