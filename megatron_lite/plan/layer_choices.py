"""The actions that a layer can have under a recompute policy, with the price of each.

Bytes come from memory/predict/, for a stage of one layer; seconds come from the time model.
Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.policy import LayerAction
from megatron_lite.config.regions import ACTIVATION, MLP_REGION, POINTWISE, REGIONS, nested
from megatron_lite.config.run import RunConfig
from megatron_lite.description.shape import Shape
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.plan.policies import KEEP, LayerChoice
from megatron_lite.plan.stage_time import layer_sizes, replay_time
from megatron_lite.plan.work import Clock
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment, Store

OF_DENSE = (MLP_REGION, ACTIVATION)  # the regions that only a dense MLP has


def layer_choices(config: RunConfig, clock: Clock, *, host: bool) -> tuple[LayerChoice, ...]:
    """Returns the choices of a layer that can be the best of some mix.

    A choice is left out if another one keeps no more, rebuilds no more and is no slower. If layers
    differ (windows, rotary embeddings), the first layer stands for all.
    host: whether kept tensors may go to host memory.
    """
    sizes = layer_sizes(config.model, Sizes.of(config, device=clock.hardware.device))
    recompute = config.recompute
    host = host and config.training.cuda_graph_impl == "none"  # a graph cannot wait for copies
    skip_tail = recompute.recompute_tail_skip and not recompute.recompute_verify
    return _useful_choices(config.model, sizes, clock, skip_tail, host)


@lru_cache(1024)
def _useful_choices(
    model: ModelConfig, sizes: Sizes, clock: Clock, skip_tail: bool, host: bool
) -> tuple[LayerChoice, ...]:
    on_device = sizes.device != "cpu"
    stores: list[Store] = ["device", "host"] if host and on_device else ["device"]
    priced = [
        _priced(model, sizes, clock, skip_tail, action, store)
        for action in _actions(model, sizes)
        for store in [*stores, *(_split_stores(sizes, host) if action.unit else ())]
    ]
    found: list[LayerChoice] = []
    # The cheapest first, so that of two equal choices the simpler one stays.
    for one in sorted(priced, key=lambda choice: choice.price):
        if not any(_serves(other, one) for other in found):
            found.append(one)
    return tuple(found)


def _split_stores(sizes: Sizes, host: bool) -> list[Store]:
    """Returns the stores in which each tensor-parallel rank keeps a part of a unit's input."""
    if sizes.tp_size == 1 or sizes.sequence_parallel:
        return []
    return ["split", "split+host"] if host else ["split"]


def _actions(model: ModelConfig, sizes: Sizes) -> Iterator[LayerAction]:
    """Yields every combination of the regions that free memory, and the whole layer."""
    useful = [
        name
        for name, facts in REGIONS.items()
        if (not facts.needs_scores or model.builds_scores(sizes.device))
        and (not facts.needs_hidden_dropout or model.hidden_dropout > 0.0)
        and (not facts.needs_norms_before or not model.norms_after)
        and (not facts.needs_experts or model.num_experts is not None)
        and (name not in OF_DENSE or model.num_dense_layers)
    ]
    # The name `pointwise` stands for every cheap region, those of experts too.
    dense = {name for name in POINTWISE if not REGIONS[name].needs_experts}
    implied = set(POINTWISE) - dense if model.num_experts is None else set()
    for number in range(len(useful) + 1):
        for regions in itertools.combinations(useful, number):
            if not nested(regions):
                more = implied if dense <= {*regions} else set()
                yield LayerAction(regions=tuple(sorted({*regions, *more})))
    yield LayerAction(unit=1)


def _priced(
    model: ModelConfig,
    sizes: Sizes,
    clock: Clock,
    skip_tail: bool,
    action: LayerAction,
    store: Store,
) -> LayerChoice:
    kept, moved = _kept(model, sizes, action, store)
    rebuilt = 2 * moved  # the tensors of this layer and of the one before come back
    if action.unit:
        rebuilt += _kept(model, sizes)[0]
    if action.regions:  # they are rebuilt one at a time
        rebuilt += _kept(model, sizes)[0] - min(
            _kept(model, sizes, LayerAction(regions=(region,)))[0] for region in action.regions
        )
    segment = _segment(action, store)
    if segment.split:  # the gather of the split unit before runs at the same time
        rebuilt += Shape(model, sizes).residual
    seconds = 0.0
    if action != KEEP:
        seconds = replay_time(model, segment, skip_tail, clock, sizes).seconds
    return LayerChoice(kept, rebuilt, seconds, moved, action, store)


@lru_cache(1024)
def _kept(
    model: ModelConfig, sizes: Sizes, action: LayerAction = KEEP, store: Store = "device"
) -> tuple[int, int]:
    """Returns the bytes that a layer keeps on the device and in host memory, without tables that
    all layers share."""
    terms = activation_terms(model, RecomputePlan((_segment(action, store),)), sizes)
    own = [term for term in terms if not term.tensor.shared]
    on_host = sum(term.num_bytes for term in own if term.on_host)
    return sum(term.num_bytes for term in own) - on_host, on_host


def _segment(action: LayerAction, store: Store) -> Segment:
    return Segment(
        first_layer=0,
        unit=bool(action.unit),
        regions=frozenset(action.regions),
        tiles=action.tiles,
        store=store,
    )


def _serves(one: LayerChoice, other: LayerChoice) -> bool:
    """Returns whether a layer can have the one choice wherever it has the other."""
    return all(own <= replaced for own, replaced in zip(one.price, other.price, strict=True))
