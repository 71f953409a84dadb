"""Derives the recompute plan of one pipeline stage from the recompute flags. Standard library only.

Policies count layers within a stage. Stages are numbered in the order of the model, and each
virtual stage is a stage of its own, as in Megatron.
"""

from dataclasses import replace
from functools import lru_cache

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage

from .recompute_plan import RecomputePlan, keep_everything, segments


@lru_cache(1024)  # a search asks for the same stages again and again
def plan_stage(config: RecomputeConfig, num_layers: int, stage: int = 0) -> RecomputePlan:
    """Returns the plan of a stage of `num_layers` layers.

    uniform: all layers are in units of --recompute-num-layers layers. The last unit is shorter if
        that number does not divide the layers of the stage.
    block: each of the first --recompute-num-layers layers of the stage is a unit of one layer. The
        other layers keep everything.
    selective: backward runs the named regions of every layer again. A named region inside another
        named region is dropped from the plan, because it runs again with the outer one.
    """
    return RecomputePlan(
        tuple(segments(config.policy, num_layers, stage)),
        verify=config.recompute_verify,
        skip_tail=config.recompute_tail_skip and not config.recompute_verify,
        contiguous=config.contiguous_saved_activations,
    )


def stage_plan(config: RunConfig, stage: Stage, keeps_all: bool = False) -> RecomputePlan:
    """Returns the plan of a micro-batch on a stage. keeps_all: whether it keeps everything."""
    if keeps_all:
        return keep_everything(stage.num_layers)
    return plan_stage(config.recompute, stage.num_layers, stage.number)


def plan_model(config: RunConfig) -> RecomputePlan:
    """Returns the plans of all stages joined into one, with layers counted over the whole model.

    It covers what all ranks of a pipeline recompute together.
    """
    whole = []
    for stage in config.stages():
        plan = stage_plan(config, stage)
        whole += [
            replace(segment, first_layer=stage.first_layer + segment.first_layer)
            for segment in plan.segments
        ]
    return replace(plan, segments=tuple(whole))
