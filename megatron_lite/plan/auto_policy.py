"""The fastest recompute policy of a run whose layout is given, within a budget of memory.

    choose_policy(config, hardware, budget_bytes, num_ranks) -> "0-3:full; 4-7:none"

Each pipeline rank gets the fastest mix of actions (policies.py) that fits beside its other bytes:
weights, gradients, optimizer states and workspaces. memory/predict/step_peak.py has the last word:
the space of a rank is corrected by the difference to it until the whole run fits. A mix is the
number of layers that have each action. Standard library only.

The prediction counts what a run allocates through torch. The reserve of a `Budget` is for what it
does not see: the context of CUDA and the libraries' workspaces, the buffers of NCCL, and memory
that torch's allocator cannot use because it lies in pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import NamedTuple

from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.policy import MAX_LENGTH, LayerAction, Policy
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.config.units import parse_bytes, size
from megatron_lite.description.sizes import Sizes, layers_of
from megatron_lite.memory.predict.pipeline_memory import alike_ranks
from megatron_lite.memory.predict.states import RankStates, rank_states
from megatron_lite.memory.predict.step_peak import KEPT, StepPeak, fullest_step_peak, step_peak
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment, keep_everything

from .hardware import Group, Hardware
from .policies import (
    KEEP,
    Alike,
    LayerChoice,
    StageMix,
    best_mix,
    layer_choices,
    least_seconds,
    tile_counts,
)
from .stage_time import HOST_PACE, StageTime, TimedRun, stage_time
from .step_time import StepTime, step_time
from .work import Clock

ROUNDS = 6  # corrections of the space; two are usual
# Assumptions, stated in docs/planning.md. 1 GiB for the context, cuBLAS and NCCL; 3 % of the card
# for pieces.
RESERVE_BYTES, RESERVE_SHARE = 2**30, 0.03
HOST_STEPS = 8  # numbers of layers with a hosted action that are tried
WORTH = 0.002  # of a step: smaller gains of a single layer are not looked for
UNIT_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
SHORT_WAIT = 0.01  # of a step for the host: longer units would hardly save more


@dataclass(frozen=True)
class Plan:
    """A run with its layout and its policy on a machine, the peak of its fullest rank, and the time
    of a step.

    host_bytes: the host memory of a rank in which a policy may keep tensors. 0: none.
    """

    config: RunConfig
    hardware: Hardware
    num_ranks: int
    host_bytes: int = 0

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.config.parallel.data_parallel_size(self.num_ranks)

    @property
    def dp_cp_size(self) -> int:
        """The ranks that share out the states, over data and context parallelism together."""
        return self.dp_size * self.config.parallel.context_parallel_size

    def step_peak(self, rank: int) -> StepPeak:
        """Returns the peak of a pipeline rank."""
        return step_peak(self.config, rank, device=self.hardware.device, dp_size=self.dp_size)

    @cached_property
    def peak(self) -> StepPeak:
        """The peak of its fullest rank."""
        return fullest_step_peak(self.config, device=self.hardware.device, dp_size=self.dp_size)

    @cached_property
    def time(self) -> StepTime:
        """The time of a step."""
        return step_time(self.config, self.hardware, self.num_ranks)

    def with_policy(self, text: str | None) -> Plan:
        """Returns the plan with another policy, or with none. Other recompute settings stay."""
        recompute = self.config.recompute.instead(recompute_policy=text)
        return replace(self, config=replace(self.config, recompute=recompute))

    def states(self, rank: int) -> RankStates:
        """Returns the bytes that a pipeline rank holds from step to step."""
        return rank_states(self.config, rank, dp_cp_size=self.dp_cp_size)

    @property
    def states_on_host(self) -> int:
        """The most bytes of optimizer states that a rank has in host memory."""
        ranks = range(self.config.parallel.pipeline_model_parallel_size)
        return max(self.states(rank).on_host for rank in ranks)


class Budget(NamedTuple):
    """The memory of a card and the part of it that stays free."""

    memory_bytes: int
    reserve_bytes: int

    @property
    def plan_bytes(self) -> int:
        """The bytes that a plan may take."""
        return self.memory_bytes - self.reserve_bytes


def default_reserve(memory_bytes: int) -> int:
    """Returns the reserve of a card."""
    return RESERVE_BYTES + round(RESERVE_SHARE * memory_bytes)


def choose_policy(config: RunConfig, hardware: Hardware, budget_bytes: int, num_ranks: int) -> str:
    """Returns the text of the fastest policy with which the fullest rank fits the budget.

    config: the run. Its own recompute flags do not count.
    budget_bytes: the bytes for everything that a rank allocates.
    Raises InputError with the smallest reachable peak if no policy fits. Raises ValueError if the
    ranks or the batch do not divide.
    """
    found = fitted(Plan(config, hardware, num_ranks), budget_bytes)
    if not (peak := found.peak).fits(budget_bytes):
        largest = max(peak.terms, key=lambda term: term.num_bytes)
        raise InputError(
            f"no recompute policy fits in {size(budget_bytes)}: the smallest peak is "
            f"{size(peak.num_bytes)}, on pipeline rank {peak.rank}, of which "
            f"{size(largest.num_bytes)} are {largest.name}; give more memory, a smaller "
            "--micro-batch-size or more ranks"
        )
    return str(found.config.recompute.policy)


def fitted(run: Plan, budget_bytes: int, *, or_smallest: bool = True) -> Plan:
    """Returns the run with the fastest policy that fits the budget.

    If none does, it is that with the smallest peak that was found. or_smallest: False saves the
    time to look for that one: any other policy takes its place.
    """
    whole = run.with_policy(None)
    if whole.peak.fits(budget_bytes):
        return whole
    search = RankMixes(run)
    spaces = search.spaces(search.least(), budget_bytes)
    best, chosen, plans = None, list[StageMix](), list[Plan]()
    for _ in range(ROUNDS):
        mixes = search.mixes(spaces)
        if mixes is None or mixes == chosen:
            break
        found, chosen = search.plan(mixes), mixes
        plans.append(found)
        corrected = search.spaces(mixes, budget_bytes)
        if found.peak.fits(budget_bytes):
            best = found
            break
        spaces = {rank: min(space, corrected[rank]) for rank, space in spaces.items()}
        if found.peak.rank not in spaces:  # the correction has not seen this rank
            spaces[search.alike[found.peak.rank]] -= found.peak.num_bytes - budget_bytes
    if best is None:
        chosen = search.least(rebuilt=0)
        plans.append(found := search.plan(chosen))
        best = found if found.peak.fits(budget_bytes) else None
    if best:
        plans.append(best := search.climbed(best, chosen, budget_bytes))
        if not _may_be_slower_than_units(best):
            return best
    units = search.units()
    if not or_smallest:  # longer units keep less, and rebuild more at a time
        units = itertools.takewhile(
            lambda one: (
                budget_bytes >= sum(term.num_bytes for term in one.peak.terms if term.name != KEPT)
            ),
            units,
        )

    def order(one: Plan) -> tuple[bool, float]:
        fits = one.peak.fits(budget_bytes)
        return not fits, one.time.seconds if fits else one.peak.num_bytes

    return min([search.plan(search.least()), *plans, *units], key=order)


def _may_be_slower_than_units(best: Plan) -> bool:
    """Tells whether longer units may be faster, for which the host launches less, or which need no
    copies: the mixes have units of one layer."""
    rules, time = best.config.recompute.policy.rules, best.time
    return all(one.action.unit for one in rules) or (
        time.terms.get(HOST_PACE, 0.0) > SHORT_WAIT * time.seconds
    )


def least_replays(run: Plan, budget_bytes: int) -> list[float] | None:
    """Returns a lower bound of the seconds of the replays of a micro-batch by pipeline rank, or
    None if no policy fits: only states and activations are counted."""
    search, fsdp = RankMixes(run), run.config.data_parallel.use_torch_fsdp2
    found = []
    for rank in range(search.size):
        states = run.states(search.alike[rank])
        # Under FSDP2 no gradients exist before the first backward.
        space = budget_bytes - states.total + (states.gradients if fsdp else 0)
        bounds = [search.least_seconds(one, space) for one in search.stages[rank :: search.size]]
        if math.isinf(least := min(bounds)):
            return None
        found.append(least * len(search.stages) / search.size)
    return found


def with_chosen_policy(
    config: RunConfig, hardware: Hardware, num_ranks: int, *, device_bytes: int | None
) -> tuple[RunConfig, str]:
    """Returns the configuration with the fastest policy that fits its --memory-budget, and a line
    for the log.

    hardware: the machine for which times are compared.
    device_bytes: the memory of one rank's device, for a run without a budget. The reserve of a GPU
        stays free beside any budget.
    Raises InputError if no policy fits, with the smallest peak that can be reached, and if the
    budget is missing.
    """
    recompute = config.recompute
    usable = None if device_bytes is None else device_bytes - default_reserve(device_bytes)
    if recompute.memory_budget is not None:
        budget = parse_bytes("--memory-budget", recompute.memory_budget)
        words = f"--memory-budget {recompute.memory_budget}"
        if usable is not None and hardware.device == "cuda" and budget > usable:
            budget = usable
            words += f", of which {size(usable)} are usable: a reserve of the GPU stays free"
    elif usable is None:
        raise InputError(
            "--recompute-policy auto needs to know how much memory a rank may use: give "
            "--memory-budget, such as --memory-budget 4GiB"
        )
    else:
        budget, words = usable, f"{size(usable)}, the GPU's memory less a reserve"
    with input_faults():
        text = choose_policy(config, hardware, budget, num_ranks)
        config = config.with_fields({"recompute_policy": text, "memory_budget": None})
    return config, f"--recompute-policy auto chose {text!r}, the fastest policy within {words}"


class RankMixes:
    """The search for the mixes of all pipeline ranks of a run.

    longest: the stage of each rank that has the most layers. A shorter one begins with its mix.
    alike: for each rank the one whose bytes besides activations stand for those of this one.
    """

    def __init__(self, run: Plan) -> None:
        config = run.config
        self.run, self.size = run, config.parallel.pipeline_model_parallel_size
        self.stages = config.stages()
        self.longest = [
            max(self.stages[rank :: self.size], key=lambda one: one.num_layers)
            for rank in range(self.size)
        ]
        self.clock = Clock.of(config, run.hardware)
        shards = config.shards(run.dp_cp_size) if config.data_parallel.use_torch_fsdp2 else 1
        self.choices, self.end = layer_choices(
            config, self.clock, host=run.host_bytes > 0, shards=shards
        )
        self.kinds = layers_of(config)
        self.alike = alike_ranks(run.with_policy(None).config)

    def spaces(self, mixes: Sequence[StageMix], budget_bytes: int) -> dict[int, int]:
        """Returns the bytes that activations may take, by rank of `alike`.

        They are the budget without what the full prediction counts besides the peak of the mix.
        """
        plan = self.plan(mixes)
        return {
            rank: budget_bytes
            - plan.step_peak(rank).num_bytes
            + mixes[rank].peak(self.in_flight(rank))
            for rank in {*self.alike}
        }

    def in_flight(self, rank: int) -> int:
        """Returns how many forwards of a stage wait for their backward at once on a rank."""
        number = self.run.config.training.most_microbatches(self.run.dp_size)
        return self.run.config.most_in_flight(number, rank)

    def runs(self, stage: Stage, skipped: int = 0, *, host: bool = False) -> tuple[Alike, ...]:
        """Returns the alike layers of a stage after its first so many, with their choices.

        host: with those that use host memory.
        """
        own = self.kinds[stage.first_layer :][skipped : stage.num_layers]
        runs = [
            Alike(
                tuple(one for one in self.choices[kind] if host or not one.on_host), len([*alike])
            )
            for kind, alike in itertools.groupby(own)
        ]
        return (*runs, Alike((self.end,), 1)) if stage.is_last else tuple(runs)

    def least_seconds(self, stage: Stage, space: int) -> float:
        """Returns a lower bound of the seconds of a stage's replays, infinity if nothing fits."""
        in_flight = self.in_flight(stage.rank)
        bound = least_seconds(self.runs(stage, host=True), in_flight, space)
        if bound is not None:
            return bound
        # Longer units keep one input for all of their layers.
        number = stage.num_layers
        inputs = -(-number // UNIT_LENGTHS[-1])
        least = min(one.kept for choices in self.choices.values() for one in choices)
        if not number or in_flight * inputs * least > space:
            return math.inf
        unit = RecomputePlan((Segment(first_layer=0, num_layers=number, unit=True),))
        once, again = (
            self._time(stage, plan).backward.seconds for plan in (keep_everything(number), unit)
        )
        return again - once

    def least(self, rebuilt: int = 1) -> list[StageMix]:
        """Returns the mixes of the choices with which each layer takes the fewest bytes.

        rebuilt: 0 counts only those that it keeps.
        """

        def least(choices: Sequence[LayerChoice]) -> LayerChoice:
            return min(choices, key=lambda one: one.kept + rebuilt * one.rebuilt)

        return [
            StageMix(tuple((least(run.choices), run.length) for run in self.runs(stage)), 0.0)
            for stage in self.longest
        ]

    def mixes(self, spaces: Mapping[int, int]) -> list[StageMix] | None:
        """Returns the fastest mix of every rank, or None if one has none."""
        found = []
        for rank in range(self.size):
            mix = self._best(self.longest[rank], self.in_flight(rank), spaces[self.alike[rank]])
            if mix is None:
                return None
            found.append(mix)
        return found

    def _best(self, stage: Stage, in_flight: int, limit: int) -> StageMix | None:
        """Returns the fastest mix of a stage: on the device, or with one hosted choice."""
        best = best_mix(self.runs(stage), in_flight, limit)
        own = self.kinds[stage.first_layer :][: stage.num_layers]
        hosted = [[one for one in self.choices[kind] if one.on_host] for kind in own]
        for layers in zip(*hosted, strict=True) if best is None or best.seconds > 0.0 else ():
            moved = [*itertools.accumulate(one.moved for one in layers)]
            most = sum(in_flight * one <= self.run.host_bytes for one in moved)
            for step in range(1, min(most, HOST_STEPS) + 1):
                count = most * step // min(most, HOST_STEPS)
                # Hosted layers come first, so all others have their bytes on top of theirs.
                first = layers[:count]
                rest = limit - in_flight * sum(one.kept for one in first)
                seconds = self._wait(stage, moved[count - 1], count)
                seconds += sum(one.seconds for one in first)
                if best and seconds >= best.seconds:
                    break  # more hosted layers take longer still
                mix = best_mix(self.runs(stage, count), in_flight, rest)
                if mix is None:
                    continue
                rows = (*((one, 1) for one in first), *mix.rows)
                if len({*own}) == 1:  # alike layers whose replay adds the most come first
                    rows = tuple(sorted(rows, key=lambda row: (not row[0].kept, -row[0].rebuilt)))
                found = StageMix(rows, mix.seconds + seconds)
                if found.peak(in_flight) <= limit and not (best and found.seconds >= best.seconds):
                    best = found
        return best

    def _wait(self, stage: Stage, moved: int, count: int) -> float:
        """Returns how long copies of so many layers delay a forward and a backward.

        It does not count that copies also run beside the replays.
        """
        time = self._time(stage, keep_everything(stage.num_layers))
        whole = moved / self.run.hardware.host_bandwidth
        first = whole / count
        # Nothing runs beside the first copy of a backward, that of the last layer.
        exposed = partial(self.clock.exposed, copies=True)
        return (
            exposed(whole, time.forward.seconds)
            + first
            + exposed(whole - first, time.backward.seconds)
        )

    def _time(self, stage: Stage, plan: RecomputePlan) -> StageTime:
        sharing = Group(self.run.dp_cp_size, self.run.config.parallel.tensor_model_parallel_size)
        return stage_time(TimedRun(self.run.config, self.clock, sharing), stage, plan)

    def climbed(self, best: Plan, mixes: Sequence[StageMix], budget_bytes: int) -> Plan:
        """Returns a plan with faster choices for single layers, as long as the whole run fits.

        Only steps that save a good deal are tried.
        best: the plan with the mixes of the ranks.
        """
        mixes = [mixes[stage.rank] for stage in self.stages]
        chunks = len(self.stages) // self.size
        number = self.run.config.training.num_microbatches(self.run.dp_size)
        while True:
            left = [budget_bytes - best.step_peak(rank).num_bytes for rank in range(self.size)]
            moves = [
                (faster.seconds - choice.seconds, stage, row, faster)
                for stage, mix in zip(self.stages, mixes, strict=True)
                for row, (choice, _) in enumerate(mix.rows)
                for faster in self._choices_of(stage, mix, row)
                if number * (choice.seconds - faster.seconds) > WORTH * best.time.seconds
                # At the fullest moment so many other micro-batches keep the layer's tensors.
                and (self.in_flight(stage.rank) // chunks - 1) * (faster.kept - choice.kept)
                <= left[stage.rank] + max(0, choice.rebuilt - faster.rebuilt)
            ]
            for _, stage, row, faster in sorted(moves, key=itemgetter(0)):
                rows = [*mixes[stage.number].rows]
                choice, count = rows[row]
                rows[row : row + 1] = [(choice, count - 1)] * (count > 1) + [(faster, 1)]
                new = [*mixes]
                new[stage.number] = StageMix(tuple(rows), 0.0)
                found = self.plan(new)
                if found.step_peak(stage.rank).fits(budget_bytes) and (
                    found.time.seconds <= best.time.seconds
                ):
                    mixes, best = new, found
                    break
            else:
                return best

    def _choices_of(self, stage: Stage, mix: StageMix, row: int) -> Sequence[LayerChoice]:
        """Returns the choices on the device of the layers of a row."""
        first = stage.first_layer + sum(count for _, count in mix.rows[:row])
        if first >= stage.first_layer + stage.num_layers:
            return ()
        return [one for one in self.choices[self.kinds[first]] if not one.on_host]

    def plan(self, mixes: Sequence[StageMix]) -> Plan:
        """Returns the run with the mixes of ranks, or of stages, as its policy.

        The text of a policy has a limited length. With many stages, the ranks between the first and
        the last share the mix of the first of them, which has the most micro-batches in flight.
        """
        if all(one.action == KEEP and not one.on_host for mix in mixes for one, _ in mix.rows):
            return self.run.with_policy(None)
        by_stage = len(mixes) > self.size
        for places in (range(self.size), self.alike):
            own = [
                mixes[one.number if by_stage else places[one.rank]].rules(one.num_layers)
                for one in self.stages
            ]
            common = max(own, key=own.count)  # the most frequent rules name no stage
            special = [
                replace(rule, stage=stage.number)
                for stage, several in zip(self.stages, own, strict=True)
                if several != common
                for rule in several
            ]
            text = str(Policy((*special, *common)))
            if len(text) <= MAX_LENGTH:
                return self.run.with_policy(text)
        return self.run.with_policy("*:full")

    def units(self) -> Iterator[Plan]:
        """Yields the run with longer and longer units, one of which has the smallest peak."""
        longest = max(1, *(stage.num_layers for stage in self.stages))
        sizes = Sizes.of(self.run.config, self.run.hardware.device)
        tiles = max(tile_counts(sizes, LayerAction(unit=1)))
        in_tiles = f"+mlp/{tiles}" if tiles > 1 else ""
        stores = ("", "@host")[: 1 + (self.run.host_bytes > 0)]
        for length, store in itertools.product(UNIT_LENGTHS, stores):
            if length <= longest:
                one = self.run.with_policy(f"*:full/{length}{in_tiles}{store}")
                ranks = {*self.alike} if store else ()
                if all(one.step_peak(rank).on_host <= self.run.host_bytes for rank in ranks):
                    yield one
