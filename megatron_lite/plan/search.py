"""The fastest plans of a run that fit into memory: a best-first search over layouts.

A layout passes through stations, each with a lower bound of its step time that is at least as high
as the one before. The layout with the lowest bound goes on, so the first to arrive is the fastest
of all that were tried, by the time model.

    0  no recomputation, stages that all take the same time, and the most virtual stages: it stands
       for every number of these
    1  the same with one number of them: it stands for every cut of the layers into stages
    2  no recomputation, and the shortest way through the pipeline
    3  the fewest replays if only states and activations took memory. If they fit, the layout joins
       at station 2 with loss chunks, and with further units of FSDP2
    4  the fastest policy by the full prediction of the peak, and the simulated pipeline: a plan

The rows behind the first plan are the fastest of MORE_FITTED further layouts that are planned.

Standard library only.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lite.config.run import RunConfig

from .auto_policy import Plan, fitted, least_replays
from .layouts import (
    kind_of,
    layouts,
    least_states,
    most_virtual,
    recuts,
    savers,
    variants,
    virtuals,
)
from .problem import Problem
from .step_time import StepTime, step_time

SMALLEST_TRIED = 4
MOST_PLANS, MORE_FITTED = 6, 40
NEAREST = 64  # faster layouts of which the smallest is looked for
SLOWEST = 1.1  # times the step time of the best plan: a slower one is not worth a row
BETTER = 0.999  # of the step time: a plan that is not clearly faster is no better plan
HANDICAP = 0.0005  # of the step time, for each further kind of parallelism: of two plans that are
# equally fast the simpler one wins


class SearchResult(NamedTuple):
    """The result of a search.

    plans: those that fit, the fastest first. Their layouts differ in more than the micro-batch.
    plan: the first of them, or if none fits that with the smallest peak that was found.
    num_layouts: how many layouts there were.
    larger: the plan that is faster than the first, does not fit, and lacks the fewest bytes.
    """

    plans: tuple[Plan, ...]
    plan: Plan
    num_layouts: int
    larger: Plan | None = None


class Search:
    """The search for the plans of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.machine = problem, problem.machine
        self.fixed_policy = problem.policy is not None

    def plan(self, config: RunConfig) -> Plan:
        """Returns the plan of a layout, with the host memory that its states leave."""
        problem = self.problem
        plan = Plan(config, self.machine, problem.num_ranks, problem.host_bytes)
        # If host memory is limited, the states take the same.
        if problem.states_on_host is None:
            return plan
        return replace(plan, host_bytes=max(0, plan.host_bytes - plan.states_on_host))

    def time(self, config: RunConfig, **facts: Any) -> StepTime:
        """Returns the step time. facts: see `step_time`."""
        return step_time(config, self.machine, self.problem.num_ranks, **facts)

    def fit(self, config: RunConfig, budget_bytes: int, *, or_smallest: bool = True) -> Plan:
        """Returns the layout with its fastest policy that fits, or with the user's policy if it is
        fixed. If none fits, it has the smallest peak. or_smallest: see `fitted`."""
        plan = self.plan(config)
        return plan if self.fixed_policy else fitted(plan, budget_bytes, or_smallest=or_smallest)

    def find(self, budget_bytes: int) -> SearchResult:
        """Returns the fastest plans."""
        plans, tried, too_large = self._ranked(budget_bytes)
        if not plans:
            return SearchResult((), self._smallest(too_large), len(tried))
        limit = BETTER * plans[0].time.seconds
        by_time = sorted(tried, key=lambda one: one[1])
        faster = [config for config, seconds in by_time if seconds < limit]
        larger = None if self.fixed_policy else self._larger(faster, budget_bytes, limit)
        return SearchResult(tuple(plans), plans[0], len(tried), larger)

    def _ranked(
        self, budget_bytes: int
    ) -> tuple[list[Plan], list[tuple[RunConfig, float]], list[RunConfig]]:
        """Returns the fastest plans, all layouts that were tried until then, and those of them that
        were found not to fit.

        Each layout that was tried has a lower bound of its time, unless its states do not fit.
        """
        problem = self.problem
        tried: list[tuple[RunConfig, float]] = []
        number = itertools.count()  # decides between equal bounds
        hopeless: list[tuple[float, int, RunConfig]] = []
        heap: list[tuple[float, int, int, RunConfig, StepTime, Plan | None]] = []

        def push(
            seconds: float,
            station: int,
            config: RunConfig,
            time: StepTime,
            plan: Plan | None = None,
        ) -> None:
            ranked = seconds * _handicap(config)
            heapq.heappush(heap, (ranked, next(number), station, config, time, plan))

        def push_new(configs: Iterable[RunConfig], station: int) -> None:
            for config in configs:
                # A layout of the first station has the fewest states of those that follow from it.
                if station == 0 and (states := least_states(problem, config)) > budget_bytes:
                    hopeless.append((states, next(number), config))
                    tried.append((config, math.inf))
                    continue
                time = self.time(config, bound=True)
                chunks = most_virtual(problem, config)
                # At later stations the cut of the layers is that of the layout.
                seconds = time.seconds if station else self._balanced(config, time, chunks)
                tried.append((config, time.seconds))
                push(seconds, station, config, time)

        for layout in layouts(problem):
            push_new(variants(problem, layout), 0)
        plans: dict[object, Plan] = {}
        fastest = defaultdict[object, float](lambda: math.inf)  # of the plans of a shape so far
        too_large = []
        number_fitted = 0
        while heap and len(plans) < MOST_PLANS:
            bound, _, station, config, time, plan = heapq.heappop(heap)
            # Of several layouts with one key, only the fastest counts.
            parallel = config.parallel
            sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
            shape = *sizes, kind_of(config)
            if plans and bound > SLOWEST * next(iter(plans.values())).time.seconds:
                break
            if shape in plans:
                continue
            if plan is not None:  # no bound that is left is lower than its time
                plans[shape] = plan
            elif number_fitted > MORE_FITTED:
                continue
            elif station == 0:
                for one in (config, *virtuals(problem, config)):
                    push(self._balanced(one, time), 1, one, time)
            elif station == 1:
                if parallel.num_virtual_stages_per_pipeline_rank is None:
                    push(time.seconds, 2, config, time)
                else:  # its time is that of one stage on each rank
                    push_new([config], 2)
                push_new(recuts(problem, config), 2)
            elif bound > BETTER * fastest[shape]:
                continue
            elif station == 2:
                seconds = self._fitting(config, budget_bytes, time)
                if seconds is None:
                    too_large.append(config)
                else:
                    push(seconds, 3, config, time)
                    push_new(savers(config), 2)
            else:
                number_fitted += bool(plans)
                plan = self.fit(config, budget_bytes, or_smallest=False)
                if not plan.peak.fits(budget_bytes):
                    too_large.append(config)
                else:
                    push(plan.time.seconds, 4, config, time, plan)
                    fastest[shape] = min(fastest[shape], plan.time.seconds)
        if not plans and not too_large:
            too_large = [config for *_, config in heapq.nsmallest(SMALLEST_TRIED, hopeless)]
        ranked = sorted(plans.values(), key=lambda one: one.time.seconds * _handicap(one.config))
        return ranked, tried, too_large

    def _balanced(self, config: RunConfig, time: StepTime, chunks: int | None = None) -> float:
        """Returns a lower bound of the time, however the layers are cut into stages.

        Where all ranks compute for the same time, each but the last two begins later and ends
        earlier than the one before.
        chunks: the most virtual stages. None: those of the layout.
        """
        ranks = len(time.busy)
        chunks = chunks or len(config.stage_lengths()) // ranks
        number = config.training.num_microbatches(self.plan(config).dp_size)
        return sum(time.busy) / ranks * (1 + max(0, ranks - 2) / (chunks * number))

    def _fitting(self, config: RunConfig, budget_bytes: int, time: StepTime) -> float | None:
        """Returns a lower bound of the time with a policy that fits, or None if none does.

        time: that without recomputation.
        """
        if self.fixed_policy:
            return time.seconds
        replays = least_replays(self.plan(config), budget_bytes)
        if replays is None:
            return None
        return self.time(config, bound=True, replays=replays).seconds

    def _smallest(self, too_large: list[RunConfig]) -> Plan:
        """Returns the plan with the smallest peak among the most promising layouts."""

        def size(config: RunConfig) -> int:
            plan = self.plan(config)
            return (plan if self.fixed_policy else plan.with_policy("*:full")).peak.num_bytes

        least = sorted(too_large, key=size)[:SMALLEST_TRIED]
        least += savers(least[0])
        found = [self.fit(config, 0) for config in least]
        return min(found, key=lambda plan: plan.peak.num_bytes)

    def _larger(self, faster: list[RunConfig], budget_bytes: int, limit: float) -> Plan | None:
        """Returns the plan without recomputation that lacks the fewest bytes."""
        # `faster` begins with the fastest: its end is nearest to the plan that fits.
        found = sorted(map(self.plan, faster[-NEAREST:]), key=lambda one: one.peak.num_bytes)
        return next(
            (one for one in found if not one.peak.fits(budget_bytes) and one.time.seconds < limit),
            None,
        )


def _handicap(config: RunConfig) -> float:
    """Returns the factor of the step time by which a layout with many dimensions ranks lower."""
    parallel = config.parallel
    kinds = (
        parallel.tensor_model_parallel_size > 1,
        # It takes more memory, so it has to save 0.4 % more.
        8 * (parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel),
        parallel.pipeline_model_parallel_size > 1,
        parallel.num_virtual_stages_per_pipeline_rank is not None,
        parallel.context_parallel_size > 1,
        parallel.cp_comm_type != "p2p",
        parallel.spreads_experts,
        parallel.num_distributed_optimizer_instances > 1,
        parallel.decoder_first_pipeline_num_layers is not None,
        config.data_parallel.fsdp_memory_efficient_wrapping,
        config.training.loss_chunk_size is not None,
    )
    return 1.0 + HANDICAP * sum(kinds)
