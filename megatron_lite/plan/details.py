"""The details of the planning page beyond the verdict: stages, a timeline and a grid.

The values are plain (numbers, texts, lists, dicts), as JSON has them:

    stages      for each pipeline rank of the plan: {"rank", "terms": [{"name", "bytes", "tag"}]}
    timeline    the bytes of the plan's fullest rank after each action of a step (`_timeline`)
    grid        many layouts around the plan, each with its terms and its step time (`grid`)

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import stages
from megatron_lite.memory.predict.pipeline_memory import ticks
from megatron_lite.memory.predict.step_peak import PeakTerm, StepPeak
from megatron_lite.plan.auto_policy import Unreachable, quickly_fitted
from megatron_lite.plan.fit_verdict import TIGHT, FitVerdict
from megatron_lite.plan.layouts import CONTEXT, LOSS_CHUNK, kind_of, layouts
from megatron_lite.plan.planned_run import with_policy
from megatron_lite.plan.search import Plan, Search

MOST_LAYOUTS = 120  # of a grid: some seconds of computation, and a page of some hundred KB
MOST_STAGES = 64
MIB = 2**20
KEEP, FULL, FASTEST = "keep everything", "recompute every layer", "fastest that fits"
FIXED, SMALLEST = "as given", "smallest found"
POLICIES = {KEEP: None, FULL: "*:full"}


class _Sliders(NamedTuple):
    """A cell of the grid: the values of the five sliders."""

    tp_size: int
    pp_size: int
    states: str
    micro_batch_size: int
    policy: str


class _Cell(NamedTuple):
    """A layout with a policy, evaluated. peaks: those of the ranks that can be the fullest."""

    place: _Sliders
    config: RunConfig
    peaks: tuple[StepPeak, ...]
    seconds: float


def details(search: Search, one: FitVerdict, *, most_layouts: int = MOST_LAYOUTS) -> dict[str, Any]:
    """Returns the details of a verdict's plan; {} if it has none.

    most_layouts: how many layouts the grid has at most. Each has up to three policies.
    """
    if one.plan is None:
        return {}
    return {
        "stages": _stages(search, one.plan),
        "timeline": _timeline(search, one.plan),
        "grid": grid(search, one, most_layouts),
    }


def grid(search: Search, one: FitVerdict, most_layouts: int) -> dict[str, Any]:
    """Returns layouts around the plan, with its context-parallel size and loss chunks.

    axes: the values of each slider, by its name, in their order.
    terms: [name, tag] of each term of a peak. Workspaces of all operations are one term.
    policies: the texts of the recompute policies.
    cells: [five indices into the axes, seconds of a step, index into `policies`, ranks]. Each of
        the ranks is [pipeline rank, MiB of each term, ...]. They are the ranks that can be the
        fullest: the first, the second, the last, and the one that the search found.
    plan: the five indices of the plan. If a cell does not exist (its layout is refused, or no
        policy fits), there is no entry.
    """
    plan = one.plan
    assert plan is not None
    budget_bytes = one.budget.memory_bytes if one.word == TIGHT else one.budget.plan_bytes
    cells = list(_cells(search, plan, budget_bytes, most_layouts))
    policy = FASTEST
    if search.fixed_policy:
        policy = FIXED
    elif not one.found.plans:
        policy = SMALLEST
        cells.append(_cell(search, plan.config, plan.num_ranks, SMALLEST, plan.peak))
    axes = [sorted({cell.place[axis] for cell in cells}, key=_order) for axis in range(5)]
    tags = _tags(cells)
    policies = sorted({str(cell.config.recompute.policy) for cell in cells})
    return {
        "axes": dict(zip(("t", "p", "states", "b", "policy"), axes, strict=True)),
        "terms": [list(term) for term in tags.items()],
        "policies": policies,
        "cells": [
            [
                _indices(axes, cell.place),
                float(f"{cell.seconds:.5g}"),
                policies.index(str(cell.config.recompute.policy)),
                [[peak.rank, *_mebibytes(peak, tags)] for peak in cell.peaks],
            ]
            for cell in cells
        ],
        "plan": _indices(axes, _place(plan.config, policy)),
    }


def _cells(search: Search, plan: Plan, budget_bytes: int, most_layouts: int) -> Iterator[_Cell]:
    for config in _near(search, plan)[:most_layouts]:
        run = search.run(config, plan.num_ranks)
        if search.fixed_policy:
            yield _cell(search, config, plan.num_ranks, FIXED)
            continue
        for name, text in POLICIES.items():
            try:
                yield _cell(search, with_policy(config, text), plan.num_ranks, name)
            except ValueError:
                continue  # the layout has no such policy
        if quickly_fitted(run, budget_bytes) is None:
            continue
        found = search.fit(config, plan.num_ranks, budget_bytes)
        if not isinstance(found, Unreachable):
            yield _cell(search, found.config, plan.num_ranks, FASTEST, found.peak)


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
    own = _place(chosen, "")[:2]
    found = [
        config
        for config in layouts(problem._replace(fixed=fixed), plan.num_ranks)
        if (
            config.parallel == chosen.parallel
            if _place(config, "")[:2] == own
            else len(stages(config.parallel, config.model.num_layers)) == _place(config, "").pp_size
        )
    ]

    def distance(config: RunConfig) -> float:
        pairs = (
            (config.training.micro_batch_size, chosen.training.micro_batch_size),
            (
                config.parallel.tensor_model_parallel_size,
                chosen.parallel.tensor_model_parallel_size,
            ),
            (
                config.parallel.pipeline_model_parallel_size,
                chosen.parallel.pipeline_model_parallel_size,
            ),
        )
        return sum(abs(math.log2(one / other)) for one, other in pairs)

    return sorted(found, key=distance)


def _cell(
    search: Search, config: RunConfig, num_ranks: int, policy: str, known: StepPeak | None = None
) -> _Cell:
    run, size = search.run(config, num_ranks), config.parallel.pipeline_model_parallel_size
    peaks = {rank: run.rank_peak(config, rank) for rank in {0, min(1, size - 1), size - 1}}
    if known is not None:
        peaks[known.rank] = known
    return _Cell(
        _place(config, policy),
        config,
        tuple(peaks[rank] for rank in sorted(peaks)),
        search.time(config, num_ranks).seconds,
    )


def _place(config: RunConfig, policy: str) -> _Sliders:
    return _Sliders(
        config.parallel.tensor_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
        kind_of(config),
        config.training.micro_batch_size,
        policy,
    )


def _order(value: Any) -> tuple[int, Any]:
    """Returns a key that sorts numbers by size, and texts as the sliders have them."""
    texts = ("replicated", "ZeRO-1", "FSDP2", KEEP, FASTEST, FULL, SMALLEST, FIXED)
    return (1, texts.index(value)) if isinstance(value, str) else (0, value)


def _indices(axes: Sequence[Sequence[Any]], place: _Sliders) -> list[int]:
    """Returns the place as indices; -1 for a value that no cell has."""
    return [
        axis.index(value) if value in axis else -1 for axis, value in zip(axes, place, strict=True)
    ]


def _category(term: PeakTerm) -> str:
    """Returns the name of a term; workspaces of all operations have one name."""
    return "workspace" if term.name.startswith("workspace") else term.name


def _tags(cells: Sequence[_Cell]) -> dict[str, str]:
    """Returns the terms that are not empty in all cells, each with its weakest tag."""
    weakness = {"exact": 0, "bound": 1, "estimate": 2}
    found: dict[str, str] = {}
    for term in (term for cell in cells for peak in cell.peaks for term in peak.terms):
        if term.num_bytes:
            name = _category(term)
            found[name] = max(found.get(name, term.tag), term.tag, key=weakness.__getitem__)
    return found


def _mebibytes(peak: StepPeak, names: Iterable[str]) -> list[float]:
    found: dict[str, int] = {}
    for term in peak.terms:
        found[_category(term)] = found.get(_category(term), 0) + term.num_bytes
    return [round(found.get(name, 0) / MIB, 1) for name in names]


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


def _timeline(search: Search, plan: Plan) -> dict[str, Any]:
    """Returns the kept bytes of the plan's fullest rank after each action of a step.

    rank: the pipeline rank. kept_bytes, in_flight: a number for each action.
    actions: the actions as texts, such as "F3" and "B0", with ".c" for a virtual stage c.
    drawn: the micro-batches of the timeline. num_microbatches: those of a step. If a step has more
        than four times as many as there are stages, the timeline is that of a shorter step: the
        middle of a schedule repeats itself.
    """
    run = search.run(plan.config, plan.num_ranks)
    size = plan.config.parallel.pipeline_model_parallel_size
    drawn = min(run.num_microbatches, 4 * size)
    found = list(
        ticks(
            plan.config, search.problem.hardware.device, rank=plan.peak.rank, num_microbatches=drawn
        )
    )
    virtual = any(tick.action.chunk for tick in found)
    return {
        "rank": plan.peak.rank,
        "drawn": drawn,
        "num_microbatches": run.num_microbatches,
        "actions": [
            f"{tick.action.kind[0].upper()}{tick.action.microbatch}"
            + (f".{tick.action.chunk}" if virtual else "")
            for tick in found
        ],
        "in_flight": [tick.in_flight for tick in found],
        "kept_bytes": [tick.kept_bytes for tick in found],
    }
