"""The time of one micro-batch's forward and backward through one stage of the pipeline.

    forward     the operations of the stage
    backward    the operations backward, what the recompute plan runs again, and the addition of the
                micro-batch's gradients to their sum

Copies to host memory and the gathers of FSDP2 run beside both. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.linears import hidden_collective
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Collective,
    LayerDescription,
    Operation,
)
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.memory.predict.parameters import parameter_count
from megatron_lite.memory.predict.replays import replayed_bytes, replayed_calls
from megatron_lite.plan.hardware import Group
from megatron_lite.plan.operation_time import (
    REPLAYED_MATMULS,
    REPLAYED_MEMORY_BOUND,
    TENSOR_PARALLEL,
    Clock,
    Seconds,
)
from megatron_lite.recompute.plan import RecomputePlan, Segment

HOST_COPIES = "copies to and from the host"
FSDP = "gathers and reductions of FSDP2"
GRADIENT_SUMS = "sums of gradients"
FLOAT32 = 4


class StageTime(NamedTuple):
    """The seconds of one micro-batch in one stage, by term."""

    forward: Seconds
    backward: Seconds


def stage_time(
    config: RunConfig,
    stage: Stage,
    plan: RecomputePlan,
    clock: Clock,
    *,
    data_parallel: Group,
    fused_accumulation: bool,
) -> StageTime:
    """Returns the time of one micro-batch in a stage.

    fused_accumulation: whether a kernel adds each weight gradient to its sum as it computes it.
    """
    sizes = Sizes.of(config, device=clock.hardware.device, stage=stage)
    layers = describe_layers(config.model, sizes, stage.num_layers)
    operations = [
        *(embedding_operations(config.model, sizes) if stage.is_first else ()),
        *(operation for layer in layers for operation in layer.operations),
        *(head_operations(config.model, sizes) if stage.is_last else ()),
    ]
    forward, backward = Seconds(), Seconds()
    for operation, times in _repeated(operations):
        for total, one in (
            (forward, clock.forward(operation)),
            (backward, clock.backward(operation)),
        ):
            for term, seconds in one.items():
                total[term] += times * seconds
    for segment in plan.segments:
        own = layers[segment.first_layer : segment.first_layer + segment.num_layers]
        backward += _replay(config, own, segment, plan, clock, sizes)
    backward += _gradient_sums(config, stage, clock, fused_accumulation)
    copies = _host_copies(config, plan, clock, sizes, forward.total(), backward.total())
    gathers = _fsdp(config, stage, clock, data_parallel, forward.total(), backward.total())
    return StageTime(
        forward + copies.forward + gathers.forward, backward + copies.backward + gathers.backward
    )


def _repeated(operations: Iterable[Operation]) -> Iterable[tuple[Operation, int]]:
    """Returns each operation and how often it occurs. Layers that are alike share their
    operations."""
    found: dict[int, tuple[Operation, int]] = {}
    for operation in operations:
        found[id(operation)] = (operation, found.get(id(operation), (operation, 0))[1] + 1)
    return found.values()


def _replay(
    config: RunConfig,
    layers: Sequence[LayerDescription],
    segment: Segment,
    plan: RecomputePlan,
    clock: Clock,
    sizes: Sizes,
) -> Seconds:
    """Returns the time of what backward runs again of a segment."""
    seconds = clock.memory_bound(
        REPLAYED_MEMORY_BOUND, replayed_bytes(layers, segment, skip_tail=plan.skip_tail)
    )
    for _, operation, call in replayed_calls(layers, segment, skip_tail=plan.skip_tail):
        seconds += clock.call(operation, call, REPLAYED_MATMULS)
    if segment.split:
        # The gather of a unit's input runs beside the backward of the unit after it.
        gather = hidden_collective(ALL_GATHER, config.model, sizes)
        seconds[TENSOR_PARALLEL] += clock.exposed(
            clock.hardware.collective_seconds(gather, clock.tp), seconds.total()
        )
    return seconds


def _gradient_sums(config: RunConfig, stage: Stage, clock: Clock, fused: bool) -> Seconds:
    """Returns the time to add a micro-batch's gradients to their float32 sums.

    The sum is read and written, and the gradient is read. A fused kernel writes the sum where the
    matmul would have written the gradient. FSDP2 casts gradients to float32 to send them.
    """
    element = clock.element_bytes
    if config.data_parallel.use_torch_fsdp2:
        moved = element + FLOAT32
    else:
        moved = 2 * FLOAT32 - element if fused else 2 * FLOAT32 + element
    return clock.memory_bound(GRADIENT_SUMS, moved * stage_parameters(config, stage))


def stage_parameters(config: RunConfig, stage: Stage) -> int:
    """Returns how many parameters one tensor-parallel rank of a stage holds."""
    tp_size = config.parallel.tensor_model_parallel_size
    return parameter_count(
        config.model, config.tokenizer.padded_vocab_size(tp_size), tp_size=tp_size, stage=stage
    )


def _host_copies(
    config: RunConfig,
    plan: RecomputePlan,
    clock: Clock,
    sizes: Sizes,
    forward: float,
    backward: float,
) -> StageTime:
    """Returns by how much copies to the host delay forward, and copies back delay backward.

    Backward waits for the copies of the segment that it begins with. On a CPU copies are ordinary
    operations, beside which nothing runs.
    """
    layers: dict[int, float] = {}
    for term in activation_terms(config.model, plan, sizes):
        if term.on_host and term.layer is not None:
            layers[term.layer] = layers.get(term.layer, 0.0) + term.num_bytes
    bandwidth = clock.hardware.host_bandwidth
    total = sum(layers.values()) / bandwidth
    first = layers[max(layers)] / bandwidth if layers else 0.0
    if clock.hardware.shares_cores:
        return StageTime(Seconds({HOST_COPIES: total}), Seconds({HOST_COPIES: total}))
    return StageTime(
        Seconds({HOST_COPIES: clock.exposed(total, forward)}),
        Seconds({HOST_COPIES: first + clock.exposed(total - first, backward)}),
    )


def _fsdp(
    config: RunConfig, stage: Stage, clock: Clock, group: Group, forward: float, backward: float
) -> StageTime:
    """Returns by how much the collectives of FSDP2 delay forward and backward.

    Each layer is gathered while the layer before it computes. Nothing runs beside the first gather
    and the last reduction.
    """
    if not config.data_parallel.use_torch_fsdp2 or group.size == 1:
        return StageTime(Seconds(), Seconds())
    units = max(stage.num_layers, 1)
    parameters = stage_parameters(config, stage) / units
    gather = clock.hardware.collective_seconds(
        Collective(ALL_GATHER, round(parameters * clock.element_bytes)), group
    )
    sent = clock.element_bytes if config.data_parallel.grad_reduce_in_bf16 else FLOAT32
    reduction = clock.hardware.collective_seconds(
        Collective(REDUCE_SCATTER, round(parameters * sent)), group
    )
    again = gather if config.data_parallel.torch_fsdp2_reshard_after_forward else 0.0
    rest = units - 1
    return StageTime(
        Seconds({FSDP: gather + clock.exposed(rest * gather, forward)}),
        Seconds({FSDP: again + reduction + clock.exposed(rest * (again + reduction), backward)}),
    )
