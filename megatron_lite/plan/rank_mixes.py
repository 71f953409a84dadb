"""The fastest mix of choices on each pipeline rank, within a space in memory, as a policy.

A mix is the number of layers that have each choice (policies.py). Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_lite.config.policy import MAX_LENGTH, LayerAction, Policy, Rule
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, most_in_flight
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.pipeline_memory import alike_ranks
from megatron_lite.memory.predict.states import RankStates, rank_states
from megatron_lite.memory.predict.step_peak import StepPeak, fullest_step_peak, step_peak
from megatron_lite.plan.hardware import Group, Hardware
from megatron_lite.plan.policies import (
    KEEP,
    LayerChoice,
    StageMix,
    best_mix,
    layer_choices,
    tile_counts,
)
from megatron_lite.plan.stage_time import TimedRun, stage_time
from megatron_lite.plan.step_time import StepTime, step_time
from megatron_lite.plan.work import Clock
from megatron_lite.recompute.recompute_plan import keep_everything

HOST_STEPS = 8  # numbers of layers with a hosted action that are tried
UNIT_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)


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
    def dp_cp_size(self) -> int:
        """The ranks that share out the states, over data and context parallelism together."""
        parallel = self.config.parallel
        return parallel.data_parallel_size(self.num_ranks) * parallel.context_parallel_size

    @property
    def most_microbatches(self) -> int:
        """The micro-batches on one rank of a step with the run's largest batch."""
        size = self.config.parallel.data_parallel_size(self.num_ranks)
        return self.config.training.most_microbatches(size)

    @property
    def facts(self) -> dict[str, Any]:
        """What `step_peak` needs to know besides the config and the rank."""
        return dict(
            device=self.hardware.device,
            dp_cp_size=self.dp_cp_size,
            num_microbatches=self.most_microbatches,
        )

    @cached_property
    def peak(self) -> StepPeak:
        """The peak of its fullest rank."""
        return fullest_step_peak(self.config, **self.facts)

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


class RankMixes:
    """The search for the mixes of all pipeline ranks of a run. All stages of a rank are alike.

    alike: for each rank the one whose bytes besides activations stand for those of this one.
    """

    def __init__(self, run: Plan) -> None:
        config = run.config
        self.run, self.size = run, config.parallel.pipeline_model_parallel_size
        self.stages = config.stages()
        self.clock = Clock.of(config, run.hardware)
        self.choices = layer_choices(config, self.clock, host=run.host_bytes > 0)
        self.on_device = tuple(one for one in self.choices if not one.on_host)
        self.alike = alike_ranks(run.with_policy(None).config)

    def spaces(self, mixes: Sequence[StageMix], budget_bytes: int) -> dict[int, int]:
        """Returns the bytes that activations may take, by rank of `alike`.

        They are the budget without what the full prediction counts besides the peak of the mix.
        """
        config = self.plan(mixes).config
        return {
            rank: budget_bytes
            - step_peak(config, rank, **self.run.facts).num_bytes
            + mixes[rank].peak(self.in_flight(rank))
            for rank in {*self.alike}
        }

    def in_flight(self, rank: int) -> int:
        """Returns how many forwards of a stage wait for their backward at once on a rank."""
        return most_in_flight(
            size=self.size,
            rank=rank,
            num_microbatches=self.run.most_microbatches,
            num_chunks=len(self.stages) // self.size,
        )

    def least(self) -> list[StageMix]:
        """Returns the mixes of the one choice with which a layer takes the fewest bytes."""
        least = min(self.on_device, key=lambda one: one.kept + one.rebuilt)
        counts = (stage.num_layers for stage in self.stages[: self.size])
        return [StageMix(((least, count),) * (count > 0), 0.0) for count in counts]

    def mixes(self, spaces: Mapping[int, int]) -> list[StageMix] | None:
        """Returns the fastest mix of every rank, or None if one has none."""
        found = []
        for rank in range(self.size):
            mix = self._best(self.stages[rank], self.in_flight(rank), spaces[self.alike[rank]])
            if mix is None:
                return None
            found.append(mix)
        return found

    def _best(self, stage: Stage, in_flight: int, limit: int) -> StageMix | None:
        """Returns the fastest mix of a stage: on the device, or with one hosted choice."""
        best = best_mix(self.on_device, stage.num_layers, in_flight, limit)
        for hosted in self.choices if best is None or best.seconds > 0.0 else ():
            if not hosted.on_host:
                continue
            most = stage.num_layers
            if hosted.moved:
                most = min(most, self.run.host_bytes // (hosted.moved * in_flight))
            for step in range(1, min(most, HOST_STEPS) + 1):
                count = most * step // min(most, HOST_STEPS)
                # Hosted layers come first, so all others have their bytes on top of theirs.
                rest = limit - in_flight * count * hosted.kept
                seconds = self._wait(stage, hosted, count) + count * hosted.seconds
                if best and seconds >= best.seconds:
                    break  # more hosted layers take longer still
                mix = best_mix(self.on_device, stage.num_layers - count, in_flight, rest)
                if mix is None:
                    continue
                found = StageMix.of([*mix.rows, (hosted, count)], mix.seconds + seconds)
                if found.peak(in_flight) <= limit and not (best and found.seconds >= best.seconds):
                    best = found
        return best

    def _wait(self, stage: Stage, hosted: LayerChoice, count: int) -> float:
        """Returns how long copies of so many layers delay a forward and a backward.

        It does not count that copies also run beside the replays.
        """
        sharing = Group(self.run.dp_cp_size, self.run.config.parallel.tensor_model_parallel_size)
        timed = TimedRun(self.run.config, self.clock, sharing)
        time = stage_time(timed, stage, keep_everything(stage.num_layers))
        first = hosted.moved / self.run.hardware.host_bandwidth
        # Nothing runs beside the first copy of a backward, that of the last layer.
        return (
            self.clock.exposed(count * first, time.forward.seconds)
            + first
            + self.clock.exposed((count - 1) * first, time.backward.seconds)
        )

    def plan(self, mixes: Sequence[StageMix]) -> Plan:
        """Returns the run with the mixes as its policy.

        The text of a policy has a limited length. With many stages, the ranks between the first and
        the last share the mix of the first of them, which has the most micro-batches in flight.
        """
        rules = [mix.rules() for mix in mixes]
        if all(rule.action == KEEP and rule.store == "device" for one in rules for rule in one):
            return self.run.with_policy(None)
        text = self._text(rules)
        if len(text) > MAX_LENGTH:
            text = self._text([rules[rank] for rank in self.alike])
        return self.run.with_policy(text if len(text) <= MAX_LENGTH else "*:full")

    def _text(self, rules: Sequence[tuple[Rule, ...]]) -> str:
        """Returns the policy of these rules by rank. The most frequent rules name no stage."""
        own = [rules[stage.rank] for stage in self.stages]
        common = max(own, key=own.count)
        special = [
            replace(rule, stage=stage.number)
            for stage, several in zip(self.stages, own, strict=True)
            if several != common
            for rule in several
        ]
        return str(Policy((*special, *common)))

    def units(self) -> Iterator[Plan]:
        """Yields the run with longer and longer units, one of which has the smallest peak."""
        longest = max(1, *(stage.num_layers for stage in self.stages))
        sizes = Sizes.of(self.run.config, self.run.hardware.device)
        tiles = max(tile_counts(sizes, LayerAction(unit=1)))
        in_tiles = f"+mlp/{tiles}" if tiles > 1 else ""
        stores = ("", "@host")[: 1 + (self.run.host_bytes > 0)]
        for length, store in itertools.product(UNIT_LENGTHS, stores):
            if length <= longest:
                yield self.run.with_policy(f"*:full/{length}{in_tiles}{store}")
