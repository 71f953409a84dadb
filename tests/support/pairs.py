"""Thins a grid of cases so that every pair of settings stays. Other cases are marked `weekly`.

    @pytest.mark.parametrize("tp_size, dtype, policy", pairs([1, 2, 4], DTYPES, POLICIES))

Most faults depend on one setting or on two together, so a default run tries every pair (all-pairs
testing). The weekly run tries the whole grid. The kept cases are the same in every run: the
thinning repeatedly takes the first of the cases that add the most pairs, until no pair is missing.

    for tp_size, policy in covered(itertools.product([1, 2], POLICIES)): ...

thins a grid in the weekly run too, which sets FULL_GRIDS=1.
"""

import functools
import heapq
import inspect
import itertools
import os

import pytest

FULL_GRIDS = os.environ.get("FULL_GRIDS", "") not in ("", "0")


def subsets(items):
    """Returns each item, each pair and all; in the weekly run every set of some of them."""
    sizes = range(1, len(items) + 1) if FULL_GRIDS else (1, 2, len(items))
    return itertools.chain.from_iterable(itertools.combinations(items, size) for size in sizes)


def pairs(*axes):
    """Returns the parameters of the whole grid. The cases that covering() leaves out are marked
    `weekly`."""
    cases = list(itertools.product(*axes))
    kept = covering(cases)
    return [
        pytest.param(*case, marks=() if number in kept else pytest.mark.weekly)
        for number, case in enumerate(cases)
    ]


def covered(cases):
    """Returns the cases that covering() keeps, in their order, in the weekly run too.

    It is for the biggest grids, whose cases differ in three settings and more.
    """
    cases = list(cases)
    return [cases[number] for number in sorted(covering(cases))]


def sampled(cases, *, every, at_most=1):
    """Returns each `every`-th case, or each `at_most`-th with FULL_GRIDS, which is usually all.

    It is for a long list of similar neighbours that one test walks through. `every` should have no
    factor in common with the lengths of the axes, so that each setting appears.
    """
    return list(cases)[:: at_most if FULL_GRIDS else every]


def in_one_test(names, cases):
    """Makes one test that walks through all cases, where parametrize would make a test of each.

    It is for hundreds of cases of a millisecond: a test of its own costs pytest three. The error of
    the first case that fails has the case before it.
    names: the arguments that a case gives, as for parametrize.
    """
    arguments = [name.strip() for name in names.split(",")]
    every = [case if len(arguments) > 1 else (case,) for case in cases]

    def decorate(test):
        def walk(**fixtures):
            for case in every:
                try:
                    test(**fixtures, **dict(zip(arguments, case, strict=True)))
                except (Exception, pytest.fail.Exception) as fault:
                    raise AssertionError(f"case {case}: {fault}") from fault

        signature = inspect.signature(test)
        kept = [value for name, value in signature.parameters.items() if name not in arguments]
        functools.update_wrapper(walk, test)
        walk.__signature__ = signature.replace(parameters=kept)
        return walk

    return decorate


def covering(cases):
    """Returns the numbers of the cases to keep: each pair of values that occurs in some case occurs
    in one of them.

    Values are the same if their types and texts are, so they need not be hashable. Cases of one
    value each are all kept.
    """
    numbered = [
        tuple((axis, type(value), repr(value)) for axis, value in enumerate(case)) for case in cases
    ]
    if any(len(case) == 1 for case in cases):
        return frozenset(range(len(cases)))
    missing = {pair for case in numbered for pair in itertools.combinations(case, 2)}
    # The number of pairs that a case adds only shrinks as others are taken, so an old number is an
    # upper bound. The first case whose number is still right is therefore the best one.
    heap = [(-len(case) * (len(case) - 1) // 2, number) for number, case in enumerate(numbered)]
    kept = set()
    while missing:
        bound, number = heapq.heappop(heap)
        adds = missing.intersection(itertools.combinations(numbered[number], 2))
        if len(adds) == -bound:
            kept.add(number)
            missing -= adds
        elif adds:
            heapq.heappush(heap, (-len(adds), number))
    return frozenset(kept)
