"""The fastest recompute policy of a run whose layout is given, within a budget of memory.

    choose_policy(config, hardware, budget_bytes, num_ranks) -> "0-3:full; 4-7:none"

Each pipeline rank gets the fastest mix of actions (policies.py) that fits beside its other bytes:
weights, gradients, optimizer states and workspaces. memory/predict/step_peak.py has the last word:
the space of a rank is corrected by the difference to it until the whole run fits. Standard library
only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.checks import InputError, chosen
from megatron_lite.config.policy import MAX_LENGTH, LayerAction, Layers, Policy, Rule
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage, most_in_flight, stages
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.sizes import ELEMENT_BYTES, Sizes
from megatron_lite.memory.explain.units import size
from megatron_lite.memory.predict.states import RankStates, rank_states
from megatron_lite.memory.predict.step_peak import StepPeak, fullest_step_peak, step_peak
from megatron_lite.plan.hardware import Group, Hardware
from megatron_lite.plan.layer_choices import LayerChoice, layer_choices
from megatron_lite.plan.memo import Memo
from megatron_lite.plan.operation_time import Clock
from megatron_lite.plan.policies import LayerPrice, Mix, Room, best_mix, layer_order, mix_peak
from megatron_lite.plan.stage_time import stage_time
from megatron_lite.recompute.plan import Store, keep_everything

HOST_STEPS = 8  # numbers of layers with a hosted action that are tried
ROUNDS = 6  # corrections of the space; two are usual


class Run(NamedTuple):
    """A run without a policy, and the machine that it is planned for.

    memo: results for this model on this machine.
    host_bytes: the host memory of a rank in which a policy may keep tensors. 0: none.
    """

    config: RunConfig
    hardware: Hardware
    num_ranks: int
    memo: Memo
    host_bytes: int = 0

    @property
    def dp_cp_size(self) -> int:
        """The ranks that share out the states, over data and context parallelism together."""
        parallel = self.config.parallel
        return parallel.data_parallel_size(self.num_ranks) * parallel.context_parallel_size

    @property
    def num_microbatches(self) -> int:
        """The micro-batches of a step on one rank."""
        size = self.config.parallel.data_parallel_size(self.num_ranks)
        return self.config.training.num_microbatches(size)

    def rank_peak(self, config: RunConfig, rank: int) -> StepPeak:
        """Returns the peak of a pipeline rank. config: this run with a policy."""
        return step_peak(
            config,
            rank,
            device=self.hardware.device,
            dp_cp_size=self.dp_cp_size,
            num_microbatches=self.num_microbatches,
        )

    def peak(self, config: RunConfig) -> StepPeak:
        """Returns the peak of the fullest pipeline rank. config: this run with a policy."""
        return fullest_step_peak(
            config,
            device=self.hardware.device,
            dp_cp_size=self.dp_cp_size,
            num_microbatches=self.num_microbatches,
        )


class Chosen(NamedTuple):
    """A run with its policy, and the peak of its fullest rank."""

    config: RunConfig
    peak: StepPeak


class Unreachable(NamedTuple):
    """No policy fits. smallest: the run with the smallest peak that was found."""

    smallest: Chosen


def choose_policy(
    config: RunConfig, hardware: Hardware, budget_bytes: int, num_ranks: int, *, host_bytes: int = 0
) -> str:
    """Returns the text of the fastest policy with which the fullest rank fits the budget.

    config: the run. Its own recompute flags do not count.
    budget_bytes: the bytes for everything that a rank allocates.
    host_bytes: the host memory of a rank in which the policy may keep tensors. 0: none.
    Raises InputError with the smallest reachable peak if no policy fits. Raises ValueError if the
    ranks or the batch do not divide.
    """
    found = fitted(Run(config, hardware, num_ranks, Memo(), host_bytes), budget_bytes)
    if isinstance(found, Unreachable):
        peak = found.smallest.peak
        largest = max(peak.terms, key=lambda term: term.num_bytes)
        raise InputError(
            f"no recompute policy fits in {size(budget_bytes)}: the smallest peak is "
            f"{size(peak.num_bytes)}, on pipeline rank {peak.rank}, of which "
            f"{size(largest.num_bytes)} are {largest.name}; give more memory, a smaller "
            "--micro-batch-size or more ranks"
        )
    return str(found.config.recompute.policy)


def fitted(run: Run, budget_bytes: int) -> Chosen | Unreachable:
    """Returns the run with the fastest policy that fits the budget, or that no policy fits."""
    whole = with_policy(run.config, None)
    peak = run.peak(whole)
    if peak.num_bytes <= budget_bytes:
        return Chosen(whole, peak)
    search = _RankSearch(run)
    spaces = search.spaces(search.full_mixes(), budget_bytes)
    best: Chosen | None = None
    tried: set[str] = set()
    for _ in range(ROUNDS):
        mixes = search.mixes(spaces)
        config = None if mixes is None else search.config(mixes)
        if mixes is None or config is None or str(config.recompute.policy) in tried:
            break
        tried.add(str(config.recompute.policy))
        peak = run.peak(config)
        corrected = search.spaces(mixes, budget_bytes)
        if peak.num_bytes <= budget_bytes:
            best = Chosen(config, peak)
            # One more round if this mix leaves more space than the one before.
            if any(corrected[rank] <= space for rank, space in spaces.items()):
                break
            spaces = corrected
        elif best is not None:
            break
        else:
            shrunk = {rank: min(space, corrected[rank]) for rank, space in spaces.items()}
            if shrunk == spaces:
                shrunk[search.alike(peak.rank)] -= peak.num_bytes - budget_bytes
            spaces = shrunk
    if best is not None:
        return best
    smallest = search.smallest()
    return smallest if smallest.peak.num_bytes <= budget_bytes else Unreachable(smallest)


def quickly_fitted(run: Run, budget_bytes: int) -> RunConfig | None:
    """Returns the run with a policy that is at least as fast as `fitted`, or None if none fits.

    Only the weights, gradients and optimizer states count besides the activations, so the policy
    may need more than the budget.
    """
    search = _RankSearch(run)
    spaces = {}
    for rank in search.samples():
        states = search.states(rank)
        # Under FSDP2 no gradients exist before the first backward.
        fsdp = run.config.data_parallel.use_torch_fsdp2
        spaces[rank] = budget_bytes - states.total + (states.gradients if fsdp else 0)
    mixes = search.mixes(spaces)
    return None if mixes is None else search.config(mixes)


def least_bytes(run: Run) -> int:
    """Returns about the smallest peak: that of the states and of rebuilding every layer whole."""
    search = _RankSearch(run)
    return search.bytes_of(search.full_mixes())


def whole_bytes(run: Run) -> int:
    """Returns about the peak without recomputation, as `least_bytes` does."""
    search = _RankSearch(run)
    return search.bytes_of(search.keeping_mixes())


def with_policy(config: RunConfig, text: str | None) -> RunConfig:
    """Returns the run with another policy, or with none. Other recompute settings stay."""
    kept = {
        name: getattr(config.recompute, name)
        for name in ("recompute_tail_skip", "recompute_verify")
    }
    return replace(config, recompute=RecomputeConfig(recompute_policy=text, **kept))


class _StageMix(NamedTuple):
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


class _RankSearch:
    """The search for the mixes of all pipeline ranks of a run."""

    def __init__(self, run: Run) -> None:
        self.run, config = run, run.config
        parallel = config.parallel
        self.size = parallel.pipeline_model_parallel_size
        self.stages = stages(parallel, config.model.num_layers)
        self.num_chunks = len(self.stages) // self.size
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        element = chosen("the precision", config.training.precision, ELEMENT_BYTES)
        self.clock = Clock(run.hardware, element, tp=Group(tp), cp=Group(cp, tp))
        self.choices = layer_choices(config, self.clock, run.memo, host=run.host_bytes > 0)

    def alike(self, rank: int) -> int:
        """Returns the rank whose bytes besides activations stand for those of this one."""
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

    def spaces(self, mixes: Sequence[_StageMix], budget_bytes: int) -> dict[int, int]:
        """Returns the bytes that activations may take, by rank of `samples`.

        They are the budget without what the full prediction counts besides the peak of the mix.
        """
        config, found = self.config(mixes), {}
        for rank in self.samples():
            room = self.room(rank, 0)
            held = mix_peak(_prices(mixes[rank]), mixes[rank].mix.counts, room)
            found[rank] = budget_bytes - (self.run.rank_peak(config, rank).num_bytes - held)
        return found

    def room(self, rank: int, limit: int) -> Room:
        """Returns the room of each stage of a rank."""
        in_flight = most_in_flight(
            size=self.size,
            rank=rank,
            num_microbatches=self.run.num_microbatches,
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

    def mixes(self, spaces: dict[int, int]) -> list[_StageMix] | None:
        """Returns the fastest mix of every rank, or None if one has none."""
        found = []
        for rank in range(self.size):
            mix = self.best(rank, self.room(rank, spaces[self.alike(rank)]))
            if mix is None:
                return None
            found.append(mix)
        return found

    def best(self, rank: int, room: Room) -> _StageMix | None:
        """Returns the fastest mix of a rank's stages: on the device, or with one hosted action."""
        stage = self.stages[rank]
        on_device = tuple(one for one in self.choices if not one.store.endswith("host"))
        key = ("mix", self.choices, stage.num_layers, room)
        return self.run.memo.once(key, lambda: self._best(on_device, stage, room))

    def _best(
        self, on_device: tuple[LayerChoice, ...], stage: Stage, room: Room
    ) -> _StageMix | None:
        prices = [one.price for one in on_device]
        mix = best_mix(prices, stage.num_layers, room)
        best = None if mix is None else _StageMix(on_device, mix)
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
                    break
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
                    best = _StageMix(choices, mix._replace(seconds=below))
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
                memo=run.memo,
            )
            return time.forward.total(), time.backward.total()

        sizes = Sizes.of(run.config, device=run.hardware.device, stage=stage)
        key = ("stage", replace(sizes, first_layer=0), stage.num_layers)
        forward, backward = run.memo.once(key, whole)
        first = hosted.moved / run.hardware.host_bandwidth
        total = count * first
        return (
            self.clock.exposed(total, forward) + first + self.clock.exposed(total - first, backward)
        )

    def full_mixes(self) -> list[_StageMix]:
        """Returns the mixes in which every layer is rebuilt whole."""
        full = next(one for one in self.choices if one.action.unit and one.store == "device")
        return [
            _StageMix((full,), Mix((stage.num_layers,), 0.0)) for stage in self.stages[: self.size]
        ]

    def keeping_mixes(self) -> list[_StageMix]:
        """Returns the mixes in which every layer keeps everything."""
        none = next(one for one in self.choices if one.action == LayerAction())
        return [
            _StageMix((none,), Mix((stage.num_layers,), 0.0)) for stage in self.stages[: self.size]
        ]

    def bytes_of(self, mixes: Sequence[_StageMix]) -> int:
        """Returns the bytes of states and activations of the fullest rank."""
        return max(
            self.states(rank).total
            + mix_peak(_prices(mixes[rank]), mixes[rank].mix.counts, self.room(rank, 0))
            for rank in self.samples()
        )

    def config(self, mixes: Sequence[_StageMix]) -> RunConfig:
        """Returns the run with the mixes as its policy.

        All stages of a rank have the same rules.
        """
        return with_policy(self.run.config, self._text(mixes))

    def _text(self, mixes: Sequence[_StageMix]) -> str | None:
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


def _prices(mix: _StageMix) -> list[LayerPrice]:
    return [choice.price for choice in mix.choices]
