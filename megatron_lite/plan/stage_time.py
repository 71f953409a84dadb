"""The time of one micro-batch's forward and backward through one stage of the pipeline.

    forward     the operations of the stage
    backward    the operations backward, what the recompute plan runs again, and the addition of the
                micro-batch's gradients to their sum

Copies to host memory and the gathers of FSDP2 run beside both. A search asks for the same layers
again and again, so their times are cached. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import ALL_GATHER, REDUCE_SCATTER, Collective, Operation
from megatron_lite.description.shape import Shape
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_kinds, describe_layers
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.memory.predict.replays import replayed_bytes, replayed_calls
from megatron_lite.memory.predict.states import parameter_count
from megatron_lite.plan.hardware import Group
from megatron_lite.plan.operation_time import (
    REPLAYED_MATMULS,
    REPLAYED_MEMORY_BOUND,
    TENSOR_PARALLEL,
    Clock,
    Seconds,
)
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

HOST_COPIES = "copies to and from the host"
FSDP = "gathers and reductions of FSDP2"
GRADIENT_SUMS = "sums of gradients"
FLOAT32 = 4
# The time in which Python starts the replay of a unit or region on a CPU: 0.13 ms were seen, and
# 0.3 ms where generators are set back. On a GPU it runs beside the kernels.
REPLAY_S = 2e-4
CACHED = 4096


class StageTime(NamedTuple):
    """The seconds of one micro-batch in one stage, by term."""

    forward: Seconds
    backward: Seconds


class TimedRun(NamedTuple):
    """A run, and what decides the time of its operations.

    data_parallel: the ranks that share out or replicate the states.
    fused: whether a kernel adds each weight gradient to its sum as it computes it.
    """

    config: RunConfig
    clock: Clock
    data_parallel: Group = Group(1)
    fused: bool = False


def stage_time(run: TimedRun, stage: Stage, plan: RecomputePlan) -> StageTime:
    """Returns the time of one micro-batch in a stage."""
    model, clock = run.config.model, run.clock
    sizes = Sizes.of(run.config, device=clock.hardware.device, stage=stage)
    ends = _ends(model, replace(sizes, first_layer=0), clock)
    inner = layer_sizes(model, sizes)
    layers = _layers(model, inner, stage.num_layers, clock)
    forward, backward = ends.forward + layers.forward, ends.backward + layers.backward
    for segment in plan.segments:
        if segment.unit or segment.regions or segment.ops:
            backward += replay_time(model, segment, plan.skip_tail, clock, inner)
    parameters = stage_parameters(run.config, stage)
    backward += clock.memory_bound(GRADIENT_SUMS, _summed_bytes(run) * parameters)
    computed = forward.total(), backward.total()
    # Backward begins with the last layer, and nothing runs beside the copies of that one.
    copied, parts = _host_copies(run, plan, sizes)
    forward[HOST_COPIES] = clock.exposed(copied, computed[0])
    backward[HOST_COPIES] = clock.in_parts(copied, parts, computed[1])
    # Each layer is gathered while the layer before it computes.
    units = max(stage.num_layers, 1)
    gathered, reduced = _fsdp(run, parameters, units)
    forward[FSDP] = clock.in_parts(gathered, units, computed[0])
    again = gathered * run.config.data_parallel.torch_fsdp2_reshard_after_forward
    backward[FSDP] = clock.in_parts(reduced + again, units, computed[1])
    return StageTime(forward, backward)


def layers_differ(model: ModelConfig) -> bool:
    """Tells whether a layer's number decides what it computes."""
    return model.window_size is not None or model.no_rope_freq is not None


def layer_sizes(model: ModelConfig, sizes: Sizes) -> Sizes:
    """Returns the sizes that decide the time of layers: without what only the ends of the model
    read, and without the number of the first layer if all layers are alike."""
    return replace(
        sizes,
        has_embedding=False,
        has_head=False,
        loss_chunk_size=None,
        loss_in_one_pass=False,
        first_layer=sizes.first_layer if layers_differ(model) else 0,
    )


@lru_cache(CACHED)
def _ends(model: ModelConfig, sizes: Sizes, clock: Clock) -> StageTime:
    """Returns the time of the embedding and of the head, as far as the stage holds them."""
    return _operations_time(
        [
            *(embedding_operations(model, sizes) if sizes.has_embedding else ()),
            *(head_operations(model, sizes) if sizes.has_head else ()),
        ],
        clock,
    )


@lru_cache(CACHED)
def _layers(model: ModelConfig, sizes: Sizes, num_layers: int, clock: Clock) -> StageTime:
    forward, backward = Seconds(), Seconds()
    for layer, count in describe_kinds(model, sizes, num_layers):
        one = _operations_time(layer.operations, clock)
        forward += one.forward.times(count)
        backward += one.backward.times(count)
    return StageTime(forward, backward)


def _operations_time(operations: Iterable[Operation], clock: Clock) -> StageTime:
    forward, backward = Seconds(), Seconds()
    for operation in operations:
        forward, backward = forward + clock.forward(operation), backward + clock.backward(operation)
    return StageTime(forward, backward)


def replay_time(
    model: ModelConfig, segment: Segment, skip_tail: bool, clock: Clock, sizes: Sizes
) -> Seconds:
    """Returns the time of what backward runs again of a segment."""
    if not layers_differ(model):  # alike layers are replayed in the same time wherever they lie
        segment = replace(segment, first_layer=0)
    return _replay(model, segment, skip_tail, clock, sizes)


@lru_cache(CACHED)
def _replay(
    model: ModelConfig, segment: Segment, skip_tail: bool, clock: Clock, sizes: Sizes
) -> Seconds:
    stop = segment.first_layer + segment.num_layers
    layers = describe_layers(model, sizes, stop)[segment.first_layer :]
    moved = replayed_bytes(layers, segment, skip_tail=skip_tail)
    seconds = clock.memory_bound(REPLAYED_MEMORY_BOUND, moved)
    for _, operation, call in replayed_calls(layers, segment, skip_tail=skip_tail):
        seconds += clock.call(operation, call, REPLAYED_MATMULS)
    if clock.hardware.device == "cpu":
        starts = segment.num_layers * len(segment.regions) or 1
        seconds[REPLAYED_MEMORY_BOUND] += REPLAY_S * starts
    if segment.split:
        # The gather of a unit's input runs beside the backward of the unit after it.
        gather = Collective(ALL_GATHER, Shape(model, sizes).whole)
        seconds[TENSOR_PARALLEL] += clock.exposed(
            clock.hardware.collective_seconds(gather, clock.tp), seconds.total()
        )
    return seconds


def _summed_bytes(run: TimedRun) -> int:
    """Returns the bytes that are moved to add the gradient of a parameter to its float32 sum.

    The sum is read and written, and the gradient is read. A fused kernel writes the sum where the
    matmul would have written the gradient. FSDP2 casts gradients to float32 to send them.
    """
    element = run.clock.element_bytes
    if run.config.data_parallel.use_torch_fsdp2:
        return element + FLOAT32
    return 2 * FLOAT32 - element if run.fused else 2 * FLOAT32 + element


def stage_parameters(config: RunConfig, stage: Stage) -> int:
    """Returns how many parameters one tensor-parallel rank of a stage holds."""
    tp_size = config.parallel.tensor_model_parallel_size
    vocab_size = config.tokenizer.padded_vocab_size(tp_size)
    return _parameter_count(config.model, vocab_size, tp_size=tp_size, stage=stage)


_parameter_count = lru_cache(CACHED)(parameter_count)


def _host_copies(run: TimedRun, plan: RecomputePlan, sizes: Sizes) -> tuple[float, int]:
    """Returns the seconds of the copies to host memory, and the number of layers with copies."""
    layers, num_bytes = set(), 0
    if any(segment.on_host for segment in plan.segments):
        for term in activation_terms(run.config.model, plan, sizes):
            if term.on_host and term.layer is not None:
                layers.add(term.layer)
                num_bytes += term.num_bytes
    return num_bytes / run.clock.hardware.host_bandwidth, max(len(layers), 1)


def _fsdp(run: TimedRun, parameters: int, units: int) -> tuple[float, float]:
    """Returns the seconds of one gather of all weights, and of one reduction of all gradients."""
    options, element = run.config.data_parallel, run.clock.element_bytes
    if not options.use_torch_fsdp2:
        return 0.0, 0.0

    def seconds(kind: str, element_bytes: int) -> float:
        one = Collective(kind, element_bytes * parameters // units)
        return units * run.clock.hardware.collective_seconds(one, run.data_parallel)

    sent = element if options.grad_reduce_in_bf16 else FLOAT32
    return seconds(ALL_GATHER, element), seconds(REDUCE_SCATTER, sent)
