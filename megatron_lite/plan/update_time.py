"""The time of what follows the last micro-batch: the reduction of gradients and the update.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from megatron_lite.description.transformer_layer import describe_kinds
from megatron_lite.plan.hardware import Group
from megatron_lite.plan.operation_time import Clock
from megatron_lite.plan.stage_time import FLOAT32, TimedRun, stage_parameters

# The bytes that a step moves for each parameter, besides the weight that it writes: the gradient is
# read for its norm, scaled in place and read again; master weight and two moments are read and
# written.
ADAM_BYTES = 4 + 8 + 4 + 24
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
    run: TimedRun, stages: Sequence[Stage], embeddings: Group, forward: float, backward: float
) -> UpdateTime:
    """Returns the times of one pipeline rank.

    stages: the stages of the rank.
    embeddings: the ranks that share a tied embedding.
    forward, backward: the seconds of one micro-batch in all stages of the rank.
    """
    config, clock, group = run.config, run.clock, run.data_parallel
    options, element = config.data_parallel, clock.element_bytes
    parameters = sum(stage_parameters(config, stage) for stage in stages)
    bucket = options.bucket_size(group.size)
    buckets = 1 if bucket is None else max(1, math.ceil(parameters / bucket))

    def exposed(kind: str, element_bytes: int, beside: float, parts: int) -> float:
        collective = Collective(kind, element_bytes * parameters)
        return clock.in_parts(clock.hardware.collective_seconds(collective, group), parts, beside)

    reduction = clock.hardware.collective_seconds(_tied_gradient(config, stages), embeddings)
    gather, shards = 0.0, 1
    if options.use_torch_fsdp2:
        shards = group.size
    else:
        sent = 2 if options.grad_reduce_in_bf16 else FLOAT32
        kind = REDUCE_SCATTER if options.use_distributed_optimizer else ALL_REDUCE
        reduction += exposed(kind, sent, backward, buckets)
        if options.use_distributed_optimizer:
            shards = group.size
            parts = buckets if options.overlap_param_gather else 1
            gather = exposed(ALL_GATHER, element, forward, parts)
    written = element if element < FLOAT32 else 0
    update = clock.hardware.memory_seconds((ADAM_BYTES + written) * parameters / shards)
    if config.optimizer.optimizer == "muon":
        update += _muon(run, stages, shards)
    return UpdateTime(reduction, update, gather)


def _tied_gradient(config: RunConfig, stages: Sequence[Stage]) -> Collective:
    """Returns the all-reduce of a tied embedding's gradient, empty on ranks without one."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    tied = not model.untie_embeddings_and_output_weights and stages[0].count > 1
    holds = any(stage.is_first or stage.is_last for stage in stages)
    rows = config.tokenizer.padded_vocab_size(tp_size) // tp_size
    return Collective(ALL_REDUCE, FLOAT32 * rows * model.hidden_size * (tied and holds))


def _muon(run: TimedRun, stages: Sequence[Stage], shards: int) -> float:
    """Returns the seconds that Muon adds to the update of a rank.

    Ranks that share out the parameters gather every matrix and share out the work, and in the mode
    "duplicated" each tensor-parallel rank works on whole matrices. The three parts of linear_qkv
    count as one.
    """
    clock, options = run.clock, run.config.optimizer
    element = FLOAT32 if options.muon_fp32_matmul_prec == "high" else 2
    t = clock.tp.size if options.muon_tp_mode == "duplicated" else 1
    seconds, elements, number = 0.0, 0, 0
    for stage in stages:
        sizes = Sizes.of(run.config, device=clock.hardware.device, stage=stage)
        for layer, count in describe_kinds(run.config.model, sizes, stage.num_layers):
            for operation in layer.operations:
                for parameter in operation.parameters:
                    if len(parameter.shape) == 2:
                        rows, columns = parameter.shape
                        if operation.name in ROW_PARALLEL:
                            columns *= t
                        else:
                            rows *= t
                        seconds += count * _newton_schulz_step(clock, rows, columns, element)
                        elements += count * rows * columns
                        number += count
    # A rank also works on the matrices in which its share begins and ends.
    share = min(1.0, 1 / shards + 1 / max(number, 1))
    gathers = (
        (FLOAT32 * elements * (shards > 1), run.data_parallel),
        (element * elements * (t > 1), clock.tp),
    )
    return options.muon_num_ns_steps * seconds * share + sum(
        clock.hardware.collective_seconds(Collective(ALL_GATHER, num_bytes), group)
        for num_bytes, group in gathers
        if num_bytes
    )


def _newton_schulz_step(clock: Clock, rows: int, columns: int, element_bytes: int) -> float:
    """Returns the seconds of X X^T, its square, and the product with X (optim/muon_update.py)."""
    short, long = sorted((rows, columns))
    products = ((short, short, long), (short, short, short), (short, long, short))
    return sum(
        clock.hardware.matmul_seconds(Matmul("", *shape), element_bytes) for shape in products
    )
