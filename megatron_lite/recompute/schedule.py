"""From the recompute flags to the plan of one pipeline stage. Standard library only.

Policies count layers within a stage, and stages in the order of the model: each virtual stage is one of its own, as in Megatron.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

from megatron_lite.config.policy import Action, Layers, Policy, Rule
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import stages
from megatron_lite.recompute.plan import ACTIVATION, MLP_REGION, RecomputePlan, Segment, Store

KEEP = Rule(layers=(Layers(),), action=Action())


def plan_stage(config: RecomputeConfig, num_layers: int, stage: int = 0) -> RecomputePlan:
    """The plan of a stage of `num_layers` layers.

    uniform: units of --recompute-num-layers layers, the last one shorter where they do not divide the stage.
    block: the first --recompute-num-layers layers of the stage are units of one; the others keep everything.
    selective: the named regions of every layer. activation lies inside mlp, which rebuilds it anyway.
    """
    return RecomputePlan(tuple(segments(config.policy, num_layers, stage)), verify=config.recompute_verify,
                         skip_tail=config.recompute_tail_skip and not config.recompute_verify,
                         contiguous=config.contiguous_saved_activations)


def plan_model(config: RunConfig) -> RecomputePlan:
    """The plans of all stages, one behind the other: what all ranks of a pipeline recompute together."""
    whole: list[Segment] = []
    for stage in stages(config.parallel, config.model.num_layers):
        plan = plan_stage(config.recompute, stage.num_layers, stage.number)
        whole += [replace(segment, first_layer=stage.first_layer + segment.first_layer) for segment in plan.segments]
    return replace(plan, segments=tuple(whole))


def segments(policy: Policy, num_layers: int, stage: int = 0) -> Iterator[Segment]:
    """Every layer once, in order. Which layer does what follows from its number alone."""
    decided = [(layer, policy.rule_of(layer, stage) or KEEP) for layer in range(num_layers)]
    for rule, run in itertools.groupby(decided, key=lambda pair: pair[1]):
        yield from _treated(rule, [layer for layer, _ in run])


def _treated(rule: Rule, layers: list[int]) -> Iterable[Segment]:
    action, store = rule.action, cast(Store, rule.store)
    if action.unit:
        return (Segment(first_layer=first, num_layers=min(action.unit, layers[-1] + 1 - first), unit=True, store=store)
                for first in layers[:: action.unit])
    regions = frozenset(action.regions)
    if MLP_REGION in regions:
        regions -= {ACTIVATION}
    return (Segment(first_layer=layer, regions=regions, ops=action.ops, store=store) for layer in layers)
