"""The best mix of actions for the layers of one stage.

The layers of a stage are alike, so only the number of layers with each action counts, and the order
in which the actions follow one another. With W micro-batches in flight, backward holds

    (W - 1) K + C + q

when it rebuilds a layer: K is what the stage keeps for a micro-batch, C what the layers up to this
one keep, and q what the replay adds. Layers with a large q come first: the order by falling q
minimizes the largest C + q, for any numbers (Jackson's rule).

`best_mix` takes the best two choices: with one limit on bytes and one on the number of layers, two
are the best wherever parts of a layer could be chosen. It then moves single layers to faster
choices while they fit. Standard library only.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple


class LayerPrice(NamedTuple):
    """The price of one layer under one action.

    kept: the bytes that it keeps on the device for backward, for each micro-batch in flight.
    rebuilt: the bytes that its replay adds to them.
    seconds: the time of the replay.
    """

    kept: int
    rebuilt: int
    seconds: float


class Room(NamedTuple):
    """The space for the activations of a stage.

    in_flight: W, the forwards that wait for their backward at once.
    limit: the bytes for all of them and a replay.
    """

    in_flight: int
    limit: int


class Mix(NamedTuple):
    """The number of layers of each choice, in order, and the seconds of the replays."""

    counts: tuple[int, ...]
    seconds: float


def layer_order(choices: Sequence[LayerPrice]) -> list[int]:
    """Returns the positions of the choices in the order in which their layers follow each other."""
    return sorted(range(len(choices)), key=lambda place: -choices[place].rebuilt)


def mix_peak(choices: Sequence[LayerPrice], counts: Sequence[int], in_flight: int) -> int:
    """Returns the most bytes of a stage with so many layers of each choice, in the best order."""
    kept = fullest = 0
    for place in layer_order(choices):
        if counts[place]:
            kept += counts[place] * choices[place].kept
            fullest = max(fullest, kept + choices[place].rebuilt)
    return (in_flight - 1) * kept + fullest


def best_mix(choices: Sequence[LayerPrice], num_layers: int, room: Room) -> Mix | None:
    """Returns a fast mix that the room holds, or None if it holds no choice for all layers."""

    def mix(*layers: tuple[int, int]) -> Mix:
        """Returns the mix of pairs (choice, number of layers)."""
        counts = [0] * len(choices)
        for place, count in layers:
            counts[place] += count
        return Mix(tuple(counts), sum(count * choices[place].seconds for place, count in layers))

    def fits(one: Mix) -> bool:
        return mix_peak(choices, one.counts, room.in_flight) <= room.limit

    pairs = [
        (slow, fast)
        for slow, fast in itertools.product(range(len(choices)), repeat=2)
        if choices[fast].seconds <= choices[slow].seconds
    ]
    found = []
    for slow, fast in pairs:
        # As many layers of the faster choice as the room holds. More of them take more bytes.
        count = bisect.bisect_left(
            range(num_layers + 1),
            True,
            key=lambda number: not fits(mix((slow, num_layers - number), (fast, number))),
        )
        found += [mix((slow, num_layers - count + 1), (fast, count - 1))] if count else []
    best = min(found, key=lambda one: one.seconds, default=None)
    while best is not None:
        faster = [
            mix(*enumerate(best.counts), (slow, -1), (fast, 1))
            for slow, fast in pairs
            if best.counts[slow]
        ]
        faster = [one for one in faster if one.seconds < best.seconds and fits(one)]
        if not faster:
            return best
        best = min(faster, key=lambda one: one.seconds)
    return None
