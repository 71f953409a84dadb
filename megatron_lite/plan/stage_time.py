"""The time of one micro-batch's forward and backward through one stage of the pipeline.

    forward     the operations of the stage
    backward    the operations backward, what the recompute plan runs again, and the addition of the
                micro-batch's gradients to their sum

Copies to host memory and the gathers of FSDP2 run beside both. Standard library only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
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
from megatron_lite.description.transformer_layer import describe_kinds, describe_layers
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.memory.predict.parameter_counts import parameter_count
from megatron_lite.memory.predict.replays import replayed_bytes, replayed_calls
from megatron_lite.plan.hardware import Group
from megatron_lite.plan.operation_time import (
    REPLAYED_MATMULS,
    REPLAYED_MEMORY_BOUND,
    TENSOR_PARALLEL,
    Clock,
    Memo,
    Seconds,
)
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

HOST_COPIES = "copies to and from the host"
FSDP = "gathers and reductions of FSDP2"
GRADIENT_SUMS = "sums of gradients"
FLOAT32 = 4
# The time in which Python starts one replay: 0.13 ms were seen, and 0.3 ms where generators are set
# back. On a GPU it runs beside the kernels.
REPLAY_S = 2e-4


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
    if not _layers_differ(config):
        sizes = replace(sizes, first_layer=0)
    group = data_parallel if config.data_parallel.use_torch_fsdp2 else None
    alike = (sizes, stage.num_layers, plan, config.data_parallel, group, fused_accumulation)
    return clock.memo.once(
        ("stage", *alike),
        lambda: _stage_time(config, stage, plan, clock, sizes, data_parallel, fused_accumulation),
    )


def _stage_time(
    config: RunConfig,
    stage: Stage,
    plan: RecomputePlan,
    clock: Clock,
    sizes: Sizes,
    data_parallel: Group,
    fused_accumulation: bool,
) -> StageTime:
    inner, differ = layer_sizes(config, sizes), _layers_differ(config)
    forward, backward = clock.memo.once(
        ("ends", replace(sizes, first_layer=0)),
        lambda: _operations_time(
            [
                *(embedding_operations(config.model, sizes) if sizes.has_embedding else ()),
                *(head_operations(config.model, sizes) if sizes.has_head else ()),
            ],
            clock,
        ),
    )
    described = stage.num_layers if differ else 1
    for one, count in clock.memo.once(
        ("layers", inner, described),
        lambda: [
            (_operations_time(layer.operations, clock), number)
            for layer, number in describe_kinds(config.model, inner, described)
        ],
    ):
        times = count if differ else stage.num_layers
        forward, backward = forward + one.forward.times(times), backward + one.backward.times(times)
    for segment in plan.segments:
        if not (segment.unit or segment.regions or segment.ops):
            continue
        backward += replay_time(config, segment, plan, clock, inner)
    parameters = stage_parameters(config, stage, clock.memo)
    backward += _gradient_sums(config, parameters, clock, fused_accumulation)
    copies = _host_copies(config, plan, clock, sizes, forward.total(), backward.total())
    gathers = _fsdp(
        config, stage, parameters, clock, data_parallel, forward.total(), backward.total()
    )
    return StageTime(
        forward + copies.forward + gathers.forward, backward + copies.backward + gathers.backward
    )


def layer_sizes(config: RunConfig, sizes: Sizes) -> Sizes:
    """Returns the sizes that decide the time of layers: without what only the ends of the model
    read, and without the number of the first layer if all layers are alike."""
    return replace(
        sizes,
        has_embedding=False,
        has_head=False,
        loss_chunk_size=None,
        loss_in_one_pass=False,
        first_layer=sizes.first_layer if _layers_differ(config) else 0,
    )


def _layers_differ(config: RunConfig) -> bool:
    return config.model.window_size is not None or config.model.no_rope_freq is not None


def _operations_time(operations: Iterable[Operation], clock: Clock) -> StageTime:
    forward, backward = Seconds(), Seconds()
    for operation in operations:
        forward, backward = forward + clock.forward(operation), backward + clock.backward(operation)
    return StageTime(forward, backward)


def replay_time(
    config: RunConfig, segment: Segment, plan: RecomputePlan, clock: Clock, sizes: Sizes
) -> Seconds:
    """Returns the time of what backward runs again of a segment."""
    # Alike layers are replayed in the same time wherever they lie.
    place = segment.first_layer if _layers_differ(config) else 0
    alike = (place, segment.num_layers, segment.action, segment.split, plan.skip_tail)
    return clock.memo.once(
        ("replay", sizes, *alike),
        lambda: _replay(config, replace(segment, first_layer=place), plan, clock, sizes),
    )


def _replay(
    config: RunConfig, segment: Segment, plan: RecomputePlan, clock: Clock, sizes: Sizes
) -> Seconds:
    stop = segment.first_layer + segment.num_layers
    layers = describe_layers(config.model, sizes, stop)[segment.first_layer :]
    seconds = clock.memory_bound(
        REPLAYED_MEMORY_BOUND, replayed_bytes(layers, segment, skip_tail=plan.skip_tail)
    )
    for _, operation, call in replayed_calls(layers, segment, skip_tail=plan.skip_tail):
        seconds += clock.call(operation, call, REPLAYED_MATMULS)
    if clock.hardware.device == "cpu":
        seconds[REPLAYED_MEMORY_BOUND] += REPLAY_S * _passages(layers, segment)
    if segment.split:
        # The gather of a unit's input runs beside the backward of the unit after it.
        gather = hidden_collective(ALL_GATHER, config.model, sizes)
        seconds[TENSOR_PARALLEL] += clock.exposed(
            clock.hardware.collective_seconds(gather, clock.tp), seconds.total()
        )
    return seconds


def _passages(layers: Sequence[LayerDescription], segment: Segment) -> int:
    """Returns how many replays a segment runs: one of a unit, one of each passage of a region."""
    if segment.unit or segment.ops:
        return 1
    return sum(
        entry.region in segment.regions
        for layer in layers
        for operation in layer.operations
        for entry in operation.enters
    )


def _gradient_sums(config: RunConfig, parameters: int, clock: Clock, fused: bool) -> Seconds:
    """Returns the time to add a micro-batch's gradients to their float32 sums.

    The sum is read and written, and the gradient is read. A fused kernel writes the sum where the
    matmul would have written the gradient. FSDP2 casts gradients to float32 to send them.
    """
    element = clock.element_bytes
    if config.data_parallel.use_torch_fsdp2:
        moved = element + FLOAT32
    else:
        moved = 2 * FLOAT32 - element if fused else 2 * FLOAT32 + element
    return clock.memory_bound(GRADIENT_SUMS, moved * parameters)


def stage_parameters(config: RunConfig, stage: Stage, memo: Memo) -> int:
    """Returns how many parameters one tensor-parallel rank of a stage holds."""
    tp_size = config.parallel.tensor_model_parallel_size
    key: Hashable = ("parameters", tp_size, stage.is_first, stage.is_last, stage.num_layers)
    return memo.once(
        key,
        lambda: parameter_count(
            config.model, config.tokenizer.padded_vocab_size(tp_size), tp_size=tp_size, stage=stage
        ),
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
    if not any(segment.on_host for segment in plan.segments):
        return StageTime(Seconds(), Seconds())
    layers: dict[int, float] = {}
    for term in activation_terms(config.model, plan, sizes):
        if term.on_host and term.layer is not None:
            layers[term.layer] = layers.get(term.layer, 0.0) + term.num_bytes
    bandwidth = clock.hardware.host_bandwidth
    total = sum(layers.values()) / bandwidth
    # Backward begins with the last layer, and nothing runs beside the copies of that one.
    first = layers[max(layers)] / bandwidth if layers else 0.0
    if clock.hardware.shares_cores:
        return StageTime(Seconds({HOST_COPIES: total}), Seconds({HOST_COPIES: total}))
    return StageTime(
        Seconds({HOST_COPIES: clock.exposed(total, forward)}),
        Seconds({HOST_COPIES: first + clock.exposed(total - first, backward)}),
    )


def _fsdp(
    config: RunConfig,
    stage: Stage,
    parameters: int,
    clock: Clock,
    group: Group,
    forward: float,
    backward: float,
) -> StageTime:
    """Returns by how much the collectives of FSDP2 delay forward and backward.

    Each layer is gathered while the layer before it computes. Nothing runs beside the first gather
    and the last reduction.
    """
    if not config.data_parallel.use_torch_fsdp2 or group.size == 1:
        return StageTime(Seconds(), Seconds())
    units = max(stage.num_layers, 1)
    gather = clock.hardware.collective_seconds(
        Collective(ALL_GATHER, round(parameters / units * clock.element_bytes)), group
    )
    sent = clock.element_bytes if config.data_parallel.grad_reduce_in_bf16 else FLOAT32
    reduction = clock.hardware.collective_seconds(
        Collective(REDUCE_SCATTER, round(parameters / units * sent)), group
    )
    again = gather if config.data_parallel.torch_fsdp2_reshard_after_forward else 0.0
    rest = units - 1
    return StageTime(
        Seconds({FSDP: gather + clock.exposed(rest * gather, forward)}),
        Seconds({FSDP: again + reduction + clock.exposed(rest * (again + reduction), backward)}),
    )
