"""The best mix of actions for the layers of one stage.

The layers of a stage are alike, so only the number of layers with each action counts, and the order
in which the actions follow one another. With W micro-batches in flight, backward holds

    (W - 1) K + C + q

when it rebuilds a layer: K is what the stage keeps for a micro-batch, C what the layers up to this
one keep, and q what the replay adds. Layers with a large q come first: the order by falling q
minimizes the largest C + q, for any numbers (Jackson's rule).

`best_mix` is exact for stages of few layers: it builds the stage in this order, and of all states
(bytes so far, fullest moment, seconds) it keeps those that no other one beats. For many layers it
takes the best two choices: with one limit on bytes and one on the number of layers, two are the
best wherever parts of a layer could be chosen. It then moves single layers to faster choices while
they fit. Standard library only.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

FEW_LAYERS = 8
MOST_STATES = 96  # that are kept for each number of layers


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


class _State(NamedTuple):
    """Layers that come first in a stage: their bytes, their fullest moment, seconds and counts."""

    kept: int
    fullest: int
    seconds: float
    counts: tuple[int, ...]


def best_mix(choices: Sequence[LayerPrice], num_layers: int, room: Room) -> Mix | None:
    """Returns a fast mix that the room holds, or None if it holds no choice for all layers."""
    mix = None if num_layers <= FEW_LAYERS else _two_and_moves(choices, num_layers, room)
    return mix or _exact_mix(choices, num_layers, room)


def _exact_mix(choices: Sequence[LayerPrice], num_layers: int, room: Room) -> Mix | None:
    order = layer_order(choices)
    states: list[list[_State]] = [[] for _ in range(num_layers + 1)]
    states[0] = [_State(0, 0, 0.0, (0,) * len(choices))]
    for place in order:
        choice = choices[place]
        # One more layer of this choice after a state that may already end with some of them.
        for done in range(num_layers):
            states[done + 1] = _useful(
                states[done + 1] + [_with(one, place, choice, room) for one in states[done]], room
            )
    best = min(states[num_layers], key=lambda one: one.seconds, default=None)
    return None if best is None else Mix(best.counts, best.seconds)


def _with(state: _State, place: int, choice: LayerPrice, room: Room) -> _State:
    kept = state.kept + choice.kept
    counts = state.counts[:place] + (state.counts[place] + 1,) + state.counts[place + 1 :]
    fullest = max(state.fullest, kept + choice.rebuilt)
    return _State(kept, fullest, state.seconds + choice.seconds, counts)


def _useful(found: list[_State], room: Room) -> list[_State]:
    """Returns the states within the room that no other one beats, and at most MOST_STATES."""
    useful: list[_State] = []
    for one in sorted(set(found)):  # by bytes
        if (room.in_flight - 1) * one.kept + one.fullest > room.limit:
            continue
        if not any(
            other.fullest <= one.fullest and other.seconds <= one.seconds for other in useful
        ):
            useful.append(one)
    step = -(-len(useful) // MOST_STATES)
    return useful if step <= 1 else [*useful[:-1:step], useful[-1]]


def _two_and_moves(choices: Sequence[LayerPrice], num_layers: int, room: Room) -> Mix | None:
    """Returns the best two choices, changed by moves of single layers, or None if no two fit."""

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
