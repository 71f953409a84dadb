"""A recompute plan: for every layer of a pipeline stage, what is rebuilt in backward and where what is kept lives.

Plain data, read alike by what runs it, prices it and explains it. Equal plans compare equal. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_lite.config.policy import Action, Layers, Policy, Rule

Store = Literal["device", "split", "host", "split+host"]
CORE_ATTENTION, LAYERNORM, MLP_REGION, ACTIVATION, DROPOUT = "core_attn", "layernorm", "mlp", "activation", "dropout"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`num_layers` consecutive layers from `first_layer` (counted within the stage) that are treated alike.

    unit: the layers form one unit: only its input is kept, and all of it runs again in backward.
    regions: names of regions inside each layer that run again; empty in a unit.
    ops: operators of which results are kept while all others run again; empty in a unit and beside regions. One layer.
    store: where what is kept lives: on this device, in host memory, or, of a unit's input, 1/t on each tensor-parallel rank.
    """

    first_layer: int
    num_layers: int = 1
    unit: bool = False
    regions: frozenset[str] = frozenset()
    ops: tuple[str, ...] = ()
    store: Store = "device"

    def __post_init__(self) -> None:
        assert self.num_layers >= 1 and self.unit + bool(self.regions) + bool(self.ops) <= 1, self
        assert not self.split or self.unit, self
        assert not self.ops or self.num_layers == 1, self

    @property
    def split(self) -> bool:
        """Whether each tensor-parallel rank keeps its share."""
        return self.store.startswith("split")

    @property
    def on_host(self) -> bool:
        """Whether what is kept goes to host memory."""
        return self.store.endswith("host")

    @property
    def action(self) -> Action:
        """What it does, as a policy says it."""
        return Action(unit=self.num_layers if self.unit else 0, regions=tuple(sorted(self.regions)), ops=self.ops)


@dataclass(frozen=True)
class RecomputePlan:
    """The segments of one stage, in order, which cover each of its layers once.

    skip_tail: a replay does not compute what only its own output needs: the last matmul, its collective, the addition after it.
    verify: a replay is compared with its forward, bit by bit; then nothing is skipped.
    contiguous: the kept inputs of units lie in one allocation.
    """

    segments: tuple[Segment, ...]
    skip_tail: bool = True
    verify: bool = False
    contiguous: bool = False

    def __post_init__(self) -> None:
        position = 0
        for segment in self.segments:
            assert segment.first_layer == position, self
            position += segment.num_layers
        assert not (self.skip_tail and self.verify), self

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return sum(segment.num_layers for segment in self.segments)

    def __str__(self) -> str:
        """A policy that gives this plan, such as "0-3:full/2@split; 4-5:none"."""
        return str(Policy(tuple(_rules(self.segments))))


def keep_everything(num_layers: int) -> RecomputePlan:
    """The plan that rebuilds nothing."""
    return RecomputePlan(tuple(Segment(first_layer=layer) for layer in range(num_layers)))


def _rules(segments: tuple[Segment, ...]) -> Iterator[Rule]:
    """One rule for each run of alike segments. A shorter unit after units belongs to them: they did not divide their layers."""
    start = 0
    while start < len(segments):
        first, stop = segments[start], start + 1
        while stop < len(segments) and _alike(first, segments[stop]):
            stop += 1
        last = segments[stop - 1]
        if stop < len(segments) and _is_shorter_unit(segments[stop], first):
            last, stop = segments[stop], stop + 1
        layers = Layers(first.first_layer, last.first_layer + last.num_layers - 1)
        yield Rule(layers=(layers,), action=first.action, store=first.store)
        start = stop


def _alike(one: Segment, other: Segment) -> bool:
    return (one.action, one.store) == (other.action, other.store)


def _is_shorter_unit(segment: Segment, first: Segment) -> bool:
    return first.unit and segment.unit and segment.store == first.store and segment.num_layers < first.num_layers
