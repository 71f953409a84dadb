"""The search of plans against brute force, and the text of a policy against its parser."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_lite.config.policy import parse_policy
from megatron_lite.fit.plans import Option, Problem, fastest, neighbours, policy_text, smallest


def drawn(seed: int) -> Problem:
    """Returns a problem of 5 layers of two kinds, with up to three actions each."""
    draw = random.Random(seed)
    kinds = [
        [
            *(
                Option(
                    action, draw.randint(-2, 9), draw.randint(-4, 7), draw.randint(-2, 5),
                    draw.randint(-9, 5), -draw.randint(0, 9),
                )
                for action in ("none", "ops(matmul)")
            ),
            Option("full"),
        ]
        for _ in range(2)
    ]  # fmt: skip
    numbers = range(5)
    return Problem(
        options=[kinds[draw.randint(0, 1)] for _ in numbers],
        counts=[draw.randint(1, 2) for _ in numbers],
        forward=[draw.randint(20, 40) for _ in numbers],
        backward=[draw.randint(30, 50) for _ in numbers],
        outside=[draw.randint(20, 45) for _ in range(6)],
        after=[draw.randint(20, 48) for _ in range(6)],
        update=draw.randint(20, 45),
        nanoseconds=100,
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_plan_is_the_fastest_of_all_that_fit(seed: int) -> None:
    problem = drawn(seed)
    every = [problem.plan(choice) for choice in itertools.product(*problem.options)]
    for budget in range(35, 110, 3):
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


def test_a_problem_of_many_layers_is_solved_within_its_budget() -> None:
    actions = [
        Option("none", 1100, 1000, 0, -900, -97),
        Option("ops(matmul)", 610, 610, 0, -400, -61),
        Option("ops(attention)", 333, 333, 0, -200, -31),
        Option("full"),
    ]
    numbers = range(96)
    problem = Problem(
        options=[actions] * 96,
        counts=[1] * 96,
        forward=[10_000 + 10 * n for n in numbers],
        backward=[11_000 + 10 * n for n in numbers],
        outside=[10_000 + 10 * n for n in range(97)],
        after=[10_000 + 10 * n for n in range(97)],
        update=0,
        nanoseconds=10**6,
    )
    found = fastest(problem, 60_000)
    assert found is not None and 58_500 < found.peak <= 60_000


@pytest.mark.parametrize(
    "actions",
    [
        ["full"] * 3,
        ["none"] * 3,
        ["full", "full", "none", "ops(matmul,attention)", "full", "none@host"],
        ["none", "full", "none", "full"],
    ],
)
def test_a_policy_gives_each_layer_its_action(actions: list[str]) -> None:
    policy = parse_policy(policy_text(actions))
    rules = [policy.rule_of(layer) for layer in range(len(actions))]
    stores = ["" if rule is None or rule.store == "device" else f"@{rule.store}" for rule in rules]
    given = [
        ("none" if rule is None else str(rule.action)) + store
        for rule, store in zip(rules, stores, strict=True)
    ]
    assert given == actions
