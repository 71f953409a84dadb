"""The layouts that a search tries: how the ranks share a model, and how a step is cut.

DIMENSIONS is the table of them. Each row has the fields of a dimension and a function that yields
values for them; it knows the values of the rows above. A dimension that the user gives is fixed.
Every layout is a RunConfig, so a layout that training would refuse is never tried. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import stages
from megatron_lite.plan.problem import (
    CONTEXT,
    DATA_PARALLEL,
    LOSS_CHUNK,
    MICRO_BATCH,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Problem,
    with_fields,
)

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)
CONTEXT_SIZES = (1, 2, 4, 8, 16)
LEAST_CONTEXT = 2048  # tokens of a sequence on one rank; the search splits none into shorter parts
LOSS_CHUNKS = (None, 1024)
MOST_VIRTUAL_STAGES = 8
REPLICATED, ZERO1, FSDP2 = "replicated", "ZeRO-1", "FSDP2"
# The flags of each kind of data parallelism. Overlap costs no memory.
KINDS: Mapping[str, Mapping[str, bool]] = {
    REPLICATED: dict(overlap_grad_reduce=True),
    ZERO1: dict(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    ),
    FSDP2: dict(use_torch_fsdp2=True),
}
Row = Mapping[str, Any]  # values by field


def kind_of(config: RunConfig) -> str:
    """Returns the name of the kind of data parallelism."""
    if config.data_parallel.use_torch_fsdp2:
        return FSDP2
    return ZERO1 if config.data_parallel.use_distributed_optimizer else REPLICATED


def refusal(problem: Problem, num_ranks: int) -> str:
    """Returns why no layout of so many ranks has the dimensions that are fixed."""
    try:
        config = with_fields(_base(problem), problem.fixed)
        config.batch_schedule(config.parallel.data_parallel_size(num_ranks))
    except ValueError as error:
        return str(error)
    return (
        f"no layout of {num_ranks} ranks divides the heads, the layers, the sequence and "
        f"--global-batch-size {problem.base.training.global_batch_size}: change one of them"
    )


def layouts(problem: Problem, num_ranks: int) -> Iterator[RunConfig]:
    """Yields every layout of so many ranks, without a recompute policy of its own."""
    rows: list[Row] = [{}]
    for fields, values in DIMENSIONS:
        fixed = {name: problem.fixed[name] for name in fields if name in problem.fixed}
        rows = [
            {**row, **more}
            for row in rows
            for more in ([fixed] if fixed else values(problem, num_ranks, row))
        ]
    for row in rows:
        with suppress(ValueError):  # training would refuse it
            config = with_fields(_base(problem), row)
            if _divides(config, num_ranks):
                yield config


def _base(problem: Problem) -> RunConfig:
    return replace(problem.base, recompute=problem.recompute or problem.base.recompute)


def _divides(config: RunConfig, num_ranks: int) -> bool:
    """Returns whether every batch divides over the ranks, from the start of the run on.

    Raises ValueError if the ranks, the layers or the whole batch do not divide.
    """
    parallel = config.parallel
    dp_size, pp = parallel.data_parallel_size(num_ranks), parallel.pipeline_model_parallel_size
    batches = config.batch_schedule(dp_size)
    virtual = len(stages(parallel, config.model.num_layers)) > pp
    return not (
        (virtual and config.training.num_microbatches(dp_size) % pp)
        or any(size % batches.samples_per_microbatch for size in batches.sizes)
    )


def _tensor(problem: Problem, num_ranks: int, row: Row) -> Iterator[Row]:
    # No tensor-parallel group crosses the border of a node.
    for size in range(1, min(num_ranks, problem.hardware.ranks_per_node) + 1):
        if num_ranks % size == 0:
            yield {TENSOR: size}


def _context(problem: Problem, num_ranks: int, row: Row) -> Iterator[Row]:
    length = problem.base.data.seq_length
    for size in CONTEXT_SIZES:
        if size == 1 or length // size >= LEAST_CONTEXT:
            yield {CONTEXT: size}


def _pipeline(problem: Problem, num_ranks: int, row: Row) -> Iterator[Row]:
    for size in range(1, min(num_ranks, problem.base.model.num_layers) + 1):
        if num_ranks % (size * row[TENSOR] * row[CONTEXT]) == 0:
            yield {PIPELINE: size}


def _sequence(problem: Problem, num_ranks: int, row: Row) -> Iterator[Row]:
    yield {SEQUENCE: row[TENSOR] > 1}


def _cuts(problem: Problem, num_ranks: int, row: Row) -> Iterator[Row]:
    """Yields the settings that cut the layers into stages.

    If the ranks do not divide the layers, the first and the last rank get fewer than the others.
    """
    size, layers = row[PIPELINE], problem.base.model.num_layers
    each, ends = -(-layers // size), {}
    if layers % size:  # the ranks between hold `each`, and both ends share the rest
        rest = layers - (size - 2) * each
        if rest < 2:
            return
        ends = dict(
            decoder_first_pipeline_num_layers=rest // 2,
            decoder_last_pipeline_num_layers=rest - rest // 2,
        )
    yield ends
    for virtual in range(2, min(each, MOST_VIRTUAL_STAGES) + 1 if size > 1 else 0):
        if each % virtual == 0:
            yield {**ends, "num_virtual_stages_per_pipeline_rank": virtual}


def _kinds(problem: Problem, num_ranks: int, row: Row) -> Iterator[Row]:
    """Yields the kinds of data parallelism.

    FSDP2 gathers the weights of a stage again for each micro-batch of a pipeline. The two are
    tried together only if the user fixes the pipeline.
    """
    if num_ranks == row[TENSOR] * row[PIPELINE]:
        yield {}
        return
    in_pipeline = row[PIPELINE] > 1 and PIPELINE not in problem.fixed
    for kind, flags in KINDS.items():
        if not (kind == FSDP2 and in_pipeline):
            yield flags


def _micro_batches(problem: Problem, num_ranks: int, row: Row) -> Iterator[Row]:
    samples = num_ranks // (row[TENSOR] * row[CONTEXT] * row[PIPELINE]) or 1  # of one each
    for size in MICRO_BATCH_SIZES:
        if (problem.base.training.global_batch_size or size * samples) % (size * samples) == 0:
            yield {MICRO_BATCH: size}


def _loss_chunks(problem: Problem, num_ranks: int, row: Row) -> Iterator[Row]:
    for size in LOSS_CHUNKS:
        yield {LOSS_CHUNK: size}


# In the order in which the rows need each other.
DIMENSIONS: tuple[tuple[tuple[str, ...], Callable[[Problem, int, Row], Iterator[Row]]], ...] = (
    ((TENSOR,), _tensor),
    ((CONTEXT,), _context),
    ((PIPELINE,), _pipeline),
    ((SEQUENCE,), _sequence),
    (VIRTUAL, _cuts),
    (DATA_PARALLEL, _kinds),
    ((MICRO_BATCH,), _micro_batches),
    ((LOSS_CHUNK,), _loss_chunks),
)
