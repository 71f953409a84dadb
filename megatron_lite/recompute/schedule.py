"""From the recompute flags to the plan of one pipeline stage. Standard library only."""

from __future__ import annotations

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.recompute.plan import RecomputePlan, Segment, Store, keep_everything


def plan_stage(config: RecomputeConfig, num_layers: int) -> RecomputePlan:
    """The plan of a stage of `num_layers` layers.

    uniform: units of --recompute-num-layers layers, the last one shorter where they do not divide the stage.
    block: the first --recompute-num-layers layers of the stage are units of one; the others keep everything.
    selective: the named regions of every layer.
    """
    if config.recompute_granularity is None:
        return keep_everything(num_layers)
    if config.recompute_granularity == "selective":
        regions = frozenset(config.recompute_modules)
        return RecomputePlan(tuple(Segment(first_layer=layer, regions=regions) for layer in range(num_layers)))
    count = config.recompute_num_layers
    assert count is not None
    store: Store = "split" if config.distribute_saved_activations else "device"
    if config.recompute_method == "block":
        return RecomputePlan(tuple(Segment(first_layer=layer, unit=layer < count, store=store if layer < count else "device")
                                   for layer in range(num_layers)))
    return RecomputePlan(tuple(Segment(first_layer=first, num_layers=min(count, num_layers - first), unit=True, store=store)
                               for first in range(0, num_layers, count)))
