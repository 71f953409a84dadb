"""The time of what follows the last micro-batch: the reduction of gradients and the update.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collective,
    Matmul,
)
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.plan.hardware import Group
from megatron_lite.plan.operation_time import Clock
from megatron_lite.plan.stage_time import FLOAT32, stage_parameters

# The bytes that a step moves for each parameter, besides the weight that it writes: the gradient is
# read for its norm, scaled in place and read again; master weight and two moments are read and
# written.
ADAM_BYTES = 4 + 8 + 4 + 24
MUON_BYTES = ADAM_BYTES - 8  # one moment
ROW_PARALLEL = ("linear_proj", "linear_fc2")


class UpdateTime(NamedTuple):
    """The seconds of a rank after its last backward, and of what delays its next forward.

    reduction: the part of the reduction of gradients that backward does not hide.
    update: the optimizer.
    gather: the part of the gathers of updated weights that the next forward does not hide.
    """

    reduction: float
    update: float
    gather: float


def update_time(
    config: RunConfig,
    stages: Sequence[Stage],
    clock: Clock,
    *,
    data_parallel: Group,
    embeddings: Group,
    forward: float,
    backward: float,
) -> UpdateTime:
    """Returns the times of one pipeline rank.

    stages: the stages of the rank.
    embeddings: the ranks that share a tied embedding.
    forward, backward: the seconds of one micro-batch in all stages of the rank.
    """
    hardware, options = clock.hardware, config.data_parallel
    parameters = sum(stage_parameters(config, stage, clock.memo) for stage in stages)
    shared_out = options.use_distributed_optimizer or options.use_torch_fsdp2
    shards = data_parallel.size if shared_out else 1
    reduction = gather = 0.0
    if not options.use_torch_fsdp2:
        sent = 2 if options.grad_reduce_in_bf16 else FLOAT32
        kind = REDUCE_SCATTER if shared_out else ALL_REDUCE
        bucket = options.bucket_size(data_parallel.size)
        buckets = 1 if bucket is None else max(1, math.ceil(parameters / bucket))
        reduction = _hidden(
            hardware.collective_seconds(Collective(kind, sent * parameters), data_parallel),
            backward,
            buckets,
            clock,
        )
        if shared_out:
            gather = _hidden(
                hardware.collective_seconds(
                    Collective(ALL_GATHER, clock.element_bytes * parameters), data_parallel
                ),
                forward,
                buckets if options.overlap_param_gather else 1,
                clock,
            )
    reduction += hardware.collective_seconds(_tied_gradient(config, stages), embeddings)
    written = clock.element_bytes if clock.element_bytes < FLOAT32 else 0
    update = hardware.memory_seconds((ADAM_BYTES + written) * parameters / shards)
    if config.optimizer.optimizer == "muon":
        update += _muon(config, stages, clock, data_parallel, shards)
    return UpdateTime(reduction, update, gather)


def _hidden(collective: float, beside: float, buckets: int, clock: Clock) -> float:
    """Returns the part of a transfer in equal buckets that computation does not hide.

    The first bucket is ready when one part in `buckets` of the computation is done, and the last
    one when all of it is done.
    """
    if buckets == 1:
        return collective
    last = collective / buckets
    return last + clock.exposed(collective - last, beside * (buckets - 1) / buckets)


def _tied_gradient(config: RunConfig, stages: Sequence[Stage]) -> Collective:
    """Returns the all-reduce of a tied embedding's gradient, empty on ranks without one."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    tied = not model.untie_embeddings_and_output_weights and stages[0].count > 1
    holds = any(stage.is_first or stage.is_last for stage in stages)
    rows = config.tokenizer.padded_vocab_size(tp_size) // tp_size
    return Collective(ALL_REDUCE, FLOAT32 * rows * model.hidden_size * (tied and holds))


def _muon(
    config: RunConfig, stages: Sequence[Stage], clock: Clock, data_parallel: Group, shards: int
) -> float:
    """Returns the seconds that Muon adds to the update of a rank.

    Ranks that share out the parameters gather each matrix. Each rank orthogonalizes the matrices of
    which it holds a piece; a share of the parameters can begin and end inside a matrix.
    """
    hardware, options = clock.hardware, config.optimizer
    element = FLOAT32 if options.muon_fp32_matmul_prec == "high" else 2
    whole = options.muon_tp_mode == "duplicated"
    matrices = list(_matrices(config, stages, clock, whole))
    elements = sum(rows * columns for rows, columns in matrices)
    seconds = sum(
        options.muon_num_ns_steps * _newton_schulz_step(clock, rows, columns, element)
        for rows, columns in matrices
    )
    if shards > 1 and matrices:
        seconds *= min(1.0, (math.ceil(len(matrices) / shards) + 1) / len(matrices))
        seconds += hardware.collective_seconds(
            Collective(ALL_GATHER, FLOAT32 * elements), data_parallel
        )
    if whole:
        seconds += hardware.collective_seconds(Collective(ALL_GATHER, element * elements), clock.tp)
    # `update_time` has counted these matrices with AdamW's two moments.
    return seconds - hardware.memory_seconds((ADAM_BYTES - MUON_BYTES) * elements / shards)


def _newton_schulz_step(clock: Clock, rows: int, columns: int, element_bytes: int) -> float:
    """Returns the seconds of X X^T, its square, and the product with X (optim/muon_update.py)."""
    short, long = sorted((rows, columns))
    products = (
        Matmul("X X^T", short, short, long),
        Matmul("(X X^T)^2", short, short, short),
        Matmul("(..) X", short, long, short),
    )
    return sum(clock.hardware.matmul_seconds(one, element_bytes) for one in products)


def _matrices(
    config: RunConfig, stages: Sequence[Stage], clock: Clock, whole: bool
) -> Iterator[tuple[int, int]]:
    """Yields the rows and columns of each matrix that Muon orthogonalizes.

    whole: whether the parts of all tensor-parallel ranks are gathered.
    """
    model, t = config.model, clock.tp.size if whole else 1
    for stage in stages:
        sizes = Sizes.of(config, device=clock.hardware.device, stage=stage)
        for layer in describe_layers(model, sizes, stage.num_layers):
            for operation in layer.operations:
                for parameter in operation.parameters:
                    if len(parameter.shape) != 2:
                        continue
                    rows, columns = parameter.shape
                    if operation.name in ROW_PARALLEL:
                        yield rows, columns * t
                    elif operation.name == "linear_qkv" and config.optimizer.muon_split_qkv:
                        groups = model.num_attention_heads + 2 * model.query_groups
                        for heads in (
                            model.num_attention_heads,
                            model.query_groups,
                            model.query_groups,
                        ):
                            yield rows * t * heads // groups, columns
                    else:
                        yield rows * t, columns
