"""The time of one micro-batch's forward and backward through one stage of the pipeline.

    forward     the operations of the stage
    backward    the operations backward, what the recompute plan runs again, and the addition of the
                micro-batch's gradients to their sum

Copies to host memory and the gathers of FSDP2 run beside both. A search asks for the same layers
again and again, so their times are cached. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_lite.config.optimizer_settings import FLOAT32, FORMATS
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from megatron_lite.description.sizes import Sizes, alike_layers, first_alike
from megatron_lite.description.transformer_layer import describe_kinds, describe_layers
from megatron_lite.memory.predict.kept_tensors import (
    activation_terms,
    replayed_calls,
    replayed_operations,
)
from megatron_lite.memory.predict.states import stage_parameters
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment

from .hardware import Group
from .work import (
    REPLAYED_MATMULS,
    REPLAYED_MEMORY_BOUND,
    TENSOR_PARALLEL,
    Clock,
    Work,
    seconds_of,
    sum_of,
)

HOST_COPIES = "copies to and from the host"
FSDP = "gathers and reductions of FSDP2"
GRADIENT_SUMS = "sums of gradients"
HOST_PACE = "waits for the host's launches"
REGION_START = 0.35  # of the host's time to start the replay of a unit
CACHED = 4096


class StageTime(NamedTuple):
    """The work of one micro-batch in one stage."""

    forward: Work
    backward: Work

    def longer(self, replay: float) -> float:
        """Returns the least seconds of the backward with so many seconds of replays, beside which
        the host catches up and gathers run."""
        terms = self.backward.terms
        hidden = sum(terms.get(term, 0.0) for term in (FSDP, HOST_PACE))
        return self.backward.seconds + max(0.0, replay - hidden)

    @classmethod
    def of(cls, parts: Iterable[tuple[tuple[Work, Work], float]]) -> StageTime:
        """Returns the sum of several, each of which happens so many times."""
        found = [*parts]
        return cls(*(sum_of((one[half], times) for one, times in found) for half in (0, 1)))


class TimedRun(NamedTuple):
    """A run, and what decides the time of its operations.

    data_parallel: the ranks that share out or replicate the states.
    """

    config: RunConfig
    clock: Clock
    data_parallel: Group

    def shares(self, ranks: Group) -> tuple[Group, Group]:
        """Returns which ranks share out states, and which hold the same share."""
        size, stride = ranks
        shards = self.config.shards(size)
        return Group(shards, stride), Group(size // shards, shards * stride)


def stage_time(run: TimedRun, stage: Stage, plan: RecomputePlan) -> StageTime:
    """Returns the time of one micro-batch in a stage.

    The host runs ahead of the device, so a pass takes about the longer of the two times. It takes
    more where both are near, since each has parts in which it waits for the other. On a CPU both
    are the same cores.
    """
    clock = run.clock
    sizes = Sizes.of(run.config, clock.hardware.device, stage)
    inner = layer_sizes(sizes)
    ends = _ends(replace(sizes, first_layer=0), clock)
    once = StageTime.of([(ends, 1.0), (layers_time(inner, stage.num_layers, clock), 1.0)])
    skip, budget = plan.skip_tail, run.config.recompute.activation_memory_budget
    backward = [(once.backward, 1.0)] + [
        (replay_time(one, skip, clock, inner), 1.0)
        for one in plan.segments
        if one.is_whole or one.regions
    ]
    if budget is not None and stage.num_layers:  # an assumption: the compiler runs the rest again
        whole = Segment(first_layer=0, num_layers=stage.num_layers, unit=True)
        backward.append((replay_time(whole, skip, clock, inner), 1.0 - budget))
    parameters, hardware = stage_parameters(run.config, stage), clock.hardware
    seconds = hardware.memory_seconds(_summed_bytes(run) * parameters) + hardware.kernel_s
    backward.append((clock.work(GRADIENT_SUMS, seconds, 1.0), 1.0))
    terms = activation_terms(plan, sizes) if plan.uses_stores else []
    moved = [one for one in terms if one.on_host]
    copied = sum(one.num_bytes for one in moved) / hardware.host_bandwidth
    # Backward begins with the last layer, and nothing runs beside the copies of that one.
    copies = math.inf, len({one.layer for one in moved}) or 1
    # Each layer's weights are gathered while the layer before it computes, which hides a share of
    # that: no run has yet measured how large it is.
    units = max(stage.num_layers, 1)
    halves = []
    for work, parts, sent in zip(
        (once.forward, sum_of(backward)), copies, _fsdp(run, parameters, units), strict=True
    ):
        delay = passed(work, clock) - work.seconds  # of the device by the host
        transfers = {
            HOST_COPIES: clock.exposed(copied, work.seconds, parts, copies=True),
            FSDP: clock.exposed(sent, work.seconds, units),
        }
        halves.append(Work({**work.terms, HOST_PACE: delay, **transfers}, work.host))
    return StageTime(*halves)


def passed(work: Work, clock: Clock) -> float:
    """Returns the seconds of a pass with its waits for the host. See `stage_time`."""
    if clock.hardware.shares_cores:
        return work.seconds + work.host
    return math.sqrt(math.hypot(work.seconds**2, work.host**2))


def layer_sizes(sizes: Sizes) -> Sizes:
    """Returns the sizes that decide the time of layers: without what only the ends read."""
    return replace(
        sizes, has_embedding=False, has_head=False, loss_chunk_size=None, loss_in_one_pass=False
    )


@lru_cache(CACHED)
def _ends(sizes: Sizes, clock: Clock) -> StageTime:
    """Returns the work of the embedding and of the head, as far as the stage holds them."""
    operations = embedding_operations(sizes) + head_operations(sizes)
    return StageTime.of((clock.passes(one), 1.0) for one in operations)


@lru_cache(CACHED)
def layers_time(sizes: Sizes, num_layers: int, clock: Clock) -> StageTime:
    """Returns the work of the layers from the first one of the sizes on."""
    return StageTime.of(
        (clock.passes(one), count)
        for layer, count in describe_kinds(sizes, num_layers)
        for one in layer.operations
    )


def replay_time(segment: Segment, skip_tail: bool, clock: Clock, sizes: Sizes) -> Work:
    """Returns the work that backward does again of a segment."""
    # alike layers are replayed in the same time wherever they lie
    first = sizes.first_layer + segment.first_layer
    alike = alike_layers(sizes.model, sizes.seq_length, sizes.cp_comm_type)
    sizes = replace(sizes, first_layer=first_alike(alike, first, segment.num_layers))
    return _replay(replace(segment, first_layer=0), skip_tail, clock, sizes)


@lru_cache(CACHED)
def _replay(segment: Segment, skip_tail: bool, clock: Clock, sizes: Sizes) -> Work:
    layers = describe_layers(sizes, (segment.tiles,) * segment.num_layers)
    works = [
        clock.pointwise(one, REPLAYED_MEMORY_BOUND, backward=False)
        for one in replayed_operations(layers, segment, skip_tail)
    ]
    for operation, call in replayed_calls(layers, segment, skip_tail):
        works += clock.call(operation, call, REPLAYED_MATMULS)
    starts = segment.num_layers * len(segment.regions) * REGION_START or float(segment.is_whole)
    works.append(Work({REPLAYED_MEMORY_BOUND: 0.0}, starts * clock.mode.replay_s))
    if segment.split:
        # The gather of a unit's input runs beside the backward of the unit after it.
        gather = Collective(ALL_GATHER, sizes.whole)
        seconds = clock.hardware.collective_seconds(gather, clock.tp)
        exposed = clock.exposed(seconds, seconds_of(works), copies=True)
        works.append(Work({TENSOR_PARALLEL: exposed}, 0.0))
    return sum_of((work, 1.0) for work in works)


def _summed_bytes(run: TimedRun) -> int:
    """Returns the bytes that are moved to add the gradient of a parameter to its sum.

    The sum is read and written, and the gradient is read. A matmul that adds by itself writes the
    sum where it would have written the gradient. FSDP2 casts gradients to float32 to send them.
    """
    element, config = run.clock.element_bytes, run.config
    if config.data_parallel.use_torch_fsdp2:
        return element + FLOAT32
    total = FORMATS[config.optimizer.main_grads_dtype]
    # torch's addmm adds a product of the sum's own format on every device
    fused = run.clock.hardware.fused_accumulation or element == total
    if fused and config.training.gradient_accumulation_fusion and not config.compiles_layers:
        return 2 * total - element
    return 2 * total + element


def _fsdp(run: TimedRun, parameters: int, units: int) -> tuple[float, float]:
    """Returns the seconds of the gathers of all weights in forward, and in backward those of
    gathers and of one reduction of all gradients, with its share of what a step adds up across
    instances."""
    options, element = run.config.data_parallel, run.clock.element_bytes
    shares, replicas = run.shares(run.data_parallel)
    if not options.use_torch_fsdp2 or shares.size == 1:
        return 0.0, 0.0

    def seconds(kind: str, element_bytes: int) -> float:
        one = Collective(kind, element_bytes * parameters // units)
        hardware = run.clock.hardware
        # FSDP2 copies the whole tensor into or out of the buffer of the collective.
        copied = hardware.memory_seconds(2 * one.num_bytes)
        return units * (copied + hardware.collective_seconds(one, shares))

    sent = element if options.grad_reduce_in_bf16 else FLOAT32
    share = Collective(ALL_REDUCE, sent * parameters // units // shares.size)
    across = units * run.clock.hardware.collective_seconds(share, replicas)
    if not options.grad_reduce_in_bf16:  # once in a step
        dp_size = run.data_parallel.size // run.config.parallel.context_parallel_size
        across /= run.config.training.num_microbatches(dp_size)
    gathered = seconds(ALL_GATHER, element)
    again = gathered * options.torch_fsdp2_reshard_after_forward
    return gathered, seconds(REDUCE_SCATTER, sent) + across + again
