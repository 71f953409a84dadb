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

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from megatron_lite.config.policy import Layers, Policy
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, most_in_flight
from megatron_lite.description.sizes import Sizes, layers_of
from megatron_lite.memory.measure.step_meter import FORWARD, HOST, OTHER, STATES, StepPeakMeasured
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.memory.predict.pipeline_memory import stage_plan
from megatron_lite.memory.predict.states import update_memory
from megatron_lite.parallel.state import ParallelState
from megatron_lite.recompute.recompute_plan import KEEP, Segment
from megatron_lite.training.observe import own_states

REPEATS, IN_FLIGHT = 3, 2


class MeasuredStep(NamedTuple):
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
        return (
            f"a step of a model of {self.config.model.num_layers} layers with "
            f"{self.num_microbatches} micro-batches"
        )


def measured_from_smaller(
    whole: StepSize, place: ParallelState, measure: Callable[[StepSize], MeasuredStep]
) -> MeasuredStep | None:
    """Returns the memory of a step, measured on smaller ones, or None if it must run in full.

    place: the place of the rank, on the device of the run. measure: measures a step.
    """
    base, neighbours = _smaller(whole, place.pp_rank)
    if not neighbours:
        return None
    small, (known, _) = measure(base), _exact(base, place)
    on_host = 0 if place.device.type == "cpu" else 1

    def in_peak(more: Counter[str]) -> int:
        return more.total() - on_host * more[HOST]

    counters = 0  # of AdamW's steps, one number for each parameter
    for other, times in neighbours:
        found, (more, _) = measure(other), _exact(other, place)
        more.subtract(known)
        more[OTHER] = found.held[OTHER] - small.held[OTHER]
        counters += times * more[OTHER]
        is_linear = found.peak.num_bytes - small.peak.num_bytes == in_peak(more)
        if not is_linear or found.host_bytes - small.host_bytes != more[HOST]:
            return None
    rest, update_bytes = _exact(whole, place)
    rest.subtract(known)
    # The update's temporaries can grow faster with the number of layers than what a backward holds.
    if update_bytes > small.peak.num_bytes + in_peak(rest) - rest[HOST]:
        return None
    rest[OTHER] = counters
    categories = {kind: size + rest[kind] for kind, size in small.peak.by_category.items()}
    return MeasuredStep(
        held={kind: size + rest[kind] for kind, size in small.held.items()},
        peak=small.peak._replace(num_bytes=sum(categories.values()), by_category=categories),
        host_bytes=small.host_bytes + rest[HOST],
        num_microbatches=small.num_microbatches,
    )


def _exact(step: StepSize, place: ParallelState) -> tuple[Counter[str], int]:
    """Returns what the closed form knows of a step.

    They are the bytes of the states, the kept tensors and those in host memory, by category; and
    the most bytes that the rank holds after the last backward.
    """
    config, states = step.config, own_states(step.config, place)
    (stage,) = config.stages_of_rank(place.pp_rank)
    update = update_memory(config, stage, states, dp_cp_size=place.dp_cp_size, device="cpu")
    found = Counter({**dict(zip(STATES, states[:4], strict=True)), HOST: states.on_host})
    waiting = most_in_flight(
        size=step.pipeline_size, rank=place.pp_rank, num_microbatches=step.num_microbatches
    )
    plan = stage_plan(config, stage)
    for term in activation_terms(plan, Sizes.of(config, device="cpu", stage=stage)):
        if term.tensor.given or not term.tensor.shared:
            found[HOST if term.on_host else FORWARD] += waiting * term.num_bytes
    return found, states.total + states.on_host + update.num_bytes


def _smaller(whole: StepSize, rank: int) -> tuple[StepSize, list[tuple[StepSize, int]]]:
    """Returns the base and its neighbours; no neighbour if nothing can be left out.

    rank: the pipeline rank.
    The number beside a neighbour tells how many times what it adds lies between the base and the
    whole.
    """
    config = whole.config
    recompute, all_stages = config.recompute, config.stages()
    stage, *others = config.stages_of_rank(rank)
    partial = recompute.num_microbatches_with_partial_activation_checkpoints is not None
    if others or partial or recompute.contiguous_saved_activations:
        return whole, []
    segments = stage_plan(config, stage).segments
    rows = [list(row) for _, row in groupby(segments, lambda one: replace(one, first_layer=0))]
    # Layers can be left out if all are alike, and all stages equally long.
    alike = len({*layers_of(config)}) == len({one.num_layers for one in all_stages}) == 1
    long_rows = [number for number, row in enumerate(rows) if alike and len(row) > REPEATS]
    in_flight = most_in_flight(
        size=whole.pipeline_size, rank=rank, num_microbatches=whole.num_microbatches
    )
    steady = min(whole.num_microbatches - in_flight, 2)

    def step(longer: int | None = None, waiting: int = IN_FLIGHT) -> StepSize:
        found = whole
        if long_rows:
            kept = [
                one
                for number, row in enumerate(rows)
                for one in row[: REPEATS + (number == longer)]
            ]
            found = found._replace(config=_with_segments(config, kept, stage, len(all_stages)))
        if in_flight > IN_FLIGHT + 1:
            found = found._replace(num_microbatches=waiting + steady, pipeline_size=rank + waiting)
        return found

    neighbours = [(step(longer=number), len(rows[number]) - REPEATS) for number in long_rows]
    if in_flight > IN_FLIGHT + 1:
        neighbours.append((step(waiting=IN_FLIGHT + 1), in_flight - IN_FLIGHT))
    return step(), neighbours


def _with_segments(
    config: RunConfig, segments: Sequence[Segment], stage: Stage, num_stages: int
) -> RunConfig:
    """Returns the run with these segments of a stage in every stage."""
    rules, layers = [], 0
    for one in segments:
        own = Layers(layers, layers + one.num_layers - 1)
        rule = config.recompute.policy.rule_of(one.first_layer, stage.number) or KEEP
        rules.append(replace(rule, layers=(own,), stage=None))
        layers += one.num_layers
    return replace(
        config,
        model=replace(config.model, num_layers=layers * num_stages),
        recompute=RecomputeConfig(
            recompute_policy=str(Policy(tuple(rules))),
            recompute_tail_skip=config.recompute.recompute_tail_skip,
        ),
    )
