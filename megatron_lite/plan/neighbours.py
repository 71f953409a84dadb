"""The changes that are one step away from a plan: each alone, with its best policy.

Standard library only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.plan.auto_policy import Unreachable
from megatron_lite.plan.layouts import KINDS, LOSS_CHUNKS, kind_of
from megatron_lite.plan.search import Plan, Search, with_policy

LARGEST_MICRO_BATCH = 4096


class Neighbour(NamedTuple):
    """A plan one step away. fits: whether it does; if not, it has the smallest peak found."""

    change: str
    plan: Plan
    fits: bool


def neighbours(search: Search, plan: Plan, budget_bytes: int) -> Iterator[Neighbour]:
    """Yields the plans one step away that are legal."""
    for change, config, num_ranks in _changes(search, plan):
        if (found := fit(search, config, num_ranks, budget_bytes, change)) is not None:
            yield found


def fit(
    search: Search, config: RunConfig, num_ranks: int, budget_bytes: int, change: str
) -> Neighbour | None:
    """Returns a changed run with its best policy, or None if training would refuse it."""
    try:
        chosen = search.fit(config, num_ranks, budget_bytes)
        fits = not isinstance(chosen, Unreachable)
        smallest = chosen.smallest if isinstance(chosen, Unreachable) else chosen
        return Neighbour(change, search.plan(smallest, num_ranks), fits)
    except ValueError:
        return None


def largest_micro_batch(search: Search, plan: Plan, budget_bytes: int) -> Plan:
    """Returns the plan with the largest micro-batch that fits in the same layout.

    Sizes are tried in steps of a factor of two, as far as they divide the batch.
    """
    largest = plan
    while largest.config.training.micro_batch_size < LARGEST_MICRO_BATCH:
        size = 2 * largest.config.training.micro_batch_size
        config = _changed(plan.config, micro_batch_size=size)
        found = (
            None
            if config is None
            else fit(search, config, plan.num_ranks, budget_bytes, "micro-batch")
        )
        if found is None or not found.fits:
            break
        largest = found.plan
    return largest


def _changes(search: Search, plan: Plan) -> Iterator[tuple[str, RunConfig, int]]:
    base = plan.config if search.fixed_policy else with_policy(plan.config, None)
    training, ranks = base.training, plan.num_ranks
    sizes = [("double the micro-batch", 2 * training.micro_batch_size)]
    if training.micro_batch_size % 2 == 0:
        sizes.append(("halve the micro-batch", training.micro_batch_size // 2))
    for change, size in sizes:
        if (config := _changed(base, micro_batch_size=size)) is not None:
            yield change, config, ranks
    changes: list[tuple[str, int | None]] = []
    if base.loss_chunk_size is None:
        chunk = next(one for one in LOSS_CHUNKS if one is not None)
        changes.append((f"--loss-chunk-size {chunk}", chunk))
    else:
        if training.loss_chunk_size is not None:
            changes.append(("no --loss-chunk-size", None))
        if half := base.loss_chunk_size // 2:
            changes.append((f"--loss-chunk-size {half}", half))
    for change, chunk_size in changes:
        if (config := _changed(base, loss_chunk_size=chunk_size)) is not None:
            yield change, config, ranks
    if search.run(base, ranks).dp_cp_size > 1:
        off = {name: False for flags in KINDS.values() for name in flags}
        for kind, flags in KINDS.items():
            if kind != kind_of(base):
                with contextlib.suppress(ValueError):  # it contradicts a setting of the user
                    data_parallel = replace(base.data_parallel, **{**off, **flags})
                    yield kind, replace(base, data_parallel=data_parallel), ranks
    node = search.problem.hardware.ranks_per_node
    more = ranks + node if ranks >= node else 2 * ranks
    for count in (more, 2 * ranks):
        try:
            training.num_microbatches(base.parallel.data_parallel_size(count))
        except ValueError:
            continue
        yield f"{count} GPUs", base, count
        break


def _changed(config: RunConfig, **training: int | None) -> RunConfig | None:
    changes: dict[str, Any] = training
    try:
        return replace(config, training=replace(config.training, **changes))
    except ValueError:
        return None
