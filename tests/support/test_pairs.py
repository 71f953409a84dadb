"""Tests that a thinned grid keeps every pair of settings, is much smaller and always the same."""

from __future__ import annotations

import itertools

import pytest

from tests.support.pairs import covering, pairs, thinned


def pairs_of(cases) -> set[tuple[object, ...]]:
    return {
        ((i, case[i]), (j, case[j]))
        for case in cases
        for i, j in itertools.combinations(range(len(case)), 2)
    }


@pytest.mark.parametrize(
    "sizes", [(1, 1), (3, 2), (2, 2, 2), (4, 3, 2), (5, 4, 3, 2), (2,) * 7, (6, 6, 6)], ids=str
)
def test_every_pair_of_settings_stays(sizes: tuple[int, ...]) -> None:
    grid = list(itertools.product(*map(range, sizes)))
    kept = [grid[number] for number in covering(grid)]
    assert pairs_of(kept) == pairs_of(grid)
    largest, second = sorted(sizes)[-1:-3:-1]
    # No design is smaller than the product of the two longest axes.
    assert largest * second <= len(kept) <= 2 * largest * second


def test_cases_that_are_left_out_are_marked_and_all_keep_their_order_and_names() -> None:
    parameters = pairs([1, 2, 3], "ab", [False, True], ids=lambda *case: "-".join(map(str, case)))
    assert [parameter.values for parameter in parameters] == list(
        itertools.product([1, 2, 3], "ab", [False, True])
    )
    assert parameters[1].id == "1-a-True"
    kept = {parameter.values for parameter in parameters if not parameter.marks}
    assert kept == {
        parameter.values
        for parameter in thinned(itertools.product([1, 2, 3], "ab", [False, True]))
        if not parameter.marks
    }
    assert 6 <= len(kept) < 12 and all(
        mark.name == "weekly" for parameter in parameters for mark in parameter.marks
    )
