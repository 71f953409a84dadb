"""The best mix of actions for the layers of one stage: an exact method.

The layers of a stage are alike, so only the number of layers with each action counts, and the order
in which the actions follow one another. With W micro-batches in flight, backward holds

    (W - 1) K + C + q         when it rebuilds a layer: K is what the stage keeps, C what the layers
                              up to this one keep, and q what the replay adds
    W K                       when the last forward has ended

so layers with a large q come first: the order by falling q minimizes the largest C + q, for any
numbers (Jackson's rule). The numbers come from a search over all of them, which leaves out a part
when a lower bound of its time is not below the best time found. The bound is the lower convex hull
of (kept bytes, seconds): no mix of layers is faster at the same bytes. Standard library only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MOST_VISITS = 10_000


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
    before, after: the bytes that the stage keeps besides its layers for each micro-batch: those of
        the embedding, and those of the head.
    """

    in_flight: int
    limit: int
    before: int = 0
    after: int = 0

    def peak(self, kept: int, fullest: int) -> int:
        """Returns the most bytes held.

        kept: the bytes that all layers keep for one micro-batch.
        fullest: the most bytes of the layers of one micro-batch at the replay of one of them.
        """
        whole = self.before + kept + self.after
        return (self.in_flight - 1) * whole + max(self.before + fullest, whole)


class Mix(NamedTuple):
    """The number of layers of each choice, in order, and the seconds of the replays."""

    counts: tuple[int, ...]
    seconds: float


def layer_order(choices: Sequence[LayerPrice]) -> list[int]:
    """Returns the positions of the choices in the order in which their layers follow each other."""
    return sorted(range(len(choices)), key=lambda place: -choices[place].rebuilt)


def mix_peak(choices: Sequence[LayerPrice], counts: Sequence[int], room: Room) -> int:
    """Returns the peak of a stage with so many layers of each choice, in the best order."""
    kept = fullest = 0
    for place in layer_order(choices):
        if counts[place]:
            kept += counts[place] * choices[place].kept
            fullest = max(fullest, kept + choices[place].rebuilt)
    return room.peak(kept, fullest)


def best_mix(
    choices: Sequence[LayerPrice],
    num_layers: int,
    room: Room,
    *,
    fixed: tuple[int, int] | None = None,
    below: float = math.inf,
) -> Mix | None:
    """Returns the fastest mix that the room holds, or None if it holds none.

    fixed: (position of a choice, number of its layers), which is given; no other number of layers
        has that choice.
    below: only a mix with fewer seconds counts.
    """
    search = _MixSearch(choices, num_layers, room, fixed, below)
    search.run()
    return search.best


class _State(NamedTuple):
    """The state of a search before the next choice.

    layers: the free layers that are left. kept, fullest: of the layers before.
    seconds: the time of the layers before, and of the fixed ones.
    """

    layers: int
    kept: int
    seconds: float
    fullest: int

    def after(self, choice: LayerPrice, count: int) -> _State:
        """Returns the state after so many layers of a choice."""
        if not count:
            return self
        kept = self.kept + count * choice.kept
        return _State(
            self.layers - count,
            kept,
            self.seconds + count * choice.seconds,
            max(self.fullest, kept + choice.rebuilt),
        )


class _MixSearch:
    """A branch-and-bound search over the numbers of layers, in the order of the layers.

    It is exact up to MOST_VISITS starts. With 8 choices and 126 layers it visits a few thousand.
    With 23 choices, those of unfused attention with dropout, it can stop at the limit; it begins
    with the most promising numbers, and returns the best mix that it has seen.
    """

    def __init__(
        self,
        choices: Sequence[LayerPrice],
        num_layers: int,
        room: Room,
        fixed: tuple[int, int] | None,
        below: float,
    ) -> None:
        self.choices, self.room, self.below = choices, room, below
        self.order = layer_order(choices)
        self.fixed_place, self.fixed_count = fixed if fixed is not None else (-1, 0)
        self.fixed_start = self.order.index(self.fixed_place) if fixed is not None else -1
        self.free = num_layers - self.fixed_count
        self.best: Mix | None = None
        self.visits = 0
        self.counts = [0] * len(choices)
        # By (position in the order, free layers left): (kept, seconds, fullest) of the starts that
        # were tried and that no other one makes useless.
        self.tried: dict[tuple[int, int], list[tuple[int, float, int]]] = {}
        free = [place for place in self.order if place != self.fixed_place]
        self.last = free[-1] if free else -1
        # By position in the order: the hull of the free choices from there on.
        self.hulls = [
            _hull([choices[place] for place in self.order[start:] if place != self.fixed_place])
            for start in range(len(self.order) + 1)
        ]
        given = choices[self.fixed_place] if fixed is not None else LayerPrice(0, 0, 0.0)
        self.given_kept = self.fixed_count * given.kept
        self.given_seconds = self.fixed_count * given.seconds

    def run(self) -> None:
        if self.free < 0:
            return
        self._two_choices()
        self._visit(0, _State(self.free, 0, self.given_seconds, 0))

    def _offer(self, counts: Sequence[int], seconds: float) -> bool:
        """Takes the mix if it fits and is faster than the best so far. Returns whether it fits."""
        if mix_peak(self.choices, counts, self.room) > self.room.limit:
            return False
        if seconds < self.below:
            self.best, self.below = Mix(tuple(counts), seconds), seconds
        return True

    def _two_choices(self) -> None:
        """Offers the best mixes of two choices, so that the search can leave out much from the
        start."""
        free = [place for place in self.order if place != self.fixed_place]
        for slow in free:
            for fast in free:
                if self.choices[fast].seconds > self.choices[slow].seconds:
                    continue
                low, high = 0, self.free  # layers with the fast choice that fit, and that do not
                while low <= high:
                    middle = (low + high) // 2
                    counts = [0] * len(self.choices)
                    counts[slow] += self.free - middle
                    counts[fast] += middle
                    if self.fixed_place >= 0:
                        counts[self.fixed_place] = self.fixed_count
                    if self._offer(counts, self._seconds(counts)):
                        low = middle + 1
                    else:
                        high = middle - 1

    def _seconds(self, counts: Sequence[int]) -> float:
        return sum(
            count * choice.seconds for count, choice in zip(counts, self.choices, strict=True)
        )

    def _visit(self, start: int, state: _State) -> None:
        """Tries all numbers of the choices from `start` on."""
        if start == len(self.order):
            if state.layers == 0:
                self._offer(self.counts, self._seconds(self.counts))
            return
        self.visits += 1
        if self.visits > MOST_VISITS:
            return
        if not self._can_win(start, state) or self._is_useless(start, state):
            return
        place = self.order[start]
        for count, then in self._further(start, state):
            self.counts[place] = count
            self._visit(start + 1, then)
        self.counts[place] = 0

    def _further(self, start: int, state: _State) -> Iterator[tuple[int, _State]]:
        """Yields the numbers of a choice that can win, each with the state after these layers."""
        place = self.order[start]
        choice, layers = self.choices[place], state.layers
        if place == self.fixed_place:
            count = self.fixed_count
            yield count, state.after(choice, count)._replace(layers=layers, seconds=state.seconds)
            return
        if place == self.last:
            yield layers, state.after(choice, layers)
            return
        yield 0, state
        # From 1 layer on the bound is convex in the number of layers: the sum of a line and of a
        # convex function of a line. So the numbers that can win follow one another.
        low, high = 1, layers
        while low < high:
            middle = (low + high) // 2
            left, right = (
                self._bound(start + 1, state.after(choice, count)) for count in (middle, middle + 1)
            )
            # Where nothing fits, more layers of an earlier choice may fit, or fewer.
            if left == right == math.inf:
                low, high = 1, 1
                yield from self._all_further(start, state)
                return
            low, high = (middle + 1, high) if right < left else (low, middle)
        for counts in (range(low, layers + 1), range(low - 1, 0, -1)):
            for count in counts:
                then = state.after(choice, count)
                if not self._can_win(start + 1, then):
                    break
                yield count, then

    def _all_further(self, start: int, state: _State) -> Iterator[tuple[int, _State]]:
        choice = self.choices[self.order[start]]
        for count in range(1, state.layers + 1):
            then = state.after(choice, count)
            if self._can_win(start + 1, then):
                yield count, then

    def _can_win(self, start: int, state: _State) -> bool:
        # A bound that is equal but for rounding cannot win.
        return self._bound(start, state) < self.below * (1.0 - 1e-12)

    def _bound(self, start: int, state: _State) -> float:
        """Returns a lower bound of the seconds of all mixes that begin so."""
        # Fixed layers that come later in the order will keep their bytes too.
        given = self.given_kept if self.fixed_start >= start else 0
        spare = self._most_kept(state.fullest) - state.kept - given
        return state.seconds + _least_seconds(self.hulls[start], state.layers, spare)

    def _is_useless(self, start: int, state: _State) -> bool:
        """Returns whether a start that was tried keeps no more, is no slower and is no fuller."""
        tried = self.tried.setdefault((start, state.layers), [])
        kept, seconds, fullest = state.kept, state.seconds, state.fullest
        for other in tried:
            if other[0] <= kept and other[1] <= seconds and other[2] <= fullest:
                return True
        tried[:] = [
            one for one in tried if not (kept <= one[0] and seconds <= one[1] and fullest <= one[2])
        ]
        tried.append((kept, seconds, fullest))
        return False

    def _most_kept(self, fullest: int) -> int:
        """Returns the most bytes that the layers of the stage may keep for one micro-batch."""
        room = self.room
        # `Room.peak` is a maximum of two sums. Each of them, set to the limit, gives a bound.
        most = room.limit // room.in_flight - room.before - room.after
        if room.in_flight > 1:
            left = (room.limit - room.before - fullest) // (room.in_flight - 1)
            return min(most, left - room.before - room.after)
        return most if room.before + fullest <= room.limit else -1


def _hull(choices: Sequence[LayerPrice]) -> list[tuple[int, float]]:
    """Returns the lower convex hull of (kept bytes, seconds), with falling seconds."""
    hull: list[tuple[int, float]] = []
    for kept, seconds in sorted((choice.kept, choice.seconds) for choice in choices):
        if hull and seconds >= hull[-1][1]:  # it keeps more, and is not faster
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], (kept, seconds)):
            hull.pop()
        hull.append((kept, seconds))
    return hull


def _is_above(left: tuple[int, float], point: tuple[int, float], right: tuple[int, float]) -> bool:
    """Returns whether the point is on or above the line between the two others."""
    # Both slopes from the left point, each multiplied by both distances instead of a division.
    return (point[1] - left[1]) * (right[0] - left[0]) >= (right[1] - left[1]) * (
        point[0] - left[0]
    )


def _least_seconds(hull: list[tuple[int, float]], layers: int, spare: int) -> float:
    """Returns a lower bound of the seconds of so many layers that keep `spare` bytes at most."""
    if layers == 0:
        return 0.0 if spare >= 0 else math.inf
    if not hull or spare < layers * hull[0][0]:
        return math.inf
    # The layers keep `each` bytes on average, and no mix is faster than the hull at that number.
    each = spare / layers
    for (kept, seconds), (more, fewer) in itertools.pairwise(hull):
        if each < more:
            return layers * (seconds + (fewer - seconds) * (each - kept) / (more - kept))
    return layers * hull[-1][1]
