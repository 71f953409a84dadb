"""The choices that a layer has, and the best mix of them for the layers of one stage.

The layers of a stage are alike, so only the number of layers with each choice counts, and the order
in which the choices follow one another. With W micro-batches in flight, backward holds

    (W - 1) K + C + q

when it rebuilds a layer: K is what the stage keeps for a micro-batch, C what the layers up to this
one keep, and q what the replay adds. Layers with a large q come first: the order by falling q
minimizes the largest C + q, for any numbers (Jackson's rule).

`best_mix` is exact: it builds the stage in this order, and of all beginnings (bytes so far, fullest
moment, seconds) it keeps those that no other one beats. With a price of bytes as a bound it looks
only at those that cost little more than the cheapest, and at more if they do not prove the best.

`layer_choices` are the actions that a layer can have under a recompute policy, with the price of
each. Bytes come from memory/predict/, for a stage of one layer; seconds come from the time model.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter, le
from typing import Any, NamedTuple

from megatron_lite.config.policy import LayerAction, Layers, Rule
from megatron_lite.config.regions import MLP_REGION, POINTWISE, REGIONS, nested
from megatron_lite.config.run import RunConfig
from megatron_lite.description.sizes import Sizes, layers_of
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

from .stage_time import layer_sizes, replay_time
from .work import Clock

KEEP = LayerAction()
TILES, LEAST_TILE = (4, 16), 4096


class LayerChoice(NamedTuple):
    """An action and a store, and what a layer costs with them.

    kept: the bytes that it keeps on the device for backward, for each micro-batch in flight.
    rebuilt: the bytes that its replay adds to them.
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
        rules, first = [], 0
        for choice, count in self.rows:
            if first < num_layers:
                layers = Layers(first, min(first + count, num_layers) - 1)
                rules.append(Rule(layers=(layers,), action=choice.action, store=choice.store))
            first += count
        return tuple(rules)


class _Beginning(NamedTuple):
    """Layers that come first in a stage: their bytes, their fullest moment, and their seconds.

    before: the last layer's choice, and those before it in the same way.
    """

    kept: int
    fullest: int
    seconds: float
    before: tuple[Any, ...] = ()


class Bound(NamedTuple):
    """A lower bound of the seconds of a mix, the seconds that a kept byte costs in it, and what the
    cheapest layer then costs."""

    seconds: float
    price: float
    cheapest: float


def least_seconds(
    choices: tuple[LayerChoice, ...], num_layers: int, in_flight: int, limit: int
) -> Bound | None:
    """Returns the bound that parts of layers would reach, or None if no mix fits.

    in_flight: W, the forwards that wait for their backward at once.
    limit: the bytes for all of them and a replay.
    """
    space = (limit - min(one.rebuilt for one in choices)) / in_flight  # for K, at most
    if num_layers * min(one.kept for one in choices) > space:
        return None
    return max(
        Bound(num_layers * cheapest - price * space, price, cheapest)
        for cheapest, price in _lines(choices)
    )


@lru_cache(64)
def _lines(choices: tuple[LayerChoice, ...]) -> list[tuple[float, float]]:
    """Returns the seconds of the cheapest choice for each price of a byte that can matter."""
    prices = {
        (one.seconds - other.seconds) / (other.kept - one.kept)
        for one, other in itertools.permutations(choices, 2)
        if other.kept > one.kept
    }
    return [
        (min(one.seconds + price * one.kept for one in choices), price)
        for price in {0.0, *prices}
        if price >= 0.0
    ]


@lru_cache(4096)
def best_mix(
    choices: tuple[LayerChoice, ...], num_layers: int, in_flight: int, limit: int
) -> StageMix | None:
    """Returns the fastest mix, or None if none fits."""
    bound = least_seconds(choices, num_layers, in_flight, limit)
    if bound is None:
        return None
    longest = max(one.seconds for one in choices)
    _, price, cheapest = bound
    for slack in (longest / 8, longest, math.inf):
        # The fastest whole stage of those that cost at most `slack` more than the cheapest.
        found: list[list[_Beginning]] = [[] for _ in range(num_layers + 1)]
        found[0] = [_Beginning(0, 0, 0.0)]
        order = sorted(choices, key=lambda one: -one.rebuilt)
        for (step, choice), done in itertools.product(enumerate(order), range(num_layers)):
            more = []  # one more layer of this choice
            # What the layers to come keep at least decides where no moment was fuller.
            rest = (num_layers - done - 1) * min(one.kept for one in order[step:])
            for one in found[done]:
                kept, seconds = one.kept + choice.kept, one.seconds + choice.seconds
                fullest = max(one.fullest, kept + choice.rebuilt, kept + rest)
                is_cheap = seconds + price * kept <= (done + 1) * cheapest + slack
                if is_cheap and (in_flight - 1) * kept + fullest <= limit:
                    more.append(_Beginning(kept, fullest, seconds, (choice, one.before)))
            if more:
                found[done + 1] = _useful([*found[done + 1], *more])
        best = min(found[-1], key=lambda one: one.seconds, default=None)
        if best and best.seconds <= bound.seconds + slack:
            counts, before = Counter[LayerChoice](), best.before
            while before:  # from the last layer on
                choice, before = before
                counts[choice] += 1
            seconds = sum(count * one.seconds for one, count in counts.items())
            return StageMix(tuple(reversed(counts.items())), seconds)
    return None


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


def layer_choices(config: RunConfig, clock: Clock, *, host: bool) -> tuple[LayerChoice, ...]:
    """Returns the choices of a layer that can be the best of some mix.

    A choice is left out if another one keeps no more, rebuilds no more and is no slower. If layers
    differ (windows, rotary embeddings, experts), one of the most frequent kind stands for all.
    host: whether kept tensors may go to host memory.
    """
    sizes = layer_sizes(Sizes.of(config, clock.hardware.device))
    alike = layers_of(config)
    sizes = replace(sizes, first_layer=max(alike, key=alike.count))
    recompute = config.recompute
    host = host and config.training.cuda_graph_impl == "none"  # a graph cannot wait for copies
    skip_tail = recompute.recompute_tail_skip and not recompute.recompute_verify
    return _useful_choices(sizes, clock, skip_tail, host)


@lru_cache(1024)
def _useful_choices(
    sizes: Sizes, clock: Clock, skip_tail: bool, host: bool
) -> tuple[LayerChoice, ...]:
    stores = ["device", "host"] if host and sizes.device != "cpu" else ["device"]
    # Each tensor-parallel rank keeps a part of a unit's input.
    splits = ["split", "split+host"] if host else ["split"]
    if sizes.tp_size == 1 or sizes.sequence_parallel:
        splits = []
    priced = [
        _priced(sizes, clock, skip_tail, replace(action, tiles=tiles), store)
        for action in _actions(sizes)
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


def _actions(sizes: Sizes) -> Iterator[LayerAction]:
    """Yields every combination of the regions that free memory, and the whole layer."""
    model, (whole, _) = sizes.model, _kept(sizes)
    useful = [
        name
        for name, facts in REGIONS.items()
        if (model.builds_scores(sizes.device) or facts.needs != "scores")
        and _kept(sizes, LayerAction(regions=(name,)))[0] < whole
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


def _priced(
    sizes: Sizes, clock: Clock, skip_tail: bool, action: LayerAction, store: str
) -> LayerChoice:
    kept, moved = _kept(sizes, action, store)
    rebuilt = 2 * moved  # the tensors of this layer and of the one before come back
    whole = _kept(sizes)[0]

    def inside(region: str) -> int:
        """Returns the bytes that a replay of the region keeps, or of a tile of it."""
        freed = whole - _kept(sizes, LayerAction(regions=(region,)))[0]
        return freed // (action.tiles if region == MLP_REGION else 1)

    if action.unit:
        rebuilt += whole - (action.tiles - 1) * (inside(MLP_REGION) if action.tiles > 1 else 0)
    elif action.regions:  # they are rebuilt one at a time
        rebuilt += max(map(inside, action.regions))
    segment = _segment(action, store)
    if segment.split:  # the gather of the split unit before runs at the same time
        rebuilt += sizes.residual
    seconds = replay_time(segment, skip_tail, clock, sizes).seconds
    return LayerChoice(kept, rebuilt, seconds, moved, action, store)


@lru_cache(1024)
def _kept(sizes: Sizes, action: LayerAction = KEEP, store: str = "device") -> tuple[int, int]:
    """Returns the bytes that a layer keeps on the device and in host memory, without tables that
    all layers share."""
    terms = activation_terms(RecomputePlan((_segment(action, store),)), sizes)
    own = [term for term in terms if not term.tensor.shared]
    on_host = sum(term.num_bytes for term in own if term.on_host)
    return sum(term.num_bytes for term in own) - on_host, on_host


def _segment(action: LayerAction, store: str) -> Segment:
    return Segment(
        first_layer=0,
        unit=bool(action.unit),
        regions=frozenset(action.regions),
        tiles=action.tiles,
        store=store,
    )
