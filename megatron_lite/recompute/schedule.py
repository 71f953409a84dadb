"""From the recompute flags to the plan of one pipeline stage. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.recompute.plan import ACTIVATION, MLP_REGION, RecomputePlan, Segment, Store, keep_everything


def plan_stage(config: RecomputeConfig, num_layers: int) -> RecomputePlan:
    """The plan of a stage of `num_layers` layers.

    uniform: units of --recompute-num-layers layers, the last one shorter where they do not divide the stage.
    block: the first --recompute-num-layers layers of the stage are units of one; the others keep everything.
    selective: the named regions of every layer. activation lies inside mlp, which rebuilds it anyway.
    """
    return RecomputePlan(tuple(_segments(config, num_layers)), verify=config.recompute_verify,
                         skip_tail=config.recompute_tail_skip and not config.recompute_verify)


def _segments(config: RecomputeConfig, num_layers: int) -> Iterable[Segment]:
    if config.recompute_granularity is None:
        return keep_everything(num_layers).segments
    if config.recompute_granularity == "selective":
        regions = frozenset(config.recompute_modules)
        if MLP_REGION in regions:
            regions -= {ACTIVATION}
        return (Segment(first_layer=layer, regions=regions) for layer in range(num_layers))
    count = config.recompute_num_layers
    assert count is not None
    store: Store = "split" if config.distribute_saved_activations else "device"
    if config.recompute_method == "block":
        return (Segment(first_layer=layer, unit=layer < count, store=store if layer < count else "device")
                for layer in range(num_layers))
    return (Segment(first_layer=first, num_layers=min(count, num_layers - first), unit=True, store=store)
            for first in range(0, num_layers, count))
