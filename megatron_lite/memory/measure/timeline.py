"""The memory timeline of one forward and backward: an event per operator, as data and as JSON.

Standard library only.

    {"format": "megatron_lite memory timeline", "version": 1, "name": "full uniform 1", "phases":
     ["forward", "replay", "backward"], "categories": ["activation", "rebuilt", "gradient",
     "temporary"], "modules": ["decoder.layers.0.mlp", ...], "operators": ["aten.mm", ...],
     "events": [[number, phase, module, operator, bytes of each category ...], ...],
     "predicted": [[phase, first layer, last layer, bytes], ...]}

phase, module and operator are indices into the lists above the events. number counts the operators
that ran before. An operator that changes nothing has no event. Bytes are those alive right after
the operator, in storages created since the start. Parameters, a buffer of their gradients and the
batch existed before and do not count. "predicted" has the points of
memory/predict/stage_course.py, and may be missing.

    activation   saved for backward by the forward          gradient    a parameter's gradient
    rebuilt      saved by a replay                          temporary   all others, such as tensors
                                                                        that no backward needs and
                                                                        gradients of activations
"""

import json
import re
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

from megatron_lite.config.checks import Values, as_list, as_object, input_faults, parse_json
from megatron_lite.config.input_file import read_input
from megatron_lite.data.durable_files import written_beside
from megatron_lite.memory.predict.stage_course import KeptPoint

FORMAT, VERSION = "megatron_lite memory timeline", 1
PHASES = FORWARD, REPLAY, BACKWARD = "forward", "replay", "backward"
CATEGORIES = ACTIVATION, REBUILT, GRADIENT, TEMPORARY = (
    "activation",
    "rebuilt",
    "gradient",
    "temporary",
)
MAX_FILE_BYTES = 32 * 2**20
BYTES = range(2**63)
HEADER = {
    "format": FORMAT,
    "version": VERSION,
    "phases": list(PHASES),
    "categories": list(CATEGORIES),
}


class Event(NamedTuple):
    """The state after an operator.

    number: the number of operators that ran before it.
    module: the name of the running module; "" outside of every module.
    live_bytes: the bytes alive after the operator, by category.
    """

    number: int
    phase: str
    module: str
    operator: str
    live_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """The live bytes of all categories together."""
        return sum(self.live_bytes)

    @property
    def kept_bytes(self) -> int:
        """The bytes kept from the forward or rebuilt by a replay."""
        return self.live_bytes[0] + self.live_bytes[1]


class Timeline(NamedTuple):
    """The events, in order, of a run with the recompute policy `name`.

    predicted: the predicted bytes, in the order of the step; () if unknown.
    """

    name: str
    events: tuple[Event, ...]
    predicted: tuple[KeptPoint, ...] = ()

    @property
    def peak(self) -> Event:
        """The first event with the most bytes alive."""
        return max(self.events, key=lambda event: event.total_bytes)


def write_timeline(timeline: Timeline, path: str) -> None:
    """Writes the timeline to a file. The file is complete or does not appear."""
    modules, operators = (
        list(dict.fromkeys(names))
        for names in zip(*((one.module, one.operator) for one in timeline.events), strict=True)
    )
    places = [{name: at for at, name in enumerate(names)} for names in (PHASES, modules, operators)]
    document = {
        **HEADER,
        "name": timeline.name,
        "modules": modules,
        "operators": operators,
        "events": [
            [number, *(known[name] for known, name in zip(places, names, strict=True)), *live_bytes]
            for number, *names, live_bytes in timeline.events
        ],
    }
    if timeline.predicted:
        document["predicted"] = [[PHASES.index(one.phase), *one[1:]] for one in timeline.predicted]
    with written_beside(path) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))


def read_timeline(path: str) -> Timeline:
    """Reads a timeline from a file.

    OSError: the file cannot be read.
    InputError: the file is not of this format; the error names the fault.
    """
    text = read_input(path, MAX_FILE_BYTES)
    # Bytes that are not UTF-8 raise UnicodeDecodeError, a ValueError.
    with input_faults(f"{path}: not a file of --memory-timeline, version {VERSION}: "):
        found = as_object(parse_json(text, strict=False), "the file")
        for key, value in HEADER.items():
            if found.get(key) != value:
                raise ValueError(f"expected {json.dumps(value)} under {key!r}")
        (name,) = _texts([found.get("name")], "name")
        modules, operators = (_texts(found.get(key), key) for key in ("modules", "operators"))
        places = [range(len(names)) for names in (PHASES, modules, operators)]
        ranges = [BYTES, *places, *[BYTES] * len(CATEGORIES)]
        events = tuple(
            Event(number, PHASES[phase], modules[module], operators[operator], tuple(live_bytes))
            for number, phase, module, operator, *live_bytes in _rows(found, "events", ranges)
        )
        if not events or any(one.number >= after.number for one, after in pairwise(events)):
            raise ValueError("the rows of 'events' are out of order, or there is none")
        layers = range(-1, 2**31)  # a layer of -1 is the end of the forward
        rows = _rows(found, "predicted", [places[0], layers, layers, BYTES])
        points = tuple(KeptPoint(PHASES[row[0]], *row[1:]) for row in rows)
        return Timeline(name=name, events=events, predicted=points)


def _texts(values: Any, key: str) -> list[str]:
    if all(isinstance(value, str) for value in as_list(values, repr(key))):
        return values
    raise ValueError(f"expected text under {key!r}")


def _rows(document: Values, key: str, ranges: list[range]) -> list[list[int]]:
    """Returns the rows under a key: an integer of each range."""
    rows = as_list(document.get(key, []), repr(key))
    for place, row in enumerate(rows):
        # JSON's true and false are bool, which a range would take for int.
        if list(map(type, as_list(row, f"row {place} of {key!r}"))) != [int] * len(ranges) or any(
            value not in allowed for value, allowed in zip(row, ranges, strict=True)
        ):
            raise ValueError(f"row {place} of {key!r} is not {len(ranges)} integers within bounds")
    return rows


def compared(timeline: Timeline) -> list[tuple[Event, KeptPoint]]:
    """Returns the predicted points of a timeline, each behind its event, in the order of events.

    The moment after a layer is the first event of what follows it. A point whose layers the
    timeline does not show is left out. The event keeps as many bytes as the point predicts, with
    two exceptions: between two layers of the forward, a tensor that an operator saves is noted with
    the next operator; and discarded outputs of a region that a replay rebuilds are temporary.
    """
    events, found = timeline.events, []
    for point in timeline.predicted:
        forward = point.phase == FORWARD
        places = [
            place
            for place, event in enumerate(events)
            if (event.phase == FORWARD) is forward
            and (point.first_layer < 0 or _is_inside(event, point.first_layer, point.last_layer))
        ]
        if not places:
            continue
        stop = places[-1] + 1
        if point.phase == REPLAY:
            event = max(events[places[0] : stop], key=lambda one: one.kept_bytes)
        else:
            if point.first_layer >= 0:
                # A unit saves its input in the decoder, after its last layer.
                between = takewhile(lambda event: event.module == "decoder", events[stop:])
                stop += max(len(list(between)), 1)
            event = events[:stop][-1]
        found.append((event, point))
    return sorted(found, key=lambda pair: pair[0].number)


def _is_inside(event: Event, first: int, last: int) -> bool:
    """Returns whether the first number in the module's name, its layer, is one of these."""
    found = re.search(r"(?:^|\.)(\d{1,6})(?:\.|$)", event.module)
    return bool(found and first <= int(found[1]) <= last)
