"""The details of the planning page beyond the verdict: the stages, and many layouts.

The values are plain (numbers, texts, lists, dicts), as JSON has them:

    stages      for each pipeline rank of the plan: {"rank", "terms": [{"name", "bytes", "tag"}]}
    layouts     of many layouts around the plan: {"peak_bytes", "step_seconds"}

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import stages
from megatron_lite.plan.auto_policy import Unreachable, quickly_fitted
from megatron_lite.plan.fit_verdict import TIGHT, FitVerdict
from megatron_lite.plan.layouts import CONTEXT, LOSS_CHUNK, layouts
from megatron_lite.plan.planned_run import with_policy
from megatron_lite.plan.search import Plan, Search

MOST_LAYOUTS = 120  # some seconds of computation
MOST_STAGES = 64
POLICIES = (None, "*:full")


def details(search: Search, one: FitVerdict, *, most_layouts: int = MOST_LAYOUTS) -> dict[str, Any]:
    """Returns the details of a verdict's plan; {} if it has none.

    most_layouts: how many layouts are evaluated at most. Each has up to three policies: keep
    everything, recompute every layer, and the fastest one that fits.
    """
    if one.plan is None:
        return {}
    budget_bytes = one.budget.memory_bytes if one.word == TIGHT else one.budget.plan_bytes
    return {
        "stages": _stages(search, one.plan),
        "layouts": [
            {
                "peak_bytes": search.run(config, one.plan.num_ranks).peak(config).num_bytes,
                "step_seconds": search.time(config, one.plan.num_ranks).seconds,
            }
            for layout in _near(search, one.plan)[:most_layouts]
            for config in _with_policies(search, layout, one.plan.num_ranks, budget_bytes)
        ],
    }


def _with_policies(
    search: Search, config: RunConfig, num_ranks: int, budget_bytes: int
) -> Iterator[RunConfig]:
    if search.fixed_policy:
        yield config
        return
    for text in POLICIES:
        with suppress(ValueError):  # a layout that has no such policy
            yield with_policy(config, text)
    if quickly_fitted(search.run(config, num_ranks), budget_bytes) is not None:
        found = search.fit(config, num_ranks, budget_bytes)
        if not isinstance(found, Unreachable):
            yield found.config


def _near(search: Search, plan: Plan) -> list[RunConfig]:
    """Returns the layouts with the plan's context-parallel size and loss chunks, nearest first.

    Those with the plan's tensor- and pipeline-parallel sizes have its virtual stages too; the
    others have none. The distance is the number of doublings or halvings of the sizes.
    """
    chosen, problem = plan.config, search.problem
    fixed = {
        **problem.fixed,
        CONTEXT: chosen.parallel.context_parallel_size,
        LOSS_CHUNK: chosen.training.loss_chunk_size,
    }

    def sizes(config: RunConfig) -> tuple[int, int]:
        parallel = config.parallel
        return parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size

    def is_near(config: RunConfig) -> bool:
        if sizes(config) == sizes(chosen):
            return config.parallel == chosen.parallel
        return len(stages(config.parallel, config.model.num_layers)) == sizes(config)[1]

    def distance(config: RunConfig) -> float:
        own, other = ((*sizes(one), one.training.micro_batch_size or 1) for one in (config, chosen))
        return sum(abs(math.log2(one / two)) for one, two in zip(own, other, strict=True))

    found = layouts(problem._replace(fixed=fixed), plan.num_ranks)
    return sorted(filter(is_near, found), key=distance)


def _stages(search: Search, plan: Plan) -> list[dict[str, Any]]:
    """Returns the terms of every pipeline rank, or of MOST_STAGES evenly spread ones."""
    run, size = search.run(plan.config, plan.num_ranks), plan.config.parallel
    ranks = range(size.pipeline_model_parallel_size)
    if len(ranks) > MOST_STAGES:
        spread = {place * (len(ranks) - 1) // (MOST_STAGES - 1) for place in range(MOST_STAGES)}
        ranks = sorted({*spread, plan.peak.rank})  # type: ignore[assignment]
    return [
        {
            "rank": rank,
            "terms": [
                {"name": term.name, "bytes": term.num_bytes, "tag": term.tag}
                for term in run.rank_peak(plan.config, rank).terms
            ],
        }
        for rank in ranks
    ]
