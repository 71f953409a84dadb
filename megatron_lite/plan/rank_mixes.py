"""The search for the fastest mix of actions on each pipeline rank, within a space in memory.

A mix is the number of layers that have each action (policies.py). Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.policy import MAX_LENGTH, LayerAction, Layers, Policy, Rule
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, most_in_flight, stages
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.states import RankStates, rank_states
from megatron_lite.plan.hardware import Group
from megatron_lite.plan.layer_choices import LayerChoice, layer_choices
from megatron_lite.plan.operation_time import Clock
from megatron_lite.plan.planned_run import Chosen, Run, with_policy
from megatron_lite.plan.policies import LayerPrice, Mix, Room, best_mix, layer_order, mix_peak
from megatron_lite.plan.stage_time import stage_time
from megatron_lite.recompute.recompute_plan import Store, keep_everything

HOST_STEPS = 8  # numbers of layers with a hosted action that are tried


class StageMix(NamedTuple):
    """The choices of a stage's layers, how many layers have each, and the time of the replays."""

    choices: tuple[LayerChoice, ...]
    mix: Mix

    def rules(self) -> tuple[Rule, ...]:
        """Returns the rules of a policy, which name the layers in their best order."""
        rules, first = [], 0
        for place in layer_order([choice.price for choice in self.choices]):
            count = self.mix.counts[place]
            if count:
                choice = self.choices[place]
                layers = Layers(first, first + count - 1)
                rules.append(Rule(layers=(layers,), action=choice.action, store=choice.store))
                first += count
        return tuple(rules)


class RankSearch:
    """The search for the mixes of all pipeline ranks of a run."""

    def __init__(self, run: Run) -> None:
        self.run, config = run, run.config
        parallel = config.parallel
        self.size = parallel.pipeline_model_parallel_size
        self.stages = stages(parallel, config.model.num_layers)
        self.num_chunks = len(self.stages) // self.size
        self.clock = Clock.of(config, run.hardware, run.memo)
        self.choices = layer_choices(config, self.clock, host=run.host_bytes > 0)

    def alike(self, rank: int) -> int:
        """Returns the rank whose bytes besides activations stand for those of this one."""
        # The ranks between hold neither end of the model.
        if rank in (0, self.size - 1):
            return rank
        return 1

    def samples(self) -> list[int]:
        """Returns the ranks whose peaks are computed in full."""
        return sorted({self.alike(rank) for rank in range(self.size)})

    def states(self, rank: int) -> RankStates:
        """Returns the bytes of weights, gradients and optimizer states of a pipeline rank."""
        config, dp_cp_size = self.run.config, self.run.dp_cp_size
        key = ("states", config.parallel, config.data_parallel, dp_cp_size, rank)
        return self.run.memo.once(
            key, lambda: rank_states(config, rank, dp_cp_size=dp_cp_size, dp_cp_rank=0)
        )

    def spaces(self, mixes: Sequence[StageMix], budget_bytes: int) -> dict[int, int]:
        """Returns the bytes that activations may take, by rank of `samples`.

        They are the budget without what the full prediction counts besides the peak of the mix.
        """
        config, found = self.config(mixes), {}
        for rank in self.samples():
            room = self.room(rank, 0)
            held = mix_peak(prices(mixes[rank]), mixes[rank].mix.counts, room)
            found[rank] = budget_bytes - (self.run.rank_peak(config, rank).num_bytes - held)
        return found

    def room(self, rank: int, limit: int) -> Room:
        """Returns the room of each stage of a rank."""
        in_flight = most_in_flight(
            size=self.size,
            rank=rank,
            num_microbatches=self.run.most_microbatches,
            num_chunks=self.num_chunks,
        )
        if self.num_chunks > 1:
            # Only one of the rank's stages holds an end of the model, in few of the micro-batches.
            # The correction of the space counts those bytes.
            return Room(in_flight, limit)
        before, after = self._ends(self.stages[rank])
        return Room(in_flight, limit, before, after)

    def _ends(self, stage: Stage) -> tuple[int, int]:
        config, device = self.run.config, self.run.hardware.device
        sizes = Sizes.of(config, device=device, stage=stage)

        def kept() -> tuple[int, int]:
            return tuple(  # type: ignore[return-value]
                sum(tensor.num_bytes for operation in operations for tensor in operation.keeps)
                for operations in (
                    embedding_operations(config.model, sizes) if stage.is_first else (),
                    head_operations(config.model, sizes) if stage.is_last else (),
                )
            )

        return self.run.memo.once(("kept by ends", replace(sizes, first_layer=0)), kept)

    def mixes(self, spaces: dict[int, int]) -> list[StageMix] | None:
        """Returns the fastest mix of every rank, or None if one has none."""
        found = []
        for rank in range(self.size):
            mix = self.best(rank, self.room(rank, spaces[self.alike(rank)]))
            if mix is None:
                return None
            found.append(mix)
        return found

    def best(self, rank: int, room: Room) -> StageMix | None:
        """Returns the fastest mix of a rank's stages: on the device, or with one hosted action."""
        stage = self.stages[rank]
        on_device = tuple(one for one in self.choices if not one.store.endswith("host"))
        key = ("mix", self.choices, stage.num_layers, room)
        return self.run.memo.once(key, lambda: self._best(on_device, stage, room))

    def _best(
        self, on_device: tuple[LayerChoice, ...], stage: Stage, room: Room
    ) -> StageMix | None:
        prices = [one.price for one in on_device]
        mix = best_mix(prices, stage.num_layers, room)
        best = None if mix is None else StageMix(on_device, mix)
        if mix is not None and mix.seconds <= 0.0:
            return best
        below = math.inf if mix is None else mix.seconds
        for hosted in self.choices:
            if not hosted.store.endswith("host"):
                continue
            most = stage.num_layers
            if hosted.moved:
                most = min(most, self.run.host_bytes // (hosted.moved * room.in_flight))
            for count in _steps(most):
                wait = self._wait(stage, hosted, count)
                if wait + count * hosted.price.seconds >= below:
                    break  # more hosted layers take longer still
                # Of two hosted layers in a row, the tensors of the second come back early.
                back = hosted.moved if count > 1 else 0
                price = hosted.price._replace(rebuilt=hosted.price.rebuilt + back)
                mix = best_mix(
                    [*prices, price],
                    stage.num_layers,
                    room,
                    fixed=(len(prices), count),
                    below=below - wait,
                )
                if mix is not None:
                    below = mix.seconds + wait
                    choices = (*on_device, hosted._replace(price=price))
                    best = StageMix(choices, mix._replace(seconds=below))
        return best

    def _wait(self, stage: Stage, hosted: LayerChoice, count: int) -> float:
        """Returns how long copies of so many layers delay a forward and a backward.

        It does not count that copies also run beside the replays.
        """
        run = self.run

        def whole() -> tuple[float, float]:
            time = stage_time(
                run.config,
                stage,
                keep_everything(stage.num_layers),
                self.clock,
                data_parallel=Group(1),
                fused_accumulation=False,
            )
            return time.forward.total(), time.backward.total()

        sizes = Sizes.of(run.config, device=run.hardware.device, stage=stage)
        key = ("stage", replace(sizes, first_layer=0), stage.num_layers)
        forward, backward = run.memo.once(key, whole)
        first = hosted.moved / run.hardware.host_bandwidth
        total = count * first
        # Nothing runs beside the first copy of a backward, that of the last layer.
        return (
            self.clock.exposed(total, forward) + first + self.clock.exposed(total - first, backward)
        )

    def full_mixes(self) -> list[StageMix]:
        """Returns the mixes in which every layer is rebuilt whole.

        In tiny layers another choice may keep and rebuild less: that one stands for it.
        """
        full = min(
            (one for one in self.choices if not one.store.endswith("host")),
            key=lambda one: (
                not (one.action.unit and one.store == "device"),
                one.price.kept + one.price.rebuilt,
            ),
        )
        return self._all_with(full)

    def keeping_mixes(self) -> list[StageMix]:
        """Returns the mixes in which every layer keeps everything, or what serves as well."""
        return self._all_with(
            min(self.choices, key=lambda one: (one.action != LayerAction(), one.price.seconds))
        )

    def _all_with(self, choice: LayerChoice) -> list[StageMix]:
        return [
            StageMix((choice,), Mix((stage.num_layers,), 0.0)) for stage in self.stages[: self.size]
        ]

    def bytes_of(self, mixes: Sequence[StageMix]) -> int:
        """Returns the bytes of states and activations of the fullest rank."""
        return max(
            self.states(rank).total
            + mix_peak(prices(mixes[rank]), mixes[rank].mix.counts, self.room(rank, 0))
            for rank in self.samples()
        )

    def config(self, mixes: Sequence[StageMix]) -> RunConfig:
        """Returns the run with the mixes as its policy.

        All stages of a rank have the same rules.
        """
        return with_policy(self.run.config, self._text(mixes))

    def _text(self, mixes: Sequence[StageMix]) -> str | None:
        """Returns the text of the policy, or None if every layer keeps everything.

        A text has a limited length. With many stages, neighbouring ranks share the mix of the
        first of them, which has the most micro-batches in flight.
        """
        rules = [mix.rules() for mix in mixes]
        keep = LayerAction()
        if all(rule.action == keep and rule.store == "device" for one in rules for rule in one):
            return None
        together = 1
        while together < 2 * self.size:
            text = self._joined([rules[self._leader(rank, together)] for rank in range(self.size)])
            if len(text) <= MAX_LENGTH:
                return text
            together *= 2
        return "*:full"

    def _leader(self, rank: int, together: int) -> int:
        """Returns the rank whose rules this one has. The first and the last have their own."""
        if rank in (0, self.size - 1):
            return rank
        return rank - (rank - 1) % together

    def _joined(self, rules: Sequence[tuple[Rule, ...]]) -> str:
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

    def smallest(self) -> Chosen:
        """Returns the run with the smallest peak among units of several lengths."""
        longest = max(stage.num_layers for stage in self.stages)
        stores: list[Store] = ["device", "host"] if self.run.host_bytes else ["device"]
        found: list[Chosen] = []
        lengths = [one for one in (1, 2, 3, 4, 6, 8, 12, 16) if one <= longest]
        for store in stores:
            for length in lengths:
                rule = Rule(layers=(Layers(),), action=LayerAction(unit=length), store=store)
                config = with_policy(self.run.config, str(Policy((rule,))))
                peak = self.run.peak(config)
                if found and peak.num_bytes >= found[-1].peak.num_bytes and length > 1:
                    break
                found.append(Chosen(config, peak))
        return min(found, key=lambda one: one.peak.num_bytes)


def _steps(most: int) -> list[int]:
    """Returns numbers from 1 to `most`, at most HOST_STEPS of them, in equal steps."""
    steps = min(most, HOST_STEPS)
    return [most * step // steps for step in range(1, steps + 1)]


def prices(mix: StageMix) -> list[LayerPrice]:
    return [choice.price for choice in mix.choices]
