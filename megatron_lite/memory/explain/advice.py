"""The reasons why a run's memory would not drop as its recompute flags suggest.

Each reason comes with its figures, and only for runs in which it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_lite.config.notices import notices
from megatron_lite.config.regions import without_effect
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import percent, size
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.explain.prices import Priced, flags_of
from megatron_lite.memory.predict.kept_tensors import layer_terms

HARDLY_LESS = 0.9


def notes(
    config: RunConfig,
    sizes: Sizes,
    *,
    own: Priced,
    without: Priced,
    policies: Sequence[Priced],
    head_bytes: int,
    layers_bytes: int,
) -> Iterator[str]:
    """Yields the notes on a run.

    own: the run with its own flags. without: the run without recomputation.
    policies: the settings of the flags that the report compares.
    head_bytes, layers_bytes: the kept bytes of the head, and of all layers together.
    """
    for warning in notices(config, "recompute"):
        yield f"{warning}."
    held, most = own.memory.peak_bytes, without.memory.peak_bytes
    if own.plan.segments == without.plan.segments:
        yield from _nothing_recomputed(own, policies)
    else:
        yield from _regions(config, sizes, own)
        if held > HARDLY_LESS * most:
            yield (
                f"What is held for backward {'hardly drops' if held < most else 'does not drop'}: "
                f"{size(held)}, {held / most:.1%} of the {size(most)} without recomputation."
            )
    if own.host_bytes and sizes.device == "cpu":
        yield f"On a CPU @host frees nothing: {size(own.host_bytes)} stay in the same memory."
    elif own.host_bytes:
        yield (
            f"@host copies {size(own.host_bytes)} to the host in forward and as much back in "
            "backward, for every micro-batch. Where that takes longer than the layers between, the "
            "device waits."
        )
    if head_bytes > layers_bytes:
        yield (
            f"The head keeps {size(head_bytes)}, and all layers together {size(layers_bytes)}. "
            "Recomputing layers does not lower the head; --loss-chunk-size and a smaller "
            "--micro-batch-size do, and so does a larger --tensor-model-parallel-size."
        )


def _nothing_recomputed(own: Priced, policies: Sequence[Priced]) -> Iterator[str]:
    # A loss in chunks recomputes no layer, and @host needs memory elsewhere.
    others = [policy for policy in policies if policy.plan != own.plan and not policy.host_bytes]
    free = [policy for policy in others if policy.replay_flops == 0]
    for better in (others, free):
        least = min(better, key=lambda policy: policy.step.num_bytes)
        if least.step.num_bytes < own.step.num_bytes:
            yield (
                f"Nothing is recomputed. With {flags_of(least.config)} the whole peak is "
                f"{size(least.step.num_bytes)} instead of {size(own.step.num_bytes)}, for "
                f"{percent(least.added_flops)} FLOPs."
            )


def _regions(config: RunConfig, sizes: Sizes, own: Priced) -> Iterator[str]:
    """Yields the bytes that each region frees in addition to the other recomputed regions.

    They are those of the first layer with this set of regions. Another note names regions that
    have no effect.
    """
    layers = describe_layers(config.model, replace(sizes, first_layer=0), own.plan.num_layers)
    treated: dict[frozenset[str], int] = {}
    for segment in own.plan.segments:
        if segment.regions:
            treated.setdefault(segment.regions, segment.first_layer)
    for regions, number in treated.items():
        # The bytes that a region frees depend on the other regions: the difference of two sets.
        kept = {
            rebuilt: sum(
                term.num_bytes for term in layer_terms(layers[number].operations, 0, rebuilt, sizes)
            )
            for rebuilt in (regions, *(regions - {one} for one in regions))
        }
        freed = [f"{one} {size(kept[regions - {one}] - kept[regions])}" for one in sorted(regions)]
        yield f"Freed in a layer, less what is kept to rebuild it: {', '.join(freed)}."
    named = frozenset().union(*treated)
    for region in without_effect(named, builds_scores=config.model.builds_scores(sizes.device)):
        if not any(region in warning for warning in notices(config, "recompute")):
            yield (
                f"{region} is moot: flash attention keeps no scores, and rebuilds them in backward "
                "anyway."
            )
