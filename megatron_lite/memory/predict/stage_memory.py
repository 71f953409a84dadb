"""The changes that one micro-batch makes to the memory of a stage. Standard library only."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import REGIONS
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.sizes import Sizes, residual_bytes
from megatron_lite.memory.predict.gathered_weights import GatheredWeights
from megatron_lite.memory.predict.kept_tensors import host_bytes
from megatron_lite.memory.predict.stage_course import StageCourse, stage_course
from megatron_lite.recompute.recompute_plan import RecomputePlan, keep_everything
from megatron_lite.recompute.schedule import plan_stage

SLOT_ALIGNMENT = 512  # bytes, as in recompute/arena.py


class PlacedRun(NamedTuple):
    """A run on a device.

    shards: the ranks over which FSDP2 shards everything; 1 without it.
    accumulates: whether a step has several micro-batches.
    """

    config: RunConfig
    device: str
    shards: int
    accumulates: bool


class StageMemory(NamedTuple):
    """The changes that a micro-batch makes to a stage's memory.

    on_host: the bytes that it keeps in host memory. arena: the bytes that the arena on the device
    has for it. tables: the bytes of the rotary tables. generators: those of the states of the
    random-number streams that a CPU's streams put aside. gathered: the bytes of weights that FSDP2
    gathers once for several micro-batches.
    """

    course: StageCourse
    on_host: int
    arena: int
    tables: int
    generators: int
    gathered: int


def _arena_bytes(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> int:
    """Returns the bytes of the arena on the device for the inputs of one micro-batch's units."""
    whole = residual_bytes(model, sizes)
    slots = (
        whole // sizes.tp_size if one.split else whole
        for one in plan.segments
        if one.unit and not one.on_host
    )
    return sum(-(-slot // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for slot in slots)


def stage_memory(run: PlacedRun, stage: Stage, keeps_all: bool) -> StageMemory:
    """Returns the changes of a micro-batch on a stage.

    keeps_all: whether the micro-batch keeps everything, whatever the policy says.
    """
    config = run.config
    sizes = Sizes.in_training(config, device=run.device, stage=stage, accumulates=run.accumulates)
    # Stages that no setting tells apart share one entry of the cache.
    by_stage = any(rule.stage is not None for rule in config.recompute.policy.rules)
    if config.model.window_size is None and config.model.no_rope_freq is None:
        sizes = replace(sizes, first_layer=0)
    gathers = None
    if run.shards > 1:
        # FSDP2 has no sum of whole gradients: they live until their unit is reduced.
        sizes = replace(sizes, sums_gradients=False, adds_by_itself=False)
        size = config.parallel.pipeline_model_parallel_size
        gathers = GatheredWeights.of(
            config,
            sizes,
            stage.num_layers,
            dp_cp_size=run.shards,
            accumulates=run.accumulates,
            several=size > 1 and (stage.count > size or not stage.is_last),
        )
    return _memory_of(
        config.model,
        sizes,
        config.recompute,
        stage.num_layers,
        stage.number if by_stage else 0,
        keeps_all,
        gathers,
    )


@lru_cache(maxsize=1024)
def _memory_of(
    model: ModelConfig,
    sizes: Sizes,
    recompute: RecomputeConfig,
    num_layers: int,
    number: int,
    keeps_all: bool,
    gathers: GatheredWeights | None,
) -> StageMemory:
    plan = keep_everything(num_layers) if keeps_all else plan_stage(recompute, num_layers, number)
    layers = range(sizes.first_layer, sizes.first_layer + num_layers)
    rotates = any(model.layer_rotates(layer) for layer in layers)
    tables = 2 * sizes.own_seq_length * model.rotary_dim * sizes.element_bytes if rotates else 0
    moves = any(segment.on_host for segment in plan.segments)
    return StageMemory(
        stage_course(model, plan, sizes, gathers),
        host_bytes(model, plan, sizes) if moves else 0,
        _arena_bytes(model, plan, sizes) if plan.contiguous else 0,
        tables,
        _generator_bytes(model, plan, sizes),
        0 if gathers is None else gathers.staying,
    )


def _generator_bytes(model: ModelConfig, plan: RecomputePlan, sizes: Sizes) -> int:
    """Returns the bytes of the generators' states that the streams hold from step to step.

    With dropout they are those of both streams. Otherwise a replay leaves the state of one behind.
    """
    if sizes.device != "cpu":
        return 0
    if model.hidden_dropout or model.attention_dropout:
        return sizes.rng_state_bytes
    replays = any(
        one.unit or one.ops or any(REGIONS[name].draws for name in one.regions)
        for one in plan.segments
    )
    return sizes.stream_state_bytes if replays else 0
