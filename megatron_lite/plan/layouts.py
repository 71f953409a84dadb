"""The layouts that a search tries: how the ranks share a model, and how a step is cut.

    tensor x pipeline x context parallelism, virtual stages, the kind of data parallelism, the
    micro-batch size, and whether the loss is computed in chunks

Every layout is a RunConfig, so a layout that training would refuse is never tried. A dimension that
the user gives is fixed. Sequence parallelism is on wherever tensor parallelism is, unless it is
fixed. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_lite.config.parallel import DataParallelConfig, ParallelConfig
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


def kind_of(config: RunConfig) -> str:
    """Returns the name of the kind of data parallelism."""
    if config.data_parallel.use_torch_fsdp2:
        return FSDP2
    return ZERO1 if config.data_parallel.use_distributed_optimizer else REPLICATED


def refusal(problem: Problem, num_ranks: int) -> str:
    """Returns why no layout of so many ranks has the dimensions that are fixed."""
    base, fixed = problem.base, problem.fixed
    try:
        parallel = replace(
            base.parallel, **{name: fixed[name] for name in fixed if hasattr(base.parallel, name)}
        )
        training = replace(
            base.training, **{name: fixed[name] for name in fixed if hasattr(base.training, name)}
        )
        recompute = problem.recompute or base.recompute
        config = replace(base, parallel=parallel, training=training, recompute=recompute)
        config.batch_schedule(parallel.data_parallel_size(num_ranks))
    except ValueError as error:
        return str(error)
    return (
        f"no layout of {num_ranks} ranks divides the heads, the layers, the sequence and "
        f"--global-batch-size {base.training.global_batch_size}: change one of them"
    )


def layouts(problem: Problem, num_ranks: int) -> Iterator[RunConfig]:
    """Yields every layout of so many ranks, without a recompute policy of its own."""
    base = problem.base
    for parallel in _parallel(problem, num_ranks):
        dp_size = parallel.data_parallel_size(num_ranks)
        for data_parallel in _data_parallel(problem, parallel, dp_size):
            for size in _micro_batch_sizes(problem, parallel, dp_size):
                for chunk in _options(problem, LOSS_CHUNK, LOSS_CHUNKS):
                    try:
                        training = replace(
                            base.training, micro_batch_size=size, loss_chunk_size=chunk
                        )
                        # Every batch must divide over the ranks, from the start of the run on.
                        batches = training.batch_schedule(dp_size, seq_length=base.data.seq_length)
                        if any(size % batches.samples_per_microbatch for size in batches.sizes):
                            continue
                        yield replace(
                            base,
                            parallel=parallel,
                            data_parallel=data_parallel,
                            training=training,
                            recompute=problem.recompute or base.recompute,
                        )
                    except ValueError:
                        continue  # training would refuse it


def _parallel(problem: Problem, num_ranks: int) -> Iterator[ParallelConfig]:
    base = problem.base.parallel
    # No tensor-parallel group crosses the border of a node.
    most = min(num_ranks, problem.hardware.ranks_per_node)
    tensor = [size for size in _divisors(num_ranks) if size <= most]
    for tp in _options(problem, TENSOR, tensor):
        for cp in _options(problem, CONTEXT, _context_sizes(problem)):
            for pp in _options(problem, PIPELINE, _divisors(num_ranks)):
                if num_ranks % (tp * cp * pp) or pp > problem.base.model.num_layers:
                    continue
                sequence = problem.fixed.get(SEQUENCE, tp > 1)
                sizes = {TENSOR: tp, CONTEXT: cp, PIPELINE: pp, SEQUENCE: sequence}
                for cut in _cuts(problem, pp):
                    try:
                        parallel = replace(base, **sizes, **cut)
                        stages(parallel, problem.base.model.num_layers)
                    except ValueError:
                        continue  # the layers do not divide over the stages
                    yield parallel


def _context_sizes(problem: Problem) -> list[int]:
    length = problem.base.data.seq_length
    return [size for size in CONTEXT_SIZES if size == 1 or length // size >= LEAST_CONTEXT]


def _cuts(problem: Problem, pp_size: int) -> Iterator[dict[str, Any]]:
    """Yields the settings that cut the layers into stages.

    If the ranks do not divide the layers, the first and the last rank get fewer than the others.
    """
    given = {name: problem.fixed[name] for name in VIRTUAL if name in problem.fixed}
    if pp_size == 1 or given:
        yield given
        return
    layers, ends = problem.base.model.num_layers, {}
    each = -(-layers // pp_size)
    if layers % pp_size:  # the ranks between hold `each`, and both ends share the rest
        rest = layers - (pp_size - 2) * each
        if rest < 2:
            return
        ends = dict(
            decoder_first_pipeline_num_layers=rest // 2,
            decoder_last_pipeline_num_layers=rest - rest // 2,
        )
    for virtual in range(1, min(each, MOST_VIRTUAL_STAGES) + 1):
        if each % virtual == 0:
            one: dict[str, Any] = dict(ends)
            one["num_virtual_stages_per_pipeline_rank"] = virtual if virtual > 1 else None
            yield one


def _data_parallel(
    problem: Problem, parallel: ParallelConfig, dp_size: int
) -> Iterator[DataParallelConfig]:
    """Yields the kinds of data parallelism.

    FSDP2 gathers the weights of a stage again for each micro-batch of a pipeline. The two are
    tried together only if the user fixes the pipeline.
    """
    base = problem.base.data_parallel
    if DATA_PARALLEL & problem.fixed.keys() or dp_size * parallel.context_parallel_size == 1:
        yield base
        return
    in_pipeline = parallel.pipeline_model_parallel_size > 1
    for kind, flags in KINDS.items():
        if kind == FSDP2 and in_pipeline and PIPELINE not in problem.fixed:
            continue
        try:
            yield replace(base, **flags)
        except ValueError:
            continue  # it contradicts a setting of the user


def _micro_batch_sizes(problem: Problem, parallel: ParallelConfig, dp_size: int) -> Iterator[int]:
    """Yields the sizes that divide the batch, and with virtual stages the micro-batches too."""
    training = problem.base.training
    pp, layers = parallel.pipeline_model_parallel_size, problem.base.model.num_layers
    virtual = len(stages(parallel, layers)) > pp
    for size in _options(problem, MICRO_BATCH, MICRO_BATCH_SIZES):
        batch = training.global_batch_size or size * dp_size
        if batch % (size * dp_size) == 0 and not (virtual and batch // (size * dp_size) % pp):
            yield size


def _options(problem: Problem, name: str, values: Iterable[Any]) -> Iterable[Any]:
    return (problem.fixed[name],) if name in problem.fixed else values


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
