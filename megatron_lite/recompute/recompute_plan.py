"""The recompute plan: which activations of a stage backward rebuilds, and where kept tensors live.

A plan is plain data. The code that runs it, the code that predicts its memory and the code that
explains it read the same object. Equal plans compare equal. Standard library only.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_lite.config.policy import Policy
from megatron_lite.config.regions import MLP_REGION, PARTS, nested, parts_of


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
    tiles: into how many tiles of the sequence the MLP is cut that a unit or a region rebuilds.
    store: where the kept tensors live (config/policy.py): on this device or in host memory. "split"
        is for the input of a unit: each tensor-parallel rank keeps 1/t of it. "split+host" combines
        both.
        "host(..)" is for a layer that keeps everything: host memory for some parts of it.
    """

    first_layer: int
    num_layers: int = 1
    unit: bool = False
    regions: frozenset[str] = frozenset()
    ops: tuple[str, ...] = ()
    router: bool = False
    tiles: int = 1
    store: str = "device"

    @property
    def numbers(self) -> range:
        """The numbers of the layers within the stage."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @cached_property
    def is_whole(self) -> bool:
        """Tells whether a replay runs the layers from their input on, not single regions of them.

        It leaves out what an `ops(...)` policy keeps.
        """
        return self.unit or bool(self.ops)

    @cached_property
    def split(self) -> bool:
        """Tells whether each tensor-parallel rank keeps only its 1/t of the unit's input."""
        return self.store.startswith("split")

    @cached_property
    def on_host(self) -> bool:
        """Tells whether kept tensors go to host memory: all of them, unless `host_modules` is
        set."""
        return "host" in self.store

    @cached_property
    def rebuilt(self) -> frozenset[str]:
        """The regions that a run of the layers with gradients rebuilds: those named, and in a unit
        an MLP in tiles."""
        return self.regions | {MLP_REGION} if self.tiles > 1 else self.regions

    @property
    def host_modules(self) -> frozenset[str]:
        """The modules of a layer whose saved tensors go to host memory; empty: all of them."""
        return frozenset(PARTS[name] for name in parts_of(self.store))


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

    @cached_property
    def uses_stores(self) -> bool:
        """Tells whether a forward keeps tensors in host memory or in an arena."""
        return self.contiguous or any(segment.on_host for segment in self.segments)

    @cached_property
    def tiles(self) -> tuple[int, ...]:
        """The tiles of the MLP of each layer."""
        return tuple(one.tiles for one in self.segments for _ in range(one.num_layers))

    @cached_property
    def num_layers(self) -> int:
        """The number of layers of the stage."""
        return sum(segment.num_layers for segment in self.segments)


@lru_cache
def keep_everything(num_layers: int) -> RecomputePlan:
    """Returns the plan that rebuilds nothing."""
    return RecomputePlan(tuple(Segment(first_layer=layer) for layer in range(num_layers)))


def segments(policy: Policy, num_layers: int, stage: int = 0) -> Iterator[Segment]:
    """Yields segments that cover every layer of the stage once, in order.

    The rule of a layer follows from the numbers of the layer and of its stage alone.
    """
    decided = [(layer, policy.rule_of(layer, stage)) for layer in range(num_layers)]
    # Units are cut within a run of consecutive layers under one rule, so a unit never spans a layer
    # that another rule decides. "2:none; *:full/2" has the units 0-1, 3-4, and so on.
    for rule, run in itertools.groupby(decided, key=lambda pair: pair[1]):
        layers, action = [layer for layer, _ in run], rule.action
        size = action.unit or 1
        # A region inside another one is recomputed with it.
        inner = [region for region, _ in nested(action.regions)]
        for first in layers[::size]:
            yield Segment(
                first_layer=first,
                num_layers=min(size, layers[-1] + 1 - first),
                unit=action.unit > 0,
                regions=frozenset(action.regions).difference(inner),
                ops=action.ops,
                router=action.router,
                tiles=action.tiles,
                store=rule.store,
            )
