"""The verdict on a run: does it fit, with which plan, and what would change it.

Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.plan.auto_policy import Budget
from megatron_lite.plan.layouts import Problem, layouts, refusal
from megatron_lite.plan.neighbours import Neighbour, largest_micro_batch, neighbours
from megatron_lite.plan.search import Plan, Search, SearchResult

FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"
EXIT_STATUS = {FITS: 0, TIGHT: 1, DOES_NOT_FIT: 2}
MOST_RANKS = 16384
MOST_TRIED = 6  # numbers of ranks, in the search for the fewest that are enough
LEAST_STATES = 16  # bytes of a parameter under FSDP2: weight, gradient and two moments in float32


class FitVerdict(NamedTuple):
    """The answer for one number of ranks.

    word: FITS; TIGHT, if the best plan takes a part of the reserve; or DOES_NOT_FIT.
    found: the plans. largest_micro_batch, neighbours: what is one step away from the first.
    """

    word: str
    num_ranks: int
    budget: Budget
    found: SearchResult
    largest_micro_batch: Plan | None = None
    neighbours: tuple[Neighbour, ...] = ()

    @property
    def plan(self) -> Plan | None:
        """The fastest plan that fits, or the plan with the smallest peak."""
        return self.found.plans[0] if self.found.plans else self.found.smallest


def verdict(problem: Problem, num_ranks: int, budget: Budget) -> FitVerdict:
    """Returns the verdict for so many ranks.

    Raises InputError if training would refuse every layout.
    """
    search = Search(problem)
    if next(layouts(problem, num_ranks), None) is None:
        raise InputError(f"{num_ranks} GPUs: {refusal(problem, num_ranks)}")
    for word, num_bytes in ((FITS, budget.plan_bytes), (TIGHT, budget.memory_bytes)):
        found = search.find(num_ranks, num_bytes)
        if found.plans:
            best = found.plans[0]
            return FitVerdict(
                word,
                num_ranks,
                budget,
                found,
                largest_micro_batch(search, best, num_bytes),
                tuple(neighbours(search, best, num_bytes)),
            )
        # The next round has a chance only if the smallest peak is within its budget.
        if found.smallest is None or found.smallest.peak.num_bytes > budget.memory_bytes:
            break
    return FitVerdict(DOES_NOT_FIT, num_ranks, budget, found)


def smallest_machine(problem: Problem, budget: Budget, num_parameters: int) -> FitVerdict:
    """Returns the verdict for the fewest ranks on which the run fits: 1, 2, 4, ... of them.

    Raises InputError if not even MOST_RANKS are enough.
    """
    last = None
    for count in _possible(problem, budget, num_parameters, 1):
        last = verdict(problem, count, budget)
        if last.word != DOES_NOT_FIT:
            return last
    if last is not None:
        return last
    raise InputError(
        f"no number of GPUs up to {MOST_RANKS} can train this run: its layouts are refused, or its "
        "states alone are larger; give --gpus N for the reason"
    )


def fewest_ranks(
    problem: Problem, budget: Budget, num_parameters: int, *, above: int
) -> int | None:
    """Returns the fewest of 2, 4, 8, ... ranks, and more than `above`, on which a plan fits.

    Returns None if none of the MOST_TRIED smallest possible numbers is enough: then more ranks do
    not help, because the memory goes to tensors that are not shared out over ranks.
    """
    search = Search(problem)
    counts = _possible(problem, budget, num_parameters, 1 << above.bit_length())
    fitting = (
        count
        for count in itertools.islice(counts, MOST_TRIED)
        if search.find(count, budget.plan_bytes, most=1).plans
    )
    return next(fitting, None)


def _possible(problem: Problem, budget: Budget, num_parameters: int, count: int) -> Iterator[int]:
    """Yields `count`, twice as many ranks and so on, if a layout exists and its states may fit.

    No layout takes less than all states shared out over all ranks.
    """
    while count <= MOST_RANKS:
        states = LEAST_STATES * num_parameters / count
        if states <= budget.memory_bytes and next(layouts(problem, count), None) is not None:
            yield count
        count *= 2


def status(verdicts: Sequence[FitVerdict]) -> int:
    """Returns the exit status: that of the best of the verdicts."""
    return min(EXIT_STATUS[one.word] for one in verdicts)
