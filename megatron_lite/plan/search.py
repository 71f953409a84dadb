"""The fastest plans of a run that fit into memory: a best-first search over layouts.

A layout passes through four stations, each with a lower bound of its step time that is at least as
high as the one before. The layout with the lowest bound goes on, so the first to arrive is the
fastest of all.

    1  no recomputation, and the shortest way through the pipeline
    2  the fastest policy if only states and activations took memory
    3  the fastest policy by the full prediction of the peak
    4  the simulation of its pipeline: a plan

Standard library only.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.step_peak import StepPeak
from megatron_lite.plan.auto_policy import (
    Unreachable,
    fitted,
    least_bytes,
    quickly_fitted,
    whole_bytes,
)
from megatron_lite.plan.layouts import Problem, kind_of, layouts
from megatron_lite.plan.operation_time import Memo
from megatron_lite.plan.planned_run import Chosen, Run, with_policy
from megatron_lite.plan.step_time import StepTime, step_time

SMALLEST_TRIED = 4
STEP = 0.98  # from one budget to the next one, in the search for the smallest peak
NEAREST = 64  # faster layouts of which the smallest is looked for
SLOWEST = 1.1  # times the step time of the best plan: a slower one is not worth a row
BETTER = 0.999  # of the step time: a plan that is not clearly faster is no better plan
HANDICAP = 0.0005  # of the step time, for each further kind of parallelism: of two plans that are
# equally fast the simpler one wins


class Plan(NamedTuple):
    """A run with its layout and its policy, the peak of its fullest rank and the time of a step."""

    config: RunConfig
    num_ranks: int
    peak: StepPeak
    time: StepTime


class SearchResult(NamedTuple):
    """The result of a search.

    plans: those that fit, the fastest first. Their layouts differ in more than the micro-batch.
    num_layouts: how many layouts there were.
    smallest: the plan with the smallest peak that was found, if none fits.
    larger: the plan that is faster than the first, does not fit, and lacks the fewest bytes.
    """

    plans: tuple[Plan, ...]
    num_layouts: int
    smallest: Plan | None = None
    larger: Plan | None = None


class _Candidate(NamedTuple):
    """A layout on its way.

    station: the last one that it has passed, as in the module's docstring.
    config: the layout. chosen: with its policy, from station 3 on. plan: from station 4 on.
    """

    station: int
    config: RunConfig
    chosen: Chosen | None = None
    plan: Plan | None = None


class Search:
    """The search for one model on one machine."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.memo = problem, Memo()
        self.fixed_policy = problem.recompute is not None

    def run(self, config: RunConfig, num_ranks: int) -> Run:
        """Returns the run for auto_policy."""
        problem = self.problem
        return Run(config, problem.hardware, num_ranks, self.memo, problem.host_bytes)

    def find(self, num_ranks: int, budget_bytes: int, *, most: int = 6) -> SearchResult:
        """Returns the fastest plans of so many ranks. most: how many plans to return."""
        start = [
            (self.bound(config, num_ranks), config) for config in layouts(self.problem, num_ranks)
        ]
        plans, too_large = self._ranked(start, num_ranks, budget_bytes, most)
        if plans:
            limit = BETTER * plans[0].time.seconds
            faster = [config for seconds, config in sorted(start, key=_first) if seconds < limit]
            larger = self._larger(faster, num_ranks, budget_bytes, limit)
            return SearchResult(tuple(plans), len(start), larger=larger)
        smallest = self._smallest(too_large, num_ranks)
        return SearchResult((), len(start), smallest=smallest)

    def bound(self, config: RunConfig, num_ranks: int) -> float:
        """Returns a lower bound of the step time."""
        return self.time(config, num_ranks, bound=True).seconds

    def time(self, config: RunConfig, num_ranks: int, *, bound: bool = False) -> StepTime:
        """Returns the step time. bound: a lower bound of it, in less time."""
        return step_time(config, self.problem.hardware, num_ranks, memo=self.memo, bound=bound)

    def plan(self, chosen: Chosen, num_ranks: int) -> Plan:
        """Returns the plan of a chosen policy."""
        return Plan(chosen.config, num_ranks, chosen.peak, self.time(chosen.config, num_ranks))

    def fit(self, config: RunConfig, num_ranks: int, budget_bytes: int) -> Chosen | Unreachable:
        """Returns the layout with its fastest policy, or with the user's policy if it is fixed."""
        run = self.run(config, num_ranks)
        if not self.fixed_policy:
            return fitted(run, budget_bytes)
        chosen = Chosen(config, run.peak(config))
        return chosen if chosen.peak.num_bytes <= budget_bytes else Unreachable(chosen)

    def _ranked(
        self, start: Iterable[tuple[float, RunConfig]], num_ranks: int, budget_bytes: int, most: int
    ) -> tuple[list[Plan], list[RunConfig]]:
        """Returns the fastest plans, and the layouts that were found not to fit until then."""
        number = itertools.count()  # decides between equal bounds: candidates have no order
        heap = [
            (bound * _handicap(config), next(number), _Candidate(1, config))
            for bound, config in start
        ]
        heapq.heapify(heap)
        plans: list[Plan] = []
        too_large: list[RunConfig] = []
        seen = set()
        while heap and len(plans) < most:
            bound, _, candidate = heapq.heappop(heap)
            if plans and bound > SLOWEST * plans[0].time.seconds:
                break
            if shape(candidate.config) in seen:
                continue
            if candidate.plan is not None:  # no bound that is left is lower than its time
                seen.add(shape(candidate.config))
                plans.append(candidate.plan)
                continue
            further = self._advanced(candidate, num_ranks, budget_bytes)
            if further is None:
                too_large.append(candidate.config)
            else:
                bound = further[0] * _handicap(candidate.config)
                heapq.heappush(heap, (bound, next(number), further[1]))
        return plans, too_large

    def _advanced(
        self, candidate: _Candidate, num_ranks: int, budget_bytes: int
    ) -> tuple[float, _Candidate] | None:
        """Returns the candidate at its next station with its bound, or None if it does not fit."""
        if candidate.station == 1 and not self.fixed_policy:
            quick = quickly_fitted(self.run(candidate.config, num_ranks), budget_bytes)
            if quick is None:
                return None
            return self.bound(quick, num_ranks), candidate._replace(station=2)
        if candidate.chosen is not None:
            plan = self.plan(candidate.chosen, num_ranks)
            return plan.time.seconds, candidate._replace(station=4, plan=plan)
        chosen = self.fit(candidate.config, num_ranks, budget_bytes)
        if isinstance(chosen, Unreachable):
            return None
        return self.bound(chosen.config, num_ranks), candidate._replace(station=3, chosen=chosen)

    def _smallest(self, too_large: list[RunConfig], num_ranks: int) -> Plan | None:
        """Returns the plan with the smallest peak among the most promising layouts."""
        sizes = [(least_bytes(self.run(config, num_ranks)), config) for config in too_large]
        found = []
        for _, config in sorted(sizes, key=_first)[:SMALLEST_TRIED]:
            found.append(self.plan(self._least(config, num_ranks), num_ranks))
        return min(found, key=lambda plan: plan.peak.num_bytes, default=None)

    def _least(self, config: RunConfig, num_ranks: int) -> Chosen:
        """Returns a layout with about the policy of the smallest peak, by smaller budgets."""
        chosen = self.fit(config, num_ranks, 0)
        assert isinstance(chosen, Unreachable)
        least = chosen.smallest
        while True:
            smaller = self.fit(config, num_ranks, round(STEP * least.peak.num_bytes))
            if isinstance(smaller, Unreachable):
                return least
            least = smaller

    def _larger(
        self, faster: list[RunConfig], num_ranks: int, budget_bytes: int, limit: float
    ) -> Plan | None:
        """Returns the plan without recomputation that lacks the fewest bytes."""
        found: list[Plan] = []
        # `faster` begins with the fastest: its end is nearest to the plan that fits.
        runs = [self.run(config, num_ranks) for config in faster[-NEAREST:]]
        sizes = sorted(((whole_bytes(run), run.config) for run in runs), key=_first)
        for _, config in sizes[:SMALLEST_TRIED] if not self.fixed_policy else ():
            whole = with_policy(config, None)
            peak = self.run(config, num_ranks).peak(whole)
            time = self.time(whole, num_ranks)
            if peak.num_bytes > budget_bytes and time.seconds < limit:
                found.append(Plan(whole, num_ranks, peak, time))
        return min(found, key=lambda plan: plan.peak.num_bytes, default=None)


def shape(config: RunConfig) -> tuple[object, ...]:
    """Returns the key by which two layouts of a ranking differ.

    Of several layouts with one key, only the fastest counts.
    """
    parallel = config.parallel
    return (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        kind_of(config),
    )


def _handicap(config: RunConfig) -> float:
    """Returns the factor of the step time by which a layout with many dimensions ranks lower."""
    parallel = config.parallel
    kinds = (
        parallel.tensor_model_parallel_size > 1,
        parallel.pipeline_model_parallel_size > 1,
        (parallel.num_virtual_stages_per_pipeline_rank or 1) > 1,
        parallel.context_parallel_size > 1,
        config.training.loss_chunk_size is not None,
    )
    return 1.0 + HANDICAP * sum(kinds)


def _first(pair: tuple[float, object]) -> float:
    return pair[0]
