"""The actions that a layer can have under a recompute policy, with the price of each.

Kept bytes and those of a replay come from memory/predict/, for a stage of one layer; seconds come
from the time model. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from megatron_lite.config.policy import LayerAction
from megatron_lite.config.regions import REGIONS, nested
from megatron_lite.config.run import RunConfig
from megatron_lite.description.sizes import Sizes, residual_bytes
from megatron_lite.description.transformer_layer import describe_layer
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.memory.predict.peak import moments
from megatron_lite.plan.operation_time import Clock
from megatron_lite.plan.policies import LayerPrice
from megatron_lite.plan.stage_time import layer_sizes, replay_time
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment, Store


class LayerChoice(NamedTuple):
    """An action, a store, and what a layer costs with them.

    moved: the bytes that a layer moves to host memory and back.
    tables: the bytes of tables that all layers of a stage share.
    """

    action: LayerAction
    store: Store
    price: LayerPrice
    moved: int = 0
    tables: int = 0


def layer_choices(config: RunConfig, clock: Clock, *, host: bool = True) -> tuple[LayerChoice, ...]:
    """Returns the choices of a layer that can be the best of some mix.

    A choice is left out if another one keeps no more, rebuilds no more and is no slower. If layers
    differ (windows, rotary embeddings), the first layer stands for all.
    host: whether kept tensors may go to host memory.
    """
    sizes = layer_sizes(config, Sizes.of(config, device=clock.hardware.device))
    return clock.memo.once(
        ("choices", sizes, host), lambda: _useful(list(_priced(config, clock, sizes, host)))
    )


def _priced(config: RunConfig, clock: Clock, sizes: Sizes, host: bool) -> Iterator[LayerChoice]:
    splits = config.parallel.tensor_model_parallel_size > 1 and not sizes.sequence_parallel
    for action in _actions(config, clock.hardware.device):
        stores: list[Store] = ["device"]
        if host and clock.hardware.device != "cpu":
            stores.append("host")
        if splits and action.unit:
            stores += ["split", "split+host"] if host else ["split"]
        for store in stores:
            yield _price(config, clock, sizes, action, store)


def _actions(config: RunConfig, device: str) -> Iterator[LayerAction]:
    """Yields every combination of the regions that free memory, and the whole layer."""
    useful = [
        name
        for name, facts in REGIONS.items()
        if (not facts.needs_scores or config.model.builds_scores(device))
        and (not facts.needs_hidden_dropout or config.model.hidden_dropout > 0.0)
        and (not facts.needs_norms_before or not config.model.norms_after)
    ]
    for number in range(len(useful) + 1):
        for regions in itertools.combinations(useful, number):
            if not nested(regions):
                yield LayerAction(regions=tuple(sorted(regions)))
    yield LayerAction(unit=1)


def _price(
    config: RunConfig, clock: Clock, sizes: Sizes, action: LayerAction, store: Store
) -> LayerChoice:
    segment = Segment(
        first_layer=0, unit=bool(action.unit), regions=frozenset(action.regions), store=store
    )
    verify = config.recompute.recompute_verify
    plan = RecomputePlan(
        (segment,), verify=verify, skip_tail=config.recompute.recompute_tail_skip and not verify
    )
    kept = moved = 0
    whole = sum(describe_layer(config.model, sizes).tables().values())
    for term in activation_terms(config.model, plan, sizes):
        if term.tensor.shared:
            whole += term.num_bytes if term.tensor.given else 0
            continue
        if term.on_host:
            moved += term.num_bytes
        else:
            kept += term.num_bytes
    # Without a unit or regions there is no moment but the end of the forward.
    fullest = max(
        (
            moment.held_bytes - whole
            for moment in moments(config.model, plan, sizes)
            if moment.first_layer is not None
        ),
        default=kept,
    )
    seconds = replay_time(config, segment, plan, clock, sizes).total()
    if segment.split:
        # The gather of the split unit before runs at the same time.
        fullest += residual_bytes(config.model, sizes)
    return LayerChoice(
        action, store, LayerPrice(kept, max(0, fullest - kept), seconds), moved, whole
    )


def _useful(choices: list[LayerChoice]) -> tuple[LayerChoice, ...]:
    """Returns the choices without those that another one makes useless."""
    found: list[LayerChoice] = []
    # The cheapest first, so that of two equal choices the simpler one stays.
    for one in sorted(choices, key=lambda choice: (*choice.price, choice.moved)):
        if not any(_serves(other, one) for other in found):
            found = [other for other in found if not _serves(one, other)] + [one]
    return tuple(found)


def _serves(one: LayerChoice, other: LayerChoice) -> bool:
    """Returns whether a layer can have the one choice wherever it has the other."""
    price, replaced = one.price, other.price
    return (
        price.kept <= replaced.kept
        and price.kept + price.rebuilt <= replaced.kept + replaced.rebuilt
        and price.rebuilt <= replaced.rebuilt
        and price.seconds <= replaced.seconds
        and one.moved <= other.moved
    )
