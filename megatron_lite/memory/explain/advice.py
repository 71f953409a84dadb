"""The reasons why a run's memory would not drop as its recompute flags suggest.

Each reason comes with its figures, and only for runs in which it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.notices import recompute_notices
from megatron_lite.config.policy import LayerAction, Policy
from megatron_lite.config.regions import without_effect
from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import percent, size
from megatron_lite.description.operations import Operation
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layers
from megatron_lite.memory.explain.prices import (
    Priced,
    best_unit,
    flags_of,
    full,
    price,
    uniform_peaks,
    with_flags,
)
from megatron_lite.memory.predict.kept_tensors import layer_terms
from megatron_lite.recompute.schedule import plan_model

HARDLY_LESS = 0.9


class Note(NamedTuple):
    """A note of the report. topic: a word by which to find it."""

    topic: str
    text: str


def notes(
    config: RunConfig,
    sizes: Sizes,
    *,
    own: Priced,
    without: Priced,
    policies: Sequence[Priced],
    head_bytes: int,
    layers_bytes: int,
    dp_size: int,
) -> tuple[Note, ...]:
    """Returns the notes on a run.

    own: the run with its own flags. without: the run without recomputation.
    policies: the settings of the flags that the report compares.
    head_bytes, layers_bytes: the kept bytes of the head, and of all layers together.
    """
    found = [Note("warning", f"{warning}.") for warning in recompute_notices(config)]
    if own.plan.segments == without.plan.segments:
        found += _nothing_recomputed(own, policies)
    else:
        found += _regions(config, sizes, own)
        found += _units(config, sizes, own)
        found += _distributed(config, sizes, own)
        found += _peak(own, without)
        found += _whole_tail(config, sizes, own)
        found += _host(sizes, own)
    if head_bytes > layers_bytes:
        found.append(
            Note(
                "head",
                f"The head keeps {size(head_bytes)}, and all layers together {size(layers_bytes)}. "
                "Recomputing layers does not lower the head; a smaller --micro-batch-size does, "
                "and so does a larger --tensor-model-parallel-size, which splits the logits.",
            )
        )
    return tuple(found)


def _nothing_recomputed(own: Priced, policies: Sequence[Priced]) -> Iterator[Note]:
    # A loss in chunks recomputes no layer, and @host needs memory elsewhere.
    others = [policy for policy in policies if policy.plan != own.plan and not policy.host_bytes]
    least = min(others, key=lambda policy: policy.peak.held_bytes)
    if least.peak.held_bytes < own.peak.held_bytes:
        yield Note(
            "none",
            f"Nothing is recomputed. {flags_of(least.recompute)} would hold least at the peak: "
            f"{size(least.peak.held_bytes)} instead of {size(own.peak.held_bytes)}, for "
            f"{percent(least.extra_flops)} FLOPs.",
        )
    else:
        yield Note(
            "none", "Nothing is recomputed, and no setting of the flags would lower the peak."
        )
    free = min(
        (policy for policy in others if policy.replay_flops == 0),
        key=lambda policy: policy.peak.held_bytes,
    )
    if free.peak.held_bytes < own.peak.held_bytes:
        yield Note(
            "free",
            f"{flags_of(free.recompute)} runs no matmul again and holds "
            f"{size(free.peak.held_bytes)} at the peak.",
        )


def _regions(config: RunConfig, sizes: Sizes, own: Priced) -> Iterator[Note]:
    """Yields the bytes that each region frees in addition to the other recomputed regions.

    They are those of the first layer with this set of regions. A second note names regions that
    have no effect.
    """
    layers = describe_layers(config.model, replace(sizes, first_layer=0), own.plan.num_layers)
    treated: dict[frozenset[str], int] = {}
    for segment in own.plan.segments:
        if segment.regions:
            treated.setdefault(segment.regions, segment.first_layer)
    for regions, number in treated.items():
        # The bytes that a region frees depend on the other regions: the difference of two sets.
        def kept(
            rebuilt: frozenset[str], operations: tuple[Operation, ...] = layers[number].operations
        ) -> int:
            return sum(term.num_bytes for term in layer_terms(operations, 0, rebuilt, sizes))

        freed = [
            f"{region} {size(kept(regions - {region}) - kept(regions))}"
            for region in sorted(regions)
        ]
        yield Note(
            "regions", f"Freed in a layer, less what is kept to rebuild it: {', '.join(freed)}."
        )
    named = frozenset().union(*treated)
    moot = without_effect(sorted(named), builds_scores=config.model.builds_scores(sizes.device))
    for region in moot:
        if not any(region in warning for warning in recompute_notices(config)):
            yield Note(
                region,
                f"{region} is moot: flash attention keeps no scores, and rebuilds them in "
                "backward anyway.",
            )


def _units(config: RunConfig, sizes: Sizes, own: Priced) -> Iterator[Note]:
    first = own.plan.segments[0]
    count, split = first.num_layers, first.split
    if not first.unit:
        return
    uniform = plan_model(full(config, "uniform", count, split=split))
    if own.plan.segments != uniform.segments:
        return
    peaks = uniform_peaks(config, sizes.device, split=split)
    best, held = best_unit(peaks), own.peak.held_bytes
    if held > peaks[best]:
        reason = "Longer units keep fewer inputs"
        if count > best:
            reason += ", but all of a unit's layers are held when it is rebuilt"
        yield Note(
            "unit",
            f"A unit of {count} holds {held / peaks[best]:.2f}x what a unit of {best} would at the "
            f"peak, {size(held)} against {size(peaks[best])}; no unit size holds less than {best}. "
            f"{reason}.",
        )


def _distributed(config: RunConfig, sizes: Sizes, own: Priced) -> Iterator[Note]:
    if not any(segment.split for segment in own.plan.segments):
        return
    whole = with_flags(config, recompute_policy=_unsplit(config.recompute.policy))
    priced = price(whole, sizes.device)
    saved = priced.kept_bytes + priced.host_bytes - own.kept_bytes - own.host_bytes
    text = (
        f"Splitting the inputs of units over the ranks frees {size(saved)}, for one "
        "all-gather per unit in backward."
    )
    parallel = replace(config.parallel, sequence_parallel=True)
    if sizes.seq_length % parallel.sequence_parts == 0:
        sequence = price(replace(whole, parallel=parallel), sizes.device)
        if sequence.kept_bytes <= own.kept_bytes and sequence.peak.held_bytes < own.peak.held_bytes:
            text += (
                " --sequence-parallel in its place splits these inputs too, and norms and dropouts "
                f"besides: {size(sequence.peak.held_bytes)} at the peak against "
                f"{size(own.peak.held_bytes)}."
            )
    yield Note("distribute", text)


def _unsplit(policy: Policy) -> str:
    """Returns the policy with whole inputs on every rank.

    It drops last rules that only keep everything on the device. They have no effect, and a rule
    that never applies would be illegal.
    """
    rules = [
        replace(rule, store=rule.store.removeprefix("split+").replace("split", "device"))
        for rule in policy.rules
    ]
    while len(rules) > 1 and (rules[-1].action, rules[-1].store) == (LayerAction(), "device"):
        rules.pop()
    return str(Policy(tuple(rules)))


def _host(sizes: Sizes, own: Priced) -> Iterator[Note]:
    if own.host_bytes and sizes.device == "cpu":
        yield Note(
            "host",
            f"On a CPU @host frees nothing: it copies {size(own.host_bytes)} within the same "
            "memory.",
        )
    elif own.host_bytes:
        yield Note(
            "host",
            f"@host copies {size(own.host_bytes)} to the host in forward and as much back in "
            "backward, for every micro-batch. Where that takes longer than the layers between, the "
            "device waits.",
        )


def _peak(own: Priced, without: Priced) -> Iterator[Note]:
    share = own.peak.held_bytes / without.peak.held_bytes
    if share > HARDLY_LESS:
        yield Note(
            "peak",
            f"The peak {'hardly drops' if share < 1.0 else 'does not drop'}: "
            f"{size(own.peak.held_bytes)}, {share:.1%} of the {size(without.peak.held_bytes)} "
            "without recomputation.",
        )


def _whole_tail(config: RunConfig, sizes: Sizes, own: Priced) -> Iterator[Note]:
    if own.plan.skip_tail:
        return
    skipping = replace(
        config,
        recompute=replace(config.recompute, recompute_tail_skip=True, recompute_verify=False),
    )
    wasted = own.replay_flops - price(skipping, sizes.device).replay_flops
    if wasted:
        flag = (
            "--recompute-verify"
            if config.recompute.recompute_verify
            else "--no-recompute-tail-skip"
        )
        yield Note(
            "tail",
            f"With {flag} replays also run what nothing reads: "
            f"{percent(wasted / own.model_flops)} FLOPs.",
        )
