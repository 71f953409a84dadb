"""The recompute plan: which activations of a stage backward rebuilds, and where kept tensors live.

A plan is plain data. The code that runs it, the code that predicts its memory and the code that
explains it read the same object. Equal plans compare equal. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lite.config.host_parts import is_on_host, modules_of
from megatron_lite.config.policy import LayerAction, Layers, Policy, Rule

Store = str  # of config/policy.py


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive layers of a stage that the plan treats alike.

    first_layer: the number of the first layer, counted within the stage.
    num_layers: how many layers the segment has.
    unit: whether the layers form one unit. A unit keeps only its input, and backward runs all of
        its layers again.
    regions: names of the regions inside each layer that backward runs again. Empty in a unit.
    ops: the entries of an `ops(...)` policy. Results of these operators are kept, and all other
        operators run again. Empty in a unit or with regions. A segment with ops has one layer.
    store: where the kept tensors live: on this device or in host memory. "split" is for the input
        of a unit: each tensor-parallel rank keeps 1/t of it. "split+host" combines both.
        "host(..)" is for a layer that keeps everything: host memory for some parts of it.
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
        assert not self.host_modules or self.action == LayerAction(), self

    @property
    def split(self) -> bool:
        """Tells whether each tensor-parallel rank keeps only its 1/t of the unit's input."""
        return self.store.startswith("split")

    @property
    def on_host(self) -> bool:
        """Tells whether kept tensors go to host memory: all of them, unless `host_modules` is
        set."""
        return is_on_host(self.store)

    @property
    def host_modules(self) -> frozenset[str]:
        """The modules of a layer whose saved tensors go to host memory; empty: all of them."""
        return modules_of(self.store)

    def moves(self, module: str | None, *, stays: bool) -> bool:
        """Returns whether a kept tensor goes to host memory.

        module: the module that saves it first, by its name within the layer.
        stays: whether no policy moves the tensor.
        """
        return self.on_host and not stays and (not self.host_modules or module in self.host_modules)

    @property
    def action(self) -> LayerAction:
        """The segment's action, as the policy language expresses it."""
        return LayerAction(
            unit=self.num_layers if self.unit else 0,
            regions=tuple(sorted(self.regions)),
            ops=self.ops,
        )


@dataclass(frozen=True)
class RecomputePlan:
    """The segments of one stage, in order. They cover each layer of the stage once.

    skip_tail: whether a replay leaves out the operations that only its own output needs. These are
        the last matmul, its collective, and the addition after it.
    verify: whether each replay is compared with its forward, bit by bit. A verified replay leaves
        nothing out, so `skip_tail` must be False.
    contiguous: whether the kept inputs of units lie in one allocation.
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
        """The number of layers of the stage."""
        return sum(segment.num_layers for segment in self.segments)

    def __str__(self) -> str:
        """Returns a policy that gives this plan, such as "0-3:full/2@split; 4-5:none"."""
        return str(Policy(tuple(_rules(self.segments))))


def keep_everything(num_layers: int) -> RecomputePlan:
    """Returns the plan that rebuilds nothing."""
    return RecomputePlan(tuple(Segment(first_layer=layer) for layer in range(num_layers)))


def _rules(segments: tuple[Segment, ...]) -> Iterator[Rule]:
    """Yields one rule for each run of consecutive segments that are alike.

    A shorter unit directly after longer units belongs to their rule. The unit size did not divide
    the number of layers: full/2 on five layers ends with a unit of one layer.
    """
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
    return (
        first.unit
        and segment.unit
        and segment.store == first.store
        and segment.num_layers < first.num_layers
    )
