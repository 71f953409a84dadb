"""The best mix of actions for the layers of one stage.

The layers of a stage are alike, so only the number of layers with each action counts, and the order
in which the actions follow one another. With W micro-batches in flight, backward holds

    (W - 1) K + C + q

when it rebuilds a layer: K is what the stage keeps for a micro-batch, C what the layers up to this
one keep, and q what the replay adds. Layers with a large q come first: the order by falling q
minimizes the largest C + q, for any numbers (Jackson's rule).

`best_mix` tries the numbers of layers in that order. A price for each kept byte tells which starts
cannot win: all seconds plus all bytes at that price are at least the number of layers times the
cheapest choice. The best mix of two choices, found first, gives the price. Standard library only.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

MOST_VISITS = 500  # of a search; up to there it is exact


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

    def most_kept(self, fullest: int) -> int:
        """Returns the most bytes that the layers may keep for one micro-batch.

        fullest: the most bytes of the layers of one micro-batch at the replay of one of them.
        """
        if self.in_flight == 1:
            return self.limit if fullest <= self.limit else -1
        return min(self.limit // self.in_flight, (self.limit - fullest) // (self.in_flight - 1))


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


def best_mix(
    choices: Sequence[LayerPrice], num_layers: int, room: Room, *, below: float = math.inf
) -> Mix | None:
    """Returns the fastest mix that the room holds, or None if it holds none.

    below: only a mix with fewer seconds counts.
    """
    best, price = _best_of_two(choices, num_layers, room)
    if best is not None and best.seconds >= below:
        best = None
    order = layer_order(choices)
    cheapest = _least([choices[place].seconds + price * choices[place].kept for place in order])
    least_kept = _least([choices[place].kept for place in order])
    visits = 0

    def visit(counts: tuple[int, ...], kept: int, fullest: int, seconds: float) -> None:
        """Tries all numbers of the choices after the first ones in order, which are given."""
        nonlocal best, visits
        start, left = len(counts), num_layers - sum(counts)
        if start == len(order):
            by_choice = dict(zip(order, counts, strict=True))
            best = Mix(tuple(by_choice[place] for place in range(len(order))), seconds)
            return
        visits += 1
        choice, further = choices[order[start]], []
        for count in range(left + 1) if start + 1 < len(order) else (left,):
            now, spent = kept + count * choice.kept, seconds + count * choice.seconds
            full = max(fullest, now + choice.rebuilt) if count else fullest
            spare, rest = room.most_kept(full) - now, left - count
            if rest * least_kept[start + 1] <= spare:
                bound = spent + max(rest * cheapest[start + 1] - price * spare, 0.0)
                further.append((bound, count, now, full, spent))
        for bound, count, now, full, spent in sorted(further):
            # A bound that is equal but for rounding cannot win.
            limit = (below if best is None else best.seconds) * (1.0 - 1e-12)
            if bound >= limit or visits >= MOST_VISITS:
                break
            visit((*counts, count), now, full, spent)

    visit((), 0, 0, 0.0)
    return best


def _best_of_two(
    choices: Sequence[LayerPrice], num_layers: int, room: Room
) -> tuple[Mix | None, float]:
    """Returns the fastest mix of two choices, and the seconds that it pays for a byte."""
    best, price = None, 0.0
    for slow, fast in itertools.permutations(range(len(choices)), 2):
        pair = choices[slow], choices[fast]
        if pair[1].seconds > pair[0].seconds:
            continue
        count = bisect.bisect_right(
            range(num_layers + 1),
            room.limit,
            key=lambda number: mix_peak(pair, (num_layers - number, number), room.in_flight),
        )
        count = max(count - 1, 0)
        seconds = (num_layers - count) * pair[0].seconds + count * pair[1].seconds
        if best is not None and seconds >= best.seconds:
            continue
        if mix_peak(pair, (num_layers - count, count), room.in_flight) <= room.limit:
            counts = [0] * len(choices)
            counts[slow], counts[fast] = num_layers - count, count
            best = Mix(tuple(counts), seconds)
            more = pair[1].kept - pair[0].kept
            price = (pair[0].seconds - pair[1].seconds) / more if more > 0 else 0.0
    return best, price


def _least(values: Sequence[float]) -> list[float]:
    """Returns the least of the values from each place on, and 0 at the end."""
    return [*reversed([*itertools.accumulate(reversed(values), min)]), 0.0]
