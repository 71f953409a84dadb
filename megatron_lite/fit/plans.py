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

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, permutations, product
from typing import Any, NamedTuple

FEW_STATES, MOST_STATES = 50, 400  # of one bin, in a first search and in the second
ENDLESS = 1 << 62
CALL = 1000  # the weight of a layer's largest call, to which other calls are compared
# the keys of peaks that grow with what later layers have left, and of what the layers so far have
LEFT, ALL_LEFT = -1, -2
BINS = 128  # of peaks of parts in which later layers wait; states of one bin are compared
FORWARD, BACKWARD, OUTSIDE, AFTER = range(4)
PLACES = ("the forward of", "the backward of", *["what comes after"] * 2)


class Option(NamedTuple):
    """An action of a layer, compared with a full recompute, in the largest call of the layer.

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

    @property
    def rebuilds(self) -> bool:
        """Whether a replay runs."""
        return not self.action.startswith("none")


class Shared(NamedTuple):
    """A tensor that the step makes, and that layers get as an argument.

    A layer that is rebuilt in full keeps its arguments.

    made: the first layer that has it, as an argument or as a result.
    first, last: the first and the last layer that has it as an argument.
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
    before: how many calls of each layer wait, up to this one, in thousandths of a largest call. In
        a forward this layer is not among them.
    behind: how many of each later layer.
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


class _State(NamedTuple):
    """What the options of the first layers come to.

    kept, held: the bytes more than in full recompute, in forward and in backward.
    nanoseconds: the time more.
    extra: the bytes more in backward, of shared tensors that later layers have too.
    keeps: the numbers of those that some layer keeps.
    moving: the bytes that the last layer with copies has moved, if another one follows.
    is_last: whether no other one follows.
    peak: the most bytes in parts of the step at the last of these layers, the name of the part, and
        the layer's number.
    waiting: the same for parts so far in which later layers wait, by `Moment.behind`, or have left
        something, by LEFT. After the last layer of all they count for `peak`. By ALL_LEFT: what
        these layers leave.
    before: the state without this layer, which has the option.
    """

    kept: int = 0
    held: int = 0
    nanoseconds: int = 0
    extra: int = 0
    keeps: frozenset[int] = frozenset()
    moving: int = 0
    is_last: bool = False
    peak: tuple[int, int, int] = (0, 0, 0)
    waiting: tuple[tuple[int, tuple[int, int, int]], ...] = ()
    before: _State | None = None
    option: Option = Option("")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The measured bytes of a step in which every layer is rebuilt in full.

    options: the options of each layer, in the order of the layers' forwards.
    begin: the peak where no layer has kept anything. end: the same once all backwards have ended.
    moments: the others, at each layer.
    update: the peak of the optimizer's update.
    nanoseconds: the time of the step.
    shared: the tensors that layers share, except those that every option keeps.
    """

    options: Sequence[Sequence[Option]]
    begin: int
    end: int
    moments: Sequence[Sequence[Moment]]
    update: int
    nanoseconds: int
    shared: Mapping[int, Shared]

    @cached_property
    def _first(self) -> _State:
        """The state before all layers."""
        leave = any(option.left for options in self.options for option in options)
        return _State(waiting=((LEFT, (self.end, AFTER, 0)), (ALL_LEFT, (0, AFTER, 0))) * leave)

    @cached_property
    def _there(self) -> list[list[tuple[int, Shared]]]:
        """The shared tensors that are there at each layer."""
        return [
            [(key, one) for key, one in self.shared.items() if one.made <= number <= one.last]
            for number in range(len(self.options))
        ]

    @cached_property
    def _needs(self) -> list[set[tuple[int, int]]]:
        """The time of each layer's options, and the fewest bytes that they hold.

        Of the tensors that layers share, the last one of them counts those that it keeps itself.
        """

        def held(number: int, option: Option) -> int:
            return option.held + sum(
                one.num_bytes * ((key in option.keeps) - (one.first <= number))
                for key, one in self._there[number]
                if one.last == number
            )

        return [
            {(option.nanoseconds, held(number, option)) for option in options}
            for number, options in enumerate(self.options)
        ]

    def with_layer(
        self, state: _State, number: int, option: Option, *, is_last: bool = False
    ) -> _State:
        """Returns the state in which a layer follows with this option.

        is_last: whether it is the last one that copies to the host.
        """
        kept = state.kept + option.kept
        held = max(state.held, state.kept) if option.rebuilds else state.held
        held += option.held
        keeps, extra = state.keeps | option.keeps, 0
        for key, one in self._there[number]:
            more = one.num_bytes * ((key in keeps) - (one.first <= number))
            if number == one.last:
                kept, held, keeps = kept + more, held + more, keeps - {key}
            else:
                extra += more
        moving = state.moving if not option.moved else 0 if is_last else option.moved
        there = state.kept, held + extra, kept, held + extra
        inside = option.forward + state.moving, option.backward + state.moving, moving, moving
        peaks = {}
        for behind, (peak, name, place) in state.waiting:
            more = option.left if behind < 0 else option.held * behind // CALL
            peaks[behind] = peak + more, name, place
        for name, peak, before, behind, finds_left in self.moments[number]:
            own = option.held * behind // CALL * (name == FORWARD)
            peak += there[name] * before // CALL + inside[name] + own
            if LEFT in peaks and not behind and (finds_left or name in (BACKWARD, AFTER)):
                behind = LEFT
                peak += peaks[ALL_LEFT][0] * finds_left
            peaks[behind] = max((peak, name, number), peaks.get(behind, (0, 0, 0)))
        highest = peaks.pop(0, (0, 0, number))
        if number + 1 == len(self.options):
            highest = max([highest, *peaks.values()])
        return _State(
            kept,
            held,
            state.nanoseconds + option.nanoseconds,
            extra,
            keeps,
            moving,
            state.is_last or is_last,
            highest,
            tuple(peaks.items()),
            state,
            option,
        )

    def peaks(self, choice: Sequence[Option]) -> Iterator[tuple[int, str, int]]:
        """Yields the peaks of a step: the bytes, where they are, and the number of the layer."""
        yield self.update, "the optimizer's update", 0
        yield self.begin, "what is before the layers", 0
        state = self._first
        last = max((number for number, one in enumerate(choice) if one.moved), default=-1)
        for number, option in enumerate(choice):
            state = self.with_layer(state, number, option, is_last=number == last)
            yield state.peak[0], PLACES[state.peak[1]], state.peak[2]

    def plan(self, choice: Sequence[Option]) -> Plan:
        """Returns a choice with its peak and its time."""
        longer = sum(option.nanoseconds for option in choice)
        peak = max(peak for peak, _, _ in self.peaks(choice))
        return Plan(tuple(choice), peak, self.nanoseconds + longer)


class _Bound:
    """What no choice of the layers that follow can be better than.

    At the backward of the last layer all is there that the layers hold. With a price for each of
    its bytes the layers are independent, so the least sum of time and price is known for those from
    each number on. A state from which this sum is above that of a known plan leads to no faster
    plan (Lagrange's relaxation; the price is the one with the highest bound).

    limit: the time of the known plan more than that of full recompute, in ns.
    """

    def __init__(self, problem: Problem, budget: int, limit: int) -> None:
        ends = [one for one in problem.moments[-1] if one.name == BACKWARD and one.before == CALL]
        lowest = min(option.backward for option in problem.options[-1])
        self._room = budget - max(one.peak for one in ends) - lowest if ends else ENDLESS
        self._limit = limit
        needs = problem._needs
        prices = {
            (slow - fast) / (more - less)
            for each in {*map(frozenset, needs)}
            for (slow, less), (fast, more) in permutations(each, 2)
            if less < more and fast < slow
        }

        def least(price: float, time: int = 1) -> list[float]:
            """Returns the least sums of the layers from each number on."""
            sums = (min(time * ns + price * held for ns, held in each) for each in needs[::-1])
            return [*accumulate(sums, initial=0.0)][::-1]

        rests = {price: least(price) for price in {0.0, *prices}}
        self._price = max(rests, key=lambda price: rests[price][0] - price * self._room)
        self._rest, self._held = rests[self._price], least(1.0, time=0)

    def allows(self, state: _State, number: int) -> bool:
        """Tells whether a faster plan may follow from this state, after layer `number`."""
        left = self._room - state.held
        time = state.nanoseconds + self._rest[number + 1] - self._price * left
        return self._held[number + 1] <= left and time <= self._limit + 1


def fastest(problem: Problem, budget: int) -> Plan | None:
    """Returns the fastest plan whose peak is at most the budget, or None."""
    rough = _searched(problem, budget, FEW_STATES)
    return _searched(problem, budget, limit=rough.nanoseconds if rough else ENDLESS)


def _searched(
    problem: Problem, budget: int, most: int = MOST_STATES, limit: int = ENDLESS
) -> Plan | None:
    """Returns the fastest plan within the budget that takes at most the limit, in ns, or None.

    most: how many states of a bin are kept.
    """
    if max(problem.update, problem.begin) > budget:
        return None
    states, bound = [problem._first], _Bound(problem, budget, limit - problem.nanoseconds)
    for number, options in enumerate(problem.options):
        after: dict[Any, list[_State]] = {}
        for state, option in product(states, options):
            if option.moved and state.is_last:
                continue
            for is_last in {False, option.moved > 0}:
                one = problem.with_layer(state, number, option, is_last=is_last)
                if one.peak[0] <= budget and bound.allows(one, number):
                    bins = (each[0] * BINS // max(budget, BINS) for _, each in one.waiting)
                    group = one.keeps, one.moving, one.is_last, *bins
                    after.setdefault(group, []).append(one)
        states = [one for group in after.values() for one in _unbeaten(group, most)]
    if not states:
        return None
    choice, state = [], min(states, key=lambda one: one.nanoseconds)
    while state.before:
        choice.append(state.option)
        state = state.before
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
    starts = [n for n, action in enumerate(actions) if not n or action != actions[n - 1]]
    layers: dict[str, list[str]] = {}
    for start, end in zip(starts, [*starts[1:], len(actions)], strict=True):
        named = f"{start}-{end - 1}" if end - start > 1 else f"{start}"
        layers.setdefault(actions[start], []).append(named)
    layers.pop("none", None)  # what no rule names keeps everything
    return "; ".join(f"{','.join(named)}:{action}" for action, named in layers.items())


def _leanest(problem: Problem, best: Plan, limit: int = ENDLESS, near: int = ENDLESS) -> Plan:
    """Returns the plan with the smallest peak of those that are faster than the limit, in ns.

    best: one of them. near: bytes from which a first search goes up in growing steps.
    """
    low, step = 0, max(1, best.peak // 1000)
    while best.peak - low > max(1, best.peak // 1000):
        budget = min(near, (low + best.peak) // 2)
        found = _searched(problem, budget, FEW_STATES)
        if not found or found.nanoseconds >= limit:
            found = _searched(problem, budget, limit=limit - 1)
        if found and found.nanoseconds < limit:
            best, near = found, ENDLESS
        else:
            low, near, step = budget, near + step, 2 * step
    return fastest(problem, best.peak) or best


def _unbeaten(states: list[_State], most: int) -> list[_State]:
    """Returns the states that no other beats in kept and held bytes and in time.

    most: of more, those with nearly the same bytes are joined.
    Of equal ones the first stays: in it, the layers that keep less come first.
    """
    states.sort(key=lambda state: state[:3])
    unbeaten = []
    held: list[int] = []  # rising; with it the time of the fastest state so far falls
    times: list[int] = []
    for state in states:
        place = bisect_right(held, state.held)
        if place and times[place - 1] <= state.nanoseconds:
            continue
        unbeaten.append(state)
        start = end = bisect_left(held, state.held)
        while end < len(times) and times[end] >= state.nanoseconds:
            end += 1
        held[start:end], times[start:end] = [state.held], [state.nanoseconds]
    if len(unbeaten) <= most:
        return unbeaten
    step = (unbeaten[-1].kept - unbeaten[0].kept) // most + 1
    joined: dict[int, _State] = {}
    for state in unbeaten[1:]:
        best = joined.setdefault(state.kept // step, state)
        if state.nanoseconds < best.nanoseconds:
            joined[state.kept // step] = state
    return [unbeaten[0], *joined.values()]  # the first of all is the smallest
