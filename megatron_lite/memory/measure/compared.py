"""The predicted bytes of a memory timeline, each beside the measured bytes of the same moment.

Standard library only.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import NamedTuple

from megatron_lite.memory.measure.timeline import (
    ACTIVATION,
    CATEGORIES,
    FORWARD,
    REBUILT,
    REPLAY,
    Event,
    Timeline,
)

_KEPT = (CATEGORIES.index(ACTIVATION), CATEGORIES.index(REBUILT))


class Compared(NamedTuple):
    """A predicted number of bytes and the measured one.

    exact: whether both should be equal. Between two layers of the forward they are not: a tensor
        that an operator saves is noted with the next operator.
    number: of the event. measured_bytes: kept from the forward or rebuilt by a replay.
    """

    number: int
    predicted_bytes: int
    measured_bytes: int
    exact: bool


def compared(timeline: Timeline) -> tuple[Compared, ...]:
    """Returns the predicted points of a timeline in the order of its events.

    The moment after a layer is the first event of what follows it. A point whose layers the
    timeline does not show is left out. Discarded outputs of a region that a replay rebuilds do not
    count as measured: the recorder shows them as temporary.
    """
    found = []
    for point in timeline.predicted:
        forward = point.phase == FORWARD
        places = [
            place
            for place, event in enumerate(timeline.events)
            if (event.phase == FORWARD) is forward
            and (point.first_layer < 0 or _is_inside(event, point.first_layer, point.last_layer))
        ]
        if not places:
            continue
        if point.phase == REPLAY:
            stretch = range(places[0], places[-1] + 1)
            place = max(stretch, key=lambda one: _kept_bytes(timeline.events[one]))
        elif point.first_layer < 0:
            place = places[-1]
        else:
            rest = timeline.events[places[-1] + 1 :]
            # A unit saves its input in the decoder, after its last layer.
            between = len(list(takewhile(lambda event: event.module == "decoder", rest)))
            place = min(places[-1] + max(between, 1), len(timeline.events) - 1)
        exact = not forward or point.first_layer < 0
        event = timeline.events[place]
        found.append(Compared(event.number, point.num_bytes, _kept_bytes(event), exact))
    return tuple(sorted(found, key=lambda one: one.number))


def layer_of(module: str) -> int | None:
    """Returns the first number in a module's name, which is its layer, or None."""
    found = re.search(r"(?:^|\.)(\d{1,6})(?:\.|$)", module)
    return int(found[1]) if found else None


def _is_inside(event: Event, first: int, last: int) -> bool:
    layer = layer_of(event.module)
    return layer is not None and first <= layer <= last


def _kept_bytes(event: Event) -> int:
    return sum(event.live_bytes[place] for place in _KEPT)
