"""The fastest plans of a run that fit into memory: a best-first search over layouts.

A layout passes through three stations, each with a lower bound of its step time that is at least as
high as the one before. The layout with the lowest bound goes on, so the first to arrive is the
fastest of all.

    1  no recomputation, and the shortest way through the pipeline
    2  the fastest policy if only states and activations took memory
    3  the fastest policy by the full prediction of the peak, and the simulated pipeline: a plan

Standard library only.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.step_peak import StepPeak
from megatron_lite.plan.auto_policy import Unreachable, fitted, quickly_fitted
from megatron_lite.plan.layouts import kind_of, layouts
from megatron_lite.plan.problem import Problem
from megatron_lite.plan.rank_mixes import Chosen, Run, with_policy
from megatron_lite.plan.step_time import StepTime, step_time

SMALLEST_TRIED = 4
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


class Search:
    """The search for one model on one machine."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.fixed_policy = problem.recompute is not None

    def run(self, config: RunConfig, num_ranks: int) -> Run:
        """Returns the run for auto_policy."""
        return Run(config, self.problem.hardware, num_ranks, self.problem.host_bytes)

    def time(self, config: RunConfig, num_ranks: int, *, bound: bool = False) -> StepTime:
        """Returns the step time. bound: a lower bound of it, in less time."""
        return step_time(config, self.problem.hardware, num_ranks, bound=bound)

    def plan(self, chosen: Chosen, num_ranks: int) -> Plan:
        """Returns the plan of a chosen policy."""
        return Plan(chosen.config, num_ranks, chosen.peak, self.time(chosen.config, num_ranks))

    def fit(self, config: RunConfig, num_ranks: int, budget_bytes: int) -> Chosen | Unreachable:
        """Returns the layout with its fastest policy, or with the user's policy if it is fixed."""
        run = self.run(config, num_ranks)
        if not self.fixed_policy:
            return fitted(run, budget_bytes)
        chosen = run.chosen(config)
        return chosen if chosen.peak.fits(budget_bytes) else Unreachable(chosen)

    def find(self, num_ranks: int, budget_bytes: int, *, most: int = 6) -> SearchResult:
        """Returns the fastest plans of so many ranks. most: how many plans to return."""
        start = [
            (self.time(config, num_ranks, bound=True).seconds, config)
            for config in layouts(self.problem, num_ranks)
        ]
        plans, too_large = self._ranked(start, num_ranks, budget_bytes, most)
        if not plans:
            smallest = self._smallest(too_large, num_ranks)
            return SearchResult((), len(start), smallest=smallest)
        limit = BETTER * plans[0].time.seconds
        faster = [one for seconds, one in sorted(start, key=itemgetter(0)) if seconds < limit]
        larger = None if self.fixed_policy else self._larger(faster, num_ranks, budget_bytes, limit)
        return SearchResult(tuple(plans), len(start), larger=larger)

    def _ranked(
        self, start: Iterable[tuple[float, RunConfig]], num_ranks: int, budget_bytes: int, most: int
    ) -> tuple[list[Plan], list[RunConfig]]:
        """Returns the fastest plans, and the layouts that were found not to fit until then."""
        number = itertools.count()  # decides between equal bounds
        heap: list[tuple[float, int, int, RunConfig, Plan | None]] = []

        def push(seconds: float, station: int, config: RunConfig, plan: Plan | None = None) -> None:
            ranked = seconds * _handicap(config)
            heapq.heappush(heap, (ranked, next(number), station, config, plan))

        for seconds, config in start:
            push(seconds, 2 if self.fixed_policy else 1, config)
        plans: dict[object, Plan] = {}
        too_large: list[RunConfig] = []
        while heap and len(plans) < most:
            bound, _, station, config, plan = heapq.heappop(heap)
            if plans and bound > SLOWEST * next(iter(plans.values())).time.seconds:
                break
            if _shape(config) in plans:
                continue
            if plan is not None:  # no bound that is left is lower than its time
                plans[_shape(config)] = plan
            elif station == 1:
                quick = quickly_fitted(self.run(config, num_ranks), budget_bytes)
                if quick is None:
                    too_large.append(config)
                else:
                    push(self.time(quick, num_ranks, bound=True).seconds, 2, config)
            else:
                chosen = self.fit(config, num_ranks, budget_bytes)
                if isinstance(chosen, Unreachable):
                    too_large.append(config)
                else:
                    plan = self.plan(chosen, num_ranks)
                    push(plan.time.seconds, 3, config, plan)
        return list(plans.values()), too_large

    def _smallest(self, too_large: list[RunConfig], num_ranks: int) -> Plan | None:
        """Returns the plan with the smallest peak among the most promising layouts."""
        sizes = []
        for config in too_large:
            full = config if self.fixed_policy else with_policy(config, "*:full")
            sizes.append((self.run(config, num_ranks).chosen(full).peak.num_bytes, config))
        found = []
        for _, config in sorted(sizes, key=itemgetter(0))[:SMALLEST_TRIED]:
            chosen = self.fit(config, num_ranks, 0)
            assert isinstance(chosen, Unreachable)
            found.append(self.plan(chosen.smallest, num_ranks))
        return min(found, key=lambda plan: plan.peak.num_bytes, default=None)

    def _larger(
        self, faster: list[RunConfig], num_ranks: int, budget_bytes: int, limit: float
    ) -> Plan | None:
        """Returns the plan without recomputation that lacks the fewest bytes."""
        # `faster` begins with the fastest: its end is nearest to the plan that fits.
        found = [
            self.run(config, num_ranks).chosen(with_policy(config, None))
            for config in faster[-NEAREST:]
        ]
        for chosen in sorted(found, key=lambda one: one.peak.num_bytes):
            if not chosen.peak.fits(budget_bytes):
                plan = self.plan(chosen, num_ranks)
                if plan.time.seconds < limit:
                    return plan
        return None


def _shape(config: RunConfig) -> tuple[object, ...]:
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
