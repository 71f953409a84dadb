"""The recompute plan: which activations of a stage backward rebuilds, and where kept tensors live.

A plan is plain data. The code that runs it, the code that predicts its memory and the code that
explains it read the same object. Equal plans compare equal. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_lite.config.policy import LayerAction, Layers, Policy, Rule
from megatron_lite.config.regions import is_on_host, modules_of, without_nested

Store = str  # of config/policy.py
KEEP = Rule(layers=(Layers(),), action=LayerAction())
MOST_NAMED = 3  # spans of layers in a rule that `str(plan)` writes


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
    router: whether the policy says that the choice of a router is kept.
    store: where the kept tensors live: on this device or in host memory. "split" is for the input
        of a unit: each tensor-parallel rank keeps 1/t of it. "split+host" combines both.
        "host(..)" is for a layer that keeps everything: host memory for some parts of it.
    """

    first_layer: int
    num_layers: int = 1
    unit: bool = False
    regions: frozenset[str] = frozenset()
    ops: tuple[str, ...] = ()
    router: bool = False
    store: Store = "device"

    def __post_init__(self) -> None:
        assert self.num_layers >= 1 and self.unit + bool(self.regions) + bool(self.ops) <= 1, self
        assert not self.split or self.unit, self
        assert not self.ops or self.num_layers == 1, self
        assert not self.host_modules or self.action == LayerAction(), self

    @cached_property
    def split(self) -> bool:
        """Tells whether each tensor-parallel rank keeps only its 1/t of the unit's input."""
        return self.store.startswith("split")

    @cached_property
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
            router=self.router,
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

    @cached_property
    def uses_stores(self) -> bool:
        """Tells whether a forward keeps tensors in host memory or in an arena."""
        return self.contiguous or any(segment.on_host for segment in self.segments)

    @cached_property
    def num_layers(self) -> int:
        """The number of layers of the stage."""
        return sum(segment.num_layers for segment in self.segments)

    def __str__(self) -> str:
        """Returns a policy that gives this plan, such as "0-3:full/2@split; 4-5:none"."""
        rules = tuple(_rules(self.segments))
        return str(Policy(_joined(rules, self.num_layers) or rules))


def keep_everything(num_layers: int) -> RecomputePlan:
    """Returns the plan that rebuilds nothing."""
    return RecomputePlan(tuple(Segment(first_layer=layer) for layer in range(num_layers)))


def segments(policy: Policy, num_layers: int, stage: int = 0) -> Iterator[Segment]:
    """Yields segments that cover every layer of the stage once, in order.

    The rule of a layer follows from the numbers of the layer and of its stage alone.
    """
    decided = [(layer, policy.rule_of(layer, stage) or KEEP) for layer in range(num_layers)]
    # Units are cut within a run of consecutive layers under one rule, so a unit never spans a layer
    # that another rule decides. "2:none; *:full/2" has the units 0-1, 3-4, and so on.
    for rule, run in itertools.groupby(decided, key=lambda pair: pair[1]):
        yield from _treated(rule, [layer for layer, _ in run])


def _treated(rule: Rule, layers: list[int]) -> Iterable[Segment]:
    action, store = rule.action, rule.store
    if action.unit:
        return (
            Segment(
                first_layer=first,
                num_layers=min(action.unit, layers[-1] + 1 - first),
                unit=True,
                router=action.router,
                store=store,
            )
            for first in layers[:: action.unit]
        )
    regions = without_nested(action.regions)
    return (
        Segment(
            first_layer=layer, regions=regions, ops=action.ops, router=action.router, store=store
        )
        for layer in layers
    )


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


def _joined(rules: tuple[Rule, ...], num_layers: int) -> tuple[Rule, ...]:
    """Returns fewer rules with the same effect, such as "every-2:full; *:none", if there are any.

    Rules with equal actions become one, although other layers lie between theirs.
    """
    found: dict[tuple[LayerAction, Store], list[Layers]] = {}
    for rule in rules:
        found.setdefault((rule.action, rule.store), []).extend(rule.layers)
    if len(found) == len(rules) or any(
        # As one rule, these neighbours would be cut into units from the first layer on.
        (one.action, one.store) == (other.action, other.store)
        for one, other in itertools.pairwise(rules)
    ):
        return ()
    joined = [
        Rule(layers=_every_nth(layers, num_layers), action=action, store=store)
        for (action, store), layers in found.items()
    ]
    longest = max(joined, key=lambda rule: len(rule.layers))
    if len(longest.layers) > MOST_NAMED:
        # The last rule may name all layers, since the first rule that names a layer decides.
        joined.remove(longest)
        joined.append(replace(longest, layers=(Layers(),)))
    return tuple(joined)


def _every_nth(layers: list[Layers], num_layers: int) -> tuple[Layers, ...]:
    """Returns these layers as every n-th layer, if they are, else as they are."""
    numbers = [one.first for one in layers if one.first == one.last]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if (
        len(numbers) == len(layers) > 2
        and numbers[0] < step  # the language knows no first layer beyond: every-2+3 cannot be read
        and numbers == [*range(numbers[0], num_layers, step)]
    ):
        return (Layers(first=numbers[0], step=step),)
    return tuple(layers)


def _alike(one: Segment, other: Segment) -> bool:
    return (one.action, one.store) == (other.action, other.store)


def _is_shorter_unit(segment: Segment, first: Segment) -> bool:
    return (
        first.unit
        and segment.unit
        and (segment.store, segment.router) == (first.store, first.router)
        and segment.num_layers < first.num_layers
    )
