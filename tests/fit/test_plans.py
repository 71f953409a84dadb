"""The search of plans against brute force, and the text of a policy against its parser."""

import itertools
import random

import pytest

from megatron_lite.config.policy import parse_policy
from megatron_lite.fit.plans import (
    AFTER,
    BACKWARD,
    CALL,
    FORWARD,
    OUTSIDE,
    Moment,
    Option,
    Problem,
    Shared,
    fastest,
    neighbours,
    policy_text,
    smallest,
)

LEAST = {FORWARD: 20, BACKWARD: 30, OUTSIDE: 20, AFTER: 20}


def drawn(seed):
    """Returns a problem of 5 layers with three actions each. Several share two tensors: the first
    layer that has the second one makes it. In half of the problems several calls of a layer wait
    at once."""
    draw = random.Random(seed)
    shared = {}
    for key, made in enumerate((False, True)):
        first = draw.randint(made, 3)
        shared[key] = Shared(first - made, first, draw.randint(first, 4), draw.randint(1, 12))

    def option(action, number):
        has = [key for key, one in shared.items() if one.made <= number <= one.last]
        given = {key for key in has if shared[key].first <= number}
        keeps = given if action == "full" else {key for key in has if draw.random() < 0.5}
        if action == "full":
            return Option("full", keeps=frozenset(keeps))
        moved = draw.randint(0, 6) * (action == "none@host")
        kept = draw.randint(-2, 9)
        return Option(
            action, kept, kept - draw.randint(0, 5), draw.randint(-2, 5), draw.randint(-9, 5),
            -draw.randint(0, 9), frozenset(keeps), moved,
            *(draw.randint(0, 4) * (seed % each == 0) for each in (3, 4)),
        )  # fmt: skip

    def moment(name):
        calls = draw.choice([(1, 0), (1, 1), (2, 1), (3, 2)]) if seed % 2 else (1, 0)
        least, finds_left = LEAST[name], name in (FORWARD, OUTSIDE) and draw.random() < 0.3
        peak = draw.randint(least, least + 20)
        return Moment(name, peak, *(CALL * one for one in calls), finds_left)

    numbers = range(5)
    return Problem(
        options=[[option(a, n) for a in ("none", "none@host", "full")] for n in numbers],
        begin=draw.randint(20, 45),
        end=draw.randint(0, 45),
        moments=[[moment(name) for name in LEAST for _ in range(1 + seed % 2)] for _ in numbers],
        update=draw.randint(20, 45),
        nanoseconds=100,
        shared=shared,
    )


def peak_of(problem, choice):
    """Returns the peak of a step by what is there at each moment."""
    numbers = range(len(choice))

    def extra(name, number):
        """Returns the bytes more of what the layers keep up to a moment at a layer."""
        moment = "forward" if name in (FORWARD, OUTSIDE) else "backward"
        waiting = number + (name != FORWARD)
        done = waiting if moment == "forward" else 5
        first = choice[:waiting]
        total = choice[number].late * (name == BACKWARD)
        for number, option in enumerate(first):
            is_cached = moment == "forward" or any(one.rebuilds for one in first[number + 1 :])
            total += option.kept if is_cached else option.held
        for key, one in problem.shared.items():
            is_there = any(key in option.keeps for option in first)
            is_there_in_full = one.first < waiting
            if moment == "forward":  # the caller holds a tensor until its last layer has returned
                is_there, is_there_in_full = is_there or one.last >= done, True
            total += one.num_bytes * (is_there - is_there_in_full)
        return total

    copying = [n for n in numbers if choice[n].moved]

    def moving(number, *, between=False):
        """Returns the bytes on their way at a layer, or between it and the next one."""
        before = [n for n in copying if n < number + between]
        return choice[before[-1]].moved if before and before[-1] != copying[-1] else 0

    later = (BACKWARD, AFTER)
    inside = {FORWARD: lambda one: one.forward, BACKWARD: lambda one: one.backward}
    return max(
        problem.update,
        problem.begin,
        (problem.end + sum(each.left for each in choice))
        * any(each.left for each in itertools.chain(*problem.options)),
        *(
            one.peak
            + extra(one.name, n) * one.before // CALL
            + sum(each.held for each in choice[n + (one.name != FORWARD) :]) * one.behind // CALL
            + sum(each.left for each in choice[n + 1 :]) * (one.name in later and not one.behind)
            + sum(each.left for each in choice) * (one.finds_left and not one.behind)
            + inside.get(one.name, lambda _: 0)(choice[n])
            + moving(n, between=one.name in (OUTSIDE, AFTER))
            for n in numbers
            for one in problem.moments[n]
        ),
    )


@pytest.mark.runs(daily=8, ci=8)
@pytest.mark.parametrize("seed", range(40))
def test_the_plan_is_the_fastest_of_all_that_fit(seed):
    problem = drawn(seed)
    every = [problem.plan(choice) for choice in itertools.product(*problem.options)]
    assert [plan.peak for plan in every] == [peak_of(problem, plan.choice) for plan in every]
    for budget in range(35, 110, 5):
        fit = [plan for plan in every if plan.peak <= budget]
        found = fastest(problem, budget)
        assert (found is None) == (not fit)
        if found is not None:
            assert found.peak <= budget
            assert found.nanoseconds == min(plan.nanoseconds for plan in fit)
            faster, smaller = neighbours(problem, found)
            better = [one.peak for one in every if one.nanoseconds < found.nanoseconds]
            assert (faster.peak if faster else None) == min(better, default=None)
            below = [one.nanoseconds for one in every if one.peak < found.peak]
            assert (smaller.nanoseconds if smaller else None) == min(below, default=None)
    assert smallest(problem).peak == min(plan.peak for plan in every)


@pytest.mark.parametrize(
    "num_layers, waiting, budget", [(48, (CALL, 0), 35_000), (16, (2 * CALL, CALL), 25_000)]
)
def test_a_problem_of_many_layers_is_solved_within_its_budget(num_layers, waiting, budget):
    actions = [
        Option("none", 1100, 1000, 0, -900, -97),
        Option("ops(matmul)", 610, 610, 0, -400, -61),
        Option("ops(attention)", 333, 333, 0, -200, -31),
        Option("full"),
    ]
    problem = Problem(
        options=[actions] * num_layers,
        begin=10_000,
        end=0,
        moments=[
            [Moment(name, 10_000 + 10 * n + 1000 * (name == BACKWARD), *waiting) for name in LEAST]
            for n in range(num_layers)
        ],
        update=0,
        nanoseconds=10**6,
        shared={},
    )
    assert 0.975 * budget < fastest(problem, budget).peak <= budget


@pytest.mark.parametrize(
    "actions",
    [
        ["full"] * 3,
        ["none"] * 3,
        ["full", "full", "none", "ops(matmul,attention)", "full", "none@host"],
        ["none", "full", "none", "full"],
    ],
)
def test_a_policy_gives_each_layer_its_action(actions):
    policy = parse_policy(policy_text(actions))
    rules = [policy.rule_of(layer) for layer in range(len(actions))]
    stores = ["" if rule.store == "device" else f"@{rule.store}" for rule in rules]
    given = [f"{rule.action}{store}" for rule, store in zip(rules, stores, strict=True)]
    assert given == actions
