"""The choices that a layer has, and the best mix of them for the layers of one stage.

Of neighbouring layers that are alike, only the number with each choice counts, and the order in
which the choices follow one another. With W micro-batches in flight, backward holds

    (W - 1) K + C + q

when it rebuilds a layer: K is what the stage keeps for a micro-batch, C what the layers up to this
one keep, and q what the replay adds. Of alike layers, those with a large q come first: the order by
falling q minimizes the largest C + q, for any numbers (Jackson's rule).

`best_mix` is exact: it builds the stage in this order, and of all beginnings (bytes so far, fullest
moment, seconds) it keeps those that no other one beats.

`layer_choices` are the actions that a layer can have under a recompute policy, with the price of
each. Bytes come from memory/predict/, for a stage of one layer; seconds come from the time model.
"""

import bisect
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter, le, mul
from typing import Any, NamedTuple

from megatron_lite.config.policy import LayerAction, Layers, Rule
from megatron_lite.config.regions import MLP_REGION, POINTWISE, REGIONS, nested
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import whole_model
from megatron_lite.description.sizes import Sizes, layers_of
from megatron_lite.memory.predict.stage_course import stage_course
from megatron_lite.memory.predict.walk import GatheredWeights
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment, keep_everything

from .stage_time import layer_sizes, layers_time, passed, replay_time
from .work import Clock, sum_of

KEEP = LayerAction()
TILES, LEAST_TILE = (4, 16), 4096


class LayerChoice(NamedTuple):
    """An action and a store, and what a layer costs with them.

    kept: the bytes that it keeps on the device for backward, for each micro-batch in flight.
    rebuilt: the bytes that its backward adds to them: its replay, and its largest temporary.
    seconds: the time of the replay.
    moved: the bytes that it moves to host memory and back.
    """

    kept: int
    rebuilt: int
    seconds: float
    moved: int = 0
    action: LayerAction = KEEP
    store: str = "device"

    @property
    def price(self) -> tuple[float, ...]:
        """The figures, of which a smaller one is better."""
        return self[:4]

    @property
    def on_host(self) -> bool:
        """Tells whether what the layer keeps goes to host memory."""
        return self.store.endswith("host")


class StageMix(NamedTuple):
    """How many layers of a stage have each choice, in the order of the layers, and the time that
    they add."""

    rows: tuple[tuple[LayerChoice, int], ...]
    seconds: float

    def peak(self, in_flight: int) -> int:
        """Returns the most bytes of activations with so many forwards in flight."""
        kept = fullest = 0
        for choice, count in self.rows:
            kept += count * choice.kept
            fullest = max(fullest, kept + choice.rebuilt)
        return (in_flight - 1) * kept + fullest

    def rules(self, num_layers: int) -> tuple[Rule, ...]:
        """Returns the rules of a policy for the first so many layers, which they name."""
        places, first = defaultdict[tuple[LayerAction, str], list[Layers]](list), 0
        for kind, rows in itertools.groupby(self.rows, lambda row: (row[0].action, row[0].store)):
            end = min(first + sum(count for _, count in rows), num_layers)
            if first < end:
                places[kind].append(Layers(first, end - 1))
            first = end
        return tuple(
            Rule(layers=tuple(layers), action=action, store=store)
            for (action, store), layers in places.items()
        )


class _Beginning(NamedTuple):
    """Layers that come first in a stage: their bytes, their fullest moment, and their seconds.

    before: the last layer's choice, and those before it in the same way.
    """

    kept: int
    fullest: int
    seconds: float
    before: tuple[Any, ...] = ()


class Alike(NamedTuple):
    """Neighbouring layers that are alike, with the choices of each of them, and their number."""

    choices: tuple[LayerChoice, ...]
    length: int


def least_seconds(runs: tuple[Alike, ...], in_flight: int, limit: int) -> float | None:
    """Returns a lower bound of the seconds of a mix, which parts of layers would reach, or None if
    no mix fits.

    runs: the layers of a stage in order.
    in_flight: W, the forwards that wait for their backward at once.
    limit: the bytes for all of them and a replay.
    """
    layers = Counter[tuple[LayerChoice, ...]]()
    for choices, count in runs:
        layers[choices] += count
    rebuilt = min((one.rebuilt for choices in layers for one in choices), default=0)
    space = (limit - rebuilt) / in_flight  # for K, at most
    if sum(count * min(one.kept for one in kind) for kind, count in layers.items()) > space:
        return None
    return max(
        sum(map(mul, layers.values(), cheapest)) - price * space
        for price, cheapest in _lines(tuple(layers))
    )


@lru_cache(64)
def _lines(kinds: tuple[tuple[LayerChoice, ...], ...]) -> list[tuple[float, list[float]]]:
    """Returns the prices of a byte that can matter, each with the least that a layer of each kind
    then costs."""
    prices = {
        (one.seconds - other.seconds) / (other.kept - one.kept)
        for choices in kinds
        for one, other in itertools.permutations(choices, 2)
        if other.kept > one.kept
    }
    return [
        (price, [min(one.seconds + price * one.kept for one in choices) for choices in kinds])
        for price in {0.0, *prices}
        if price >= 0.0
    ]


@lru_cache(4096)
def best_mix(runs: tuple[Alike, ...], in_flight: int, limit: int) -> StageMix | None:
    """Returns the fastest mix for the layers of a stage, or None if none fits."""
    ends = [_Beginning(0, 0, 0.0)]
    later = sum(count * min(one.kept for one in choices) for choices, count in runs)
    for number, (choices, count) in enumerate(runs, 1):
        found: list[list[_Beginning]] = [[] for _ in range(count + 1)]
        found[0] = ends
        order = sorted(choices, key=lambda one: -one.rebuilt)
        later -= count * min(one.kept for one in choices)
        for (step, choice), done in itertools.product(enumerate(order), range(count)):
            # What the layers to come keep at least decides where no moment was fuller.
            rest = later + (count - done - 1) * min(one.kept for one in order[step:])
            last = order[step:] if number == len(runs) else runs[-1].choices
            rest += min(one.rebuilt for one in last)
            more = []  # one more layer of this choice
            for one in found[done]:
                kept, seconds = one.kept + choice.kept, one.seconds + choice.seconds
                fullest = max(one.fullest, kept + choice.rebuilt, kept + rest)
                if (in_flight - 1) * kept + fullest <= limit:
                    more.append(_Beginning(kept, fullest, seconds, (choice, one.before)))
            if more:
                found[done + 1] = _useful([*found[done + 1], *more])
        ends = found[-1]
    best = min(ends, key=lambda one: one.seconds, default=None)
    return _mix(best) if best else None


def _mix(whole: _Beginning) -> StageMix:
    chosen, before = list[LayerChoice](), whole.before
    while before:  # from the last layer on
        choice, before = before
        chosen.append(choice)
    rows = tuple((one, len([*same])) for one, same in itertools.groupby(reversed(chosen)))
    return StageMix(rows, sum(count * one.seconds for one, count in rows))


def _useful(found: Iterable[_Beginning]) -> list[_Beginning]:
    """Returns those that no other one beats."""
    useful = []
    fullest, seconds = list[int](), list[float]()  # of the fastest so far: rising, and falling
    for one in sorted(found, key=itemgetter(0, 1, 2)):  # by bytes
        place = bisect.bisect_right(fullest, one.fullest)
        if place and seconds[place - 1] <= one.seconds:
            continue
        useful.append(one)
        stop = place
        while stop < len(fullest) and seconds[stop] >= one.seconds:
            stop += 1
        fullest[place:stop], seconds[place:stop] = [one.fullest], [one.seconds]
    return useful


def layer_choices(
    config: RunConfig, clock: Clock, *, host: bool, shards: int = 1
) -> tuple[dict[int, tuple[LayerChoice, ...]], LayerChoice]:
    """Returns the choices of each kind of layer that can be the best of some mix, by the first
    layer of the kind (see `layers_of`), and what stands for the head behind the last layer.

    A choice is left out if another one keeps no more, rebuilds no more and is no slower. Every kind
    has the hosted choices of all.
    host: whether kept tensors may go to host memory.
    shards: the ranks over which FSDP2 shards the states.
    """
    stage = whole_model(1)
    sizes = Sizes.in_training(config, device=clock.hardware.device, stage=stage, sharded=shards > 1)
    recompute = config.recompute
    host = host and config.training.cuda_graph_impl == "none"  # a graph cannot wait for copies
    skip_tail = recompute.recompute_tail_skip and not recompute.recompute_verify
    kinds = dict[int, _Kind]()
    for first in {*layers_of(config)}:
        one = replace(layer_sizes(sizes), first_layer=first)
        weights = GatheredWeights.of(config, one, stage, shards)
        kinds[first] = _Kind(one, weights, clock, skip_tail)
    found = {first: _useful_choices(kind, host) for first, kind in kinds.items()}
    hosted = {
        (one.action, one.store): None
        for choices in found.values()
        for one in choices
        if one.on_host
    }
    for first, choices in found.items():
        found[first] = tuple(one for one in choices if not one.on_host) + tuple(
            _priced(kinds[first], *one) for one in hosted
        )
    sizes = replace(sizes, has_embedding=False)
    weights = GatheredWeights.of(config, sizes, stage, shards)
    head = stage_course(keep_everything(0), sizes, weights)
    # All backwards of layers hold the gradient of their output besides.
    added = head.forward.kept + head.backward.fullest.num_bytes - sizes.residual
    return found, LayerChoice(0, added, 0.0)


class _Kind(NamedTuple):
    """A kind of layer, and what decides the figures of its choices.

    weights: those that FSDP2 gathers.
    """

    sizes: Sizes
    weights: GatheredWeights
    clock: Clock
    skip_tail: bool

    def bytes_of(self, segment: Segment) -> tuple[int, int, int]:
        """Returns the bytes that a layer keeps on the device, those that it holds besides at its
        fullest moment, and those that it keeps in host memory."""
        course = stage_course(RecomputePlan((segment,)), self.sizes, self.weights)
        kept = course.forward.kept
        in_forward = course.forward.fullest.num_bytes - kept
        return kept, max(course.backward.fullest.num_bytes, in_forward), course.on_host


@lru_cache(1024)
def _useful_choices(kind: _Kind, host: bool) -> tuple[LayerChoice, ...]:
    sizes = kind.sizes
    stores = ["device", "host"] if host and sizes.device != "cpu" else ["device"]
    # Each tensor-parallel rank keeps a part of a unit's input.
    splits = ["split", "split+host"] if host else ["split"]
    if sizes.tp_size == 1 or sizes.sequence_parallel:
        splits = []
    priced = [
        _priced(kind, replace(action, tiles=tiles), store)
        for action in _actions(kind)
        for tiles in tile_counts(sizes, action)
        for store in stores + splits * action.unit
    ]
    found: list[LayerChoice] = []
    # The cheapest first, so that of two equal choices the simpler one stays.
    for one in sorted(priced, key=lambda choice: choice.price):
        if not any(all(map(le, other.price, one.price)) for other in found):
            found.append(one)
    return tuple(found)


def tile_counts(sizes: Sizes, action: LayerAction) -> Iterator[int]:
    """Yields into how many tiles of the sequence an action can cut the MLP, as far as tiles of
    LEAST_TILE tokens are left."""
    yield 1
    rows = sizes.own_seq_length // (sizes.tp_size if sizes.sequence_parallel else 1)
    for tiles in TILES if sizes.model.num_dense_layers else ():
        has_mlp = action.unit or MLP_REGION in action.regions
        if has_mlp and rows % tiles == 0 and sizes.tokens // tiles >= LEAST_TILE:
            yield tiles


def _actions(kind: _Kind) -> Iterator[LayerAction]:
    """Yields every combination of the regions that free memory, and the whole layer."""
    model = kind.sizes.model
    whole, *_ = kind.bytes_of(_segment(KEEP))
    useful = [
        name
        for name, facts in REGIONS.items()
        if (model.builds_scores(kind.sizes.device) or facts.needs != "scores")
        and kind.bytes_of(_segment(LayerAction(regions=(name,))))[0] < whole
    ]
    # The name `pointwise` stands for every cheap region, those of experts too.
    dense = {name for name in POINTWISE if REGIONS[name].needs != "experts"}
    implied = set(POINTWISE) - dense if model.num_experts is None else set()
    for number in range(len(useful) + 1):
        for regions in itertools.combinations(useful, number):
            if not nested(regions):
                more = implied if dense <= {*regions} else set()
                yield LayerAction(regions=tuple(sorted({*regions, *more})))
    yield LayerAction(unit=1)


@lru_cache(1024)
def _priced(kind: _Kind, action: LayerAction, store: str) -> LayerChoice:
    sizes, clock, segment = kind.sizes, kind.clock, _segment(action, store)
    kept, rebuilt, moved = kind.bytes_of(segment)
    rebuilt += moved  # the tensors of the layer before come back too
    if segment.split:  # the gather of the split unit before runs at the same time
        rebuilt += sizes.residual
    once = layers_time(sizes, 1, clock).backward
    again = replay_time(segment, kind.skip_tail, clock, sizes)
    seconds = passed(sum_of([(once, 1.0), (again, 1.0)]), clock) - passed(once, clock)
    return LayerChoice(kept, rebuilt, seconds, moved, action, store)


def _segment(action: LayerAction, store: str = "device") -> Segment:
    return Segment(
        first_layer=0,
        unit=bool(action.unit),
        regions=frozenset(action.regions),
        tiles=action.tiles,
        store=store,
    )
