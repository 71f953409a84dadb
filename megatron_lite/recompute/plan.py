"""A recompute plan: for every layer of a pipeline stage, what is rebuilt in backward and where what is kept lives.

Plain data, read alike by what runs it, prices it and explains it. Equal plans compare equal. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Store = Literal["device", "split"]
CORE_ATTENTION, LAYERNORM, MLP_REGION, ACTIVATION, DROPOUT = "core_attn", "layernorm", "mlp", "activation", "dropout"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`num_layers` consecutive layers from `first_layer` (counted within the stage) that are treated alike.

    unit: the layers form one unit: only its input is kept, and all of it runs again in backward.
    regions: names of regions inside each layer that run again; empty in a unit.
    store: where a unit's input is kept: whole on this device, or split over the tensor-parallel ranks.
    """

    first_layer: int
    num_layers: int = 1
    unit: bool = False
    regions: frozenset[str] = frozenset()
    store: Store = "device"

    def __post_init__(self) -> None:
        assert self.num_layers >= 1 and not (self.unit and self.regions), self
        assert self.store == "device" or self.unit, self


@dataclass(frozen=True)
class RecomputePlan:
    """The segments of one stage, in order, which cover each of its layers once.

    skip_tail: a replay does not compute what only its own output needs: the last matmul, its collective, the addition after it.
    verify: a replay is compared with its forward, bit by bit; then nothing is skipped.
    """

    segments: tuple[Segment, ...]
    skip_tail: bool = True
    verify: bool = False

    def __post_init__(self) -> None:
        position = 0
        for segment in self.segments:
            assert segment.first_layer == position, self
            position += segment.num_layers
        assert not (self.skip_tail and self.verify), self

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return sum(segment.num_layers for segment in self.segments)

    def __str__(self) -> str:
        """Runs of alike segments, such as "0-3: unit of 2, split; 4-5: keep"."""
        return "; ".join(_merged(self.segments))


def keep_everything(num_layers: int) -> RecomputePlan:
    """The plan that rebuilds nothing."""
    return RecomputePlan(tuple(Segment(first_layer=layer) for layer in range(num_layers)))


def _merged(segments: tuple[Segment, ...]) -> Iterator[str]:
    start = 0
    while start < len(segments):
        stop = start + 1
        while stop < len(segments) and _treatment(segments[stop]) == _treatment(segments[start]):
            stop += 1
        first, last = segments[start].first_layer, segments[stop - 1].first_layer + segments[stop - 1].num_layers - 1
        yield f"{first if first == last else f'{first}-{last}'}: {_treatment(segments[start])}"
        start = stop


def _treatment(segment: Segment) -> str:
    if segment.unit:
        return f"unit of {segment.num_layers}{', split' if segment.store == 'split' else ''}"
    return "rebuild " + "+".join(sorted(segment.regions)) if segment.regions else "keep"
