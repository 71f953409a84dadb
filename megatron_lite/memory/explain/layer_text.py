"""The part of the report of `--explain-recompute` that goes layer by layer."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_lite.config.units import ByteUnit, flops, percent, size
from megatron_lite.description.operations import Collective, KeptTensor
from megatron_lite.memory.explain.layer_groups import LayerGroup
from megatron_lite.memory.explain.prices import region_names
from megatron_lite.memory.explain.recompute_report import Report, ReportPart
from megatron_lite.memory.explain.report_lines import Lines, are_neighbours, group_name
from megatron_lite.memory.predict.traffic import Traffic

NAMED_TENSORS = 4


def layer_lines(report: Report, lines: Lines) -> Iterator[str]:
    """Yields the lines about the embedding, each group of equal layers, and the head."""
    yield "Layer by layer" + (" (numbers count from 0 within a stage)" if report.ranks else "")
    if report.sizes.has_embedding:
        yield from _part("embedding", report.embedding, lines)
    if report.rotary_tables.kept:
        names = " and ".join(shared_tensors(report))
        yield from _part(f"{names}, which all layers share", report.rotary_tables, lines)
    for group in report.layer_groups:
        yield from _group(group, report, lines)
    if report.sizes.has_head:
        yield from _part("head: final norm, logits, loss", report.head, lines)


def shared_tensors(report: Report) -> dict[str, int]:
    """Returns the bytes of the tensors that all layers share, by name.

    Each virtual stage of a rank has tensors of its own.
    """
    found: Counter[str] = Counter()
    for one in report.rotary_tables.kept:
        found[one.name] += one.num_bytes
    return dict(sorted(found.items(), reverse=True))


def _part(name: str, part: ReportPart, lines: Lines) -> Iterator[str]:
    yield f"  {name}"
    yield from lines.field("keeps", _kept(part.kept))
    yield from _traffic(part.traffic, lines)


def _group(group: LayerGroup, report: Report, lines: Lines) -> Iterator[str]:
    split = f", 1/{report.sizes.tp_size} of it on each rank" if group.segment.split else ""
    each = "unit" if group.segment.num_layers > 1 else "layer"
    peculiarity = f" ({group.peculiarity})" if group.peculiarity else ""
    number = len(group.layers) * max(1, len(group.stages))
    # A unit's treatment has the number of layers, and of a span the reader sees it.
    counted = "" if group.segment.unit or are_neighbours(group.layers) else f" ({number} layers)"
    heading = f"{group_name(group)}{counted}{peculiarity}: {_treatment(group)}{split}"
    yield from lines.wrapped(heading, indent="    ", first="  ")
    yield from lines.field(
        "keeps", _kept(group.kept, each=f" a {each}: ") if group.kept else "nothing on the device"
    )
    if group.moved:
        yield from lines.field("on the host", _kept(group.moved, each=f" a {each}: "))
    if group.rebuilt:
        names = "all of it" if group.segment.unit else ", ".join(group.rebuilt)
        left_out = f"; {group.left_out} left out" if group.left_out else ""
        share = percent(group.count * group.replay_flops / report.own.model_flops)
        yield from lines.field(
            "runs again",
            f"{flops(group.replay_flops)} a {each}: {names}{left_out}"
            if group.replay_flops
            else f"no matmul: {names}",
        )
        if group.replay_flops:
            together = f", all such {each}s together" if group.count > 1 else ""
            of_all = " of all pipeline ranks" if report.ranks else ""
            yield from lines.field("", f"{share} of forward and backward{of_all}{together}")
    yield from _traffic(group.traffic, lines)


def _traffic(traffic: Traffic, lines: Lines) -> Iterator[str]:
    phases = (
        ("forward", traffic.forward),
        ("backward", traffic.backward),
        ("replay", traffic.replay),
    )
    sent = [f"{phase:10}{_sent(collectives)}" for phase, collectives in phases if collectives]
    for number, text in enumerate(sent):
        yield from lines.field("" if number else "sends", text)


def _treatment(group: LayerGroup) -> str:
    segment = group.segment
    if segment.unit:
        units = (
            f"{group.count} unit{'s' * (group.count > 1)} of {segment.num_layers} "
            f"layer{'s' * (segment.num_layers > 1)}"
        )
        return f"{units}; only the input of {'each' if group.count > 1 else 'it'} is kept"
    if segment.ops:
        named = textwrap.shorten(", ".join(segment.ops), 45, placeholder=" ...")
        return f"results of {named} kept, all else rebuilt in backward"
    if segment.regions:
        return f"{', '.join(region_names(segment.regions))} rebuilt in backward"
    return "everything is kept"


def _kept(tensors: Sequence[KeptTensor], each: str = ": ") -> str:
    """Returns the total, and the largest tensors by name."""
    named, rest = tensors[:NAMED_TENSORS], tensors[NAMED_TENSORS:]
    total = sum(tensor.num_bytes for tensor in tensors)
    unit = ByteUnit.of(total)
    parts = [f"{tensor.name} {unit.number(tensor.num_bytes)}" for tensor in named]
    if rest:
        parts.append(
            f"+ {len(rest)} smaller {unit.number(sum(tensor.num_bytes for tensor in rest))}"
        )
    return f"{unit.number(total)} {unit.name}{each}{', '.join(parts)}"


def _sent(collectives: Sequence[Collective]) -> str:
    counts = Counter(collectives)
    return ", ".join(
        f"{number} {kind} of {size(num_bytes)}" for (kind, num_bytes), number in counts.items()
    )
