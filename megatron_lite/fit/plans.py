"""The fastest choice of one action for each layer within a budget.

The bytes of a step are known for the policy that rebuilds every layer in full. Another action
changes them by what it keeps more from the layer's forward to its backward, and by the peaks inside
these two. Layers run forward in order and backward in reverse, so the bytes at a layer depend on
what the layers before it keep. The search goes through the layers in order, and keeps every state
(bytes in forward, bytes in backward, time) that no other state beats in all three.

A tensor that several layers read, such as a mask, is there once, however many of them keep it. So
such tensors are no part of what an action keeps: they count as long as a layer that keeps them
waits for its backward. States that keep other ones of them are not compared with each other, nor
are those in which other bytes are on their way to the host.

Several forwards may wait for their backwards at once, or a backward may retain its graph. In a part
of such a step layers wait that the search has not reached yet. Its peak is carried along, and grows
with what these layers keep.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_STATES = 4000  # of one bin
ENDLESS = 1 << 62
CALL = 1000  # the weight of a layer's largest call, or in a Moment of all its calls
# the keys of peaks that grow with what later layers have left, and of what the layers so far have
LEFT, ALL_LEFT = -1, -2
BINS = 128  # of peaks of parts in which later layers wait; states of one bin are compared
FORWARD, BACKWARD, OUTSIDE, AFTER = range(4)
# what is known of a peak, in one number: the bytes (to 512 TiB), one of the four above, and the
# number of the layer (to 4,095)
NUMBER_BITS, PLACE_BITS = 12, 14
Numbers = NDArray[np.int64]
PLACES = ("the forward of", "the backward of", *["what comes after"] * 2)


class Option(NamedTuple):
    """An action of a layer, compared with a full recompute, in the largest call of the layer, and
    in all its calls with a backward for `kept`, `held` and `late`.

    kept: how many bytes more stay after its forward.
    held: how many of these are still there when its backward begins. The rest is a cache of keys
        and values. It is freed when the forward of the model ends, or else after the backward of
        the first later layer that is rebuilt: the replay gets the cache as its forward did.
    forward, backward: how much higher the peak inside is, above the bytes at its begin.
    nanoseconds: how much longer all its calls in a step take.
    keeps: the numbers of the shared tensors that it keeps. Their bytes are not in `held`.
    moved: the bytes that it copies to the host. On the device they stay until the next layer that
        copies has ended its forward, and are there again when the backward of that one begins.
    left: how many are there to the end of all backwards, as the step holds an output of the model;
        if it accumulates gradients, even while the next forward runs (`Moment.finds_left`).
    late: how many more than `held` are there in its own backward: results of the layer that what
        follows it holds, too, up to then.
    """

    action: str
    kept: int = 0
    held: int = 0
    forward: int = 0
    backward: int = 0
    nanoseconds: int = 0
    keeps: frozenset[int] = frozenset()
    moved: int = 0
    left: int = 0
    late: int = 0

    @property
    def rebuilds(self) -> bool:
        """Whether a replay runs."""
        return not self.action.startswith("none")


class Shared(NamedTuple):
    """A tensor that the step makes, and that layers get as an argument.

    A layer that is rebuilt in full keeps its arguments, unless it saves nothing.

    made: the first layer that has it, as an argument or as a result.
    first, last: the first and the last layer that gets it and keeps it if rebuilt in full.
    """

    made: int
    first: int
    last: int
    num_bytes: int


class Moment(NamedTuple):
    """Parts of a step with every layer rebuilt in full, in which as much waits for its backward.

    name: FORWARD or BACKWARD of a layer, or after it OUTSIDE of layers; AFTER is outside too, once
        the forward of the model has ended.
    peak: the bytes.
    before: what part of its calls waits of each layer, up to this one, in thousandths. In a forward
        this layer is not among them.
    behind: what part of each later layer.
    finds_left: whether what all layers have left in an earlier backward is there.
    """

    name: int
    peak: int
    before: int = CALL
    behind: int = 0
    finds_left: bool = False


class Plan(NamedTuple):
    """An option for each layer, with the peak and the time of a step."""

    choice: tuple[Option, ...]
    peak: int
    nanoseconds: int


class _States(NamedTuple):
    """What choices for the first layers come to. Each column of the figures is one of them.

    figures: in rows, the bytes more than in full recompute, in forward and in backward, and the
        time more. Then the highest peaks of parts so far in which later layers wait, by
        `Moment.behind`, or have left something, by LEFT. After the last layer of all they count as
        peaks. By ALL_LEFT: what these layers leave.
    behinds: the keys of these peaks.
    keeps: the numbers of those shared tensors that some layer keeps and later layers have too.
    moving: the bytes that the last layer with copies has moved, if another one follows.
    is_last: whether no other one follows.
    """

    figures: Numbers
    behinds: tuple[int, ...] = ()
    keeps: frozenset[int] = frozenset()
    moving: int = 0
    is_last: bool = False


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The measured bytes of a step in which every layer is rebuilt in full.

    options: the options of each layer, in the order of the layers' forwards.
    begin: the peak where no layer has kept anything. end: the same once all backwards have ended.
    moments: the others, at each layer.
    update: the peak of the optimizer's update.
    nanoseconds: the time of the step.
    shared: the tensors that layers share, except those that every option keeps.
    are_held: whether results that layers keep are there at the end of all forwards anyway.
    """

    options: Sequence[Sequence[Option]]
    begin: int
    end: int
    moments: Sequence[Sequence[Moment]]
    update: int
    nanoseconds: int
    shared: Mapping[int, Shared]
    are_held: bool = False

    @cached_property
    def _first(self) -> _States:
        """The state before all layers."""
        leave = any(option.left for options in self.options for option in options)
        figures = [0, 0, 0, *[_at(self.end, AFTER, 0), _at(0, AFTER, 0)] * leave]
        return _States(np.array(figures)[:, None], (LEFT, ALL_LEFT) * leave)

    @cached_property
    def _there(self) -> list[list[tuple[int, Shared]]]:
        """The shared tensors that are there at each layer."""
        return [
            [(key, one) for key, one in self.shared.items() if one.made <= number <= one.last]
            for number in range(len(self.options))
        ]

    @cached_property
    def _rests(self) -> list[int]:
        """The fewest bytes that the layers from each number on hold.

        Of the tensors that layers share, the last one of them counts those that it keeps itself.
        """

        def held(number: int, option: Option) -> int:
            return option.held + sum(
                one.num_bytes * ((key in option.keeps) - (one.first <= number))
                for key, one in self._there[number]
                if one.last == number
            )

        least = [min(held(n, one) for one in options) for n, options in enumerate(self.options)]
        return [*accumulate(least[::-1], initial=0)][::-1]

    @cached_property
    def _without(self) -> int:
        """The bytes that are there at the backward of the last layer, whatever layers hold."""
        ends = [one for one in self.moments[-1] if one.name == BACKWARD and one.before == CALL]
        lowest = min(option.backward for option in self.options[-1])
        return max((one.peak + lowest for one in ends), default=-ENDLESS)

    def with_layer(
        self, states: _States, number: int, option: Option, *, is_last: bool
    ) -> tuple[_States, Numbers]:
        """Returns the states in which a layer follows with this option, and the highest peak of
        each in parts of the step at this layer, with its place (`_at`).

        is_last: whether it is the last one that copies to the host.
        """
        before, held, time, *waiting = states.figures
        kept = before + option.kept
        held = (np.maximum(held, before) if option.rebuilds else held) + option.held
        keeps, extra = states.keeps | option.keeps, 0
        for key, one in self._there[number]:
            more = one.num_bytes * ((key in keeps) - (one.first <= number))
            if number == one.last:
                kept, held, keeps = kept + more, held + more, keeps - {key}
            else:
                extra += more
        moving = states.moving if not option.moved else 0 if is_last else option.moved
        there = before, held + extra + option.late, kept, held + extra
        if self.are_held and number + 1 == len(self.options):  # no backward has begun
            there = *there[:AFTER], np.minimum(kept, held)
        inside = option.forward + states.moving, option.backward + states.moving, moving, moving
        peaks: dict[int, Any] = {}
        for behind, peak in zip(states.behinds, waiting, strict=True):
            more = option.left if behind < 0 else option.held * behind // CALL
            peaks[behind] = peak + _at(more, 0, 0)
        for name, least, share, behind, finds_left in self.moments[number]:
            own = option.held * behind // CALL * (name == FORWARD)
            peak = least + there[name] * share // CALL + inside[name] + own
            if LEFT in peaks and not behind and (finds_left or name in (BACKWARD, AFTER)):
                behind = LEFT
                peak = peak + (peaks[ALL_LEFT] >> PLACE_BITS) * finds_left
            peaks[behind] = np.maximum(_at(peak, name, number), peaks.get(behind, 0))
        highest = peaks.pop(0, np.zeros_like(time))
        if number + 1 == len(self.options):
            highest = np.max([highest, *peaks.values()], axis=0)
        figures = np.stack([kept, held, time + option.nanoseconds, *peaks.values()])
        after = _States(figures, tuple(peaks), keeps, moving, states.is_last or is_last)
        return after, highest

    def peaks(self, choice: Sequence[Option]) -> Iterator[tuple[int, str, int]]:
        """Yields the peaks of a step: the bytes, where they are, and the number of the layer."""
        yield self.update, "the optimizer's update", 0
        yield self.begin, "what is before the layers", 0
        state = self._first
        last = max((number for number, one in enumerate(choice) if one.moved), default=-1)
        for number, option in enumerate(choice):
            state, peak = self.with_layer(state, number, option, is_last=number == last)
            num_bytes, place = divmod(int(peak[0]), 1 << PLACE_BITS)
            yield num_bytes, PLACES[place >> NUMBER_BITS], place % (1 << NUMBER_BITS)

    def plan(self, choice: Sequence[Option]) -> Plan:
        """Returns a choice with its peak and its time."""
        longer = sum(option.nanoseconds for option in choice)
        peak = max(peak for peak, _, _ in self.peaks(choice))
        return Plan(tuple(choice), peak, self.nanoseconds + longer)


def fastest(problem: Problem, budget: int) -> Plan | None:
    """Returns the fastest plan whose peak is at most the budget, or None."""
    if max(problem.update, problem.begin) > budget:
        return None
    groups, trace = [problem._first], []
    for number, options in enumerate(problem.options):
        # of a state's figures, its number among those before this layer, and that of its option
        after: dict[Any, list[Numbers]] = {}
        room = budget - problem._without - problem._rests[number + 1]
        begin = 0
        for states in groups:
            end = begin + states.figures.shape[1]
            for place, option in enumerate(options):
                if option.moved and states.is_last:
                    continue
                for is_last in {False, option.moved > 0}:
                    one, peak = problem.with_layer(states, number, option, is_last=is_last)
                    fits = (peak >> PLACE_BITS <= budget) & (one.figures[1] <= room)
                    origin = np.arange(begin, end)
                    rows = np.stack([*one.figures, origin, np.full_like(origin, place)])[:, fits]
                    after.setdefault(one[1:], []).append(rows)
            begin = end
        found = {
            key: _unbeaten(np.concatenate(parts, axis=1), budget) for key, parts in after.items()
        }
        groups = [_States(rows[:-2], *key) for key, rows in found.items() if rows.size]
        if not groups:
            return None
        trace.append(np.concatenate([rows[-2:] for rows in found.values()], axis=1))
    choice, state = [], np.argmin(np.concatenate([one.figures[2] for one in groups]))
    for options, (origins, places) in zip(problem.options[::-1], trace[::-1], strict=True):
        choice.append(options[places[state]])
        state = origins[state]
    return problem.plan(choice[::-1])


def smallest(problem: Problem) -> Plan:
    """Returns the plan with the smallest peak, to within 0.1 %."""
    least = [min(options, key=lambda option: option.held) for options in problem.options]
    return _leanest(problem, problem.plan(least))


def neighbours(problem: Problem, plan: Plan) -> tuple[Plan | None, Plan | None]:
    """Returns the plan that is faster for the fewest bytes more, to within 0.1 % of these, and the
    fastest plan with a smaller peak."""
    quickest = [min(options, key=lambda option: option.nanoseconds) for options in problem.options]
    faster, smaller = problem.plan(quickest), fastest(problem, plan.peak - 1)
    if faster.nanoseconds >= plan.nanoseconds:
        return None, smaller
    return _leanest(problem, faster, plan.nanoseconds, near=plan.peak), smaller


def policy_text(actions: Sequence[str]) -> str:
    """Returns the policy that gives the layers of a list their actions."""
    if len(set(actions)) == 1:
        return f"*:{actions[0]}"
    layers, number = defaultdict[str, list[str]](list), count()
    for action, alike in groupby(actions):
        first, *others = [str(next(number)) for _ in alike]
        layers[action].append("-".join([first, *others[-1:]]))
    layers.pop("none", None)  # what no rule names keeps everything
    return "; ".join(f"{','.join(named)}:{action}" for action, named in layers.items())


def _leanest(problem: Problem, best: Plan, limit: int = ENDLESS, near: int = ENDLESS) -> Plan:
    """Returns the plan with the smallest peak of those that are faster than the limit, in ns.

    best: one of them. near: bytes from which a first search goes up in growing steps.
    """
    low, step = 0, max(1, best.peak // 1000)
    while best.peak - low > max(1, best.peak // 1000):
        budget = min(near, (low + best.peak) // 2)
        found = fastest(problem, budget)
        if found and found.nanoseconds < limit:
            best, near = found, ENDLESS
        else:
            low, near, step = budget, near + step, 2 * step
    return fastest(problem, best.peak) or best


def _at(peak: Any, name: int, number: int) -> Any:
    """Returns bytes and their place as one number, of which the greatest has the most bytes."""
    return (peak << PLACE_BITS) + (name << NUMBER_BITS) + number


def _unbeaten(rows: Numbers, budget: int) -> Numbers:
    """Returns the states that no other of their bin beats in kept and held bytes and in time.

    Of equal ones the first stays: in it, the layers that keep less come first.
    """
    bins = (rows[3:-2] >> PLACE_BITS) * BINS // max(budget, BINS)
    order = np.lexsort([*rows[[-1, -2, 2, 1, 0]], *bins])
    cuts = np.flatnonzero(np.diff(bins[:, order]).any(axis=0)) + 1
    found = [_few(each) for each in np.split(rows[:, order], cuts, axis=1)]
    return np.concatenate(found, axis=1)


def _few(states: Numbers) -> Numbers:
    """Returns those that none before them beats, or of too many with nearly the same kept bytes the
    fastest."""
    front = []
    rising: list[int] = []  # held bytes; with them the time of the fastest state so far falls
    falling: list[int] = []
    for number, (held, time) in enumerate(zip(*states[1:3].tolist(), strict=True)):
        place = bisect_right(rising, held)
        if place and falling[place - 1] <= time:
            continue
        front.append(number)
        start = end = bisect_left(rising, held)
        while end < len(falling) and falling[end] >= time:
            end += 1
        rising[start:end], falling[start:end] = [held], [time]
    states = states[:, front]
    if len(front) <= MOST_STATES:
        return states
    kept, _, time = states[:3]
    steps = kept // ((kept[-1] - kept[0]) // MOST_STATES + 1)
    order = np.lexsort((time, steps))
    firsts = order[np.unique(steps[order], return_index=True)[1]]
    return states[:, np.unique([0, *firsts])]  # the first of all is the smallest
