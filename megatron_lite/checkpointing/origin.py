"""Records which start saved a step, and which steps of earlier starts led to it.

Every start that takes a directory gets a number, above all numbers that the directory has seen. A
start goes on from a step of an earlier start, and leaves the later steps of that start behind:

    start 1    2    4    6 (left)      step 8 of start 2 has the course ((start 1, up to 4),):
    start 2              6'   8        steps 2 and 4 of start 1 led to it, step 6 of start 1 did not

Readers follow the course of the newest step of the highest start. Thus a reader never uses a step
that a stale start has left in the directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_lite.checkpointing.step_files import MOST_ITERATIONS
from megatron_lite.config import plain

MOST_STARTS = 2**31


class OwnSteps(NamedTuple):
    """The steps of one start, up to and including iteration `last`."""

    start: int
    last: int


@dataclass(frozen=True)
class Origin:
    """The history of a step.

    start: the number of the start that saved the step; 0 if the step is older than these numbers.
    course: the parts of earlier starts that led to the step, oldest first.
    """

    start: int = 0
    course: tuple[OwnSteps, ...] = ()

    def includes(self, other: Origin, iteration: int) -> bool:
        """Returns whether another step, with this iteration and the other origin, led to this one.

        The result is True for every step of this step's own start. It is also True if either of the
        two steps has no start number. In these cases the caller compares the iterations.
        """
        if other.start in (0, self.start) or self.start == 0:
            return True
        return any(
            part.start in (0, other.start) and iteration <= part.last for part in self.course
        )

    def course_from(self, iteration: int) -> tuple[OwnSteps, ...]:
        """Returns the course of a start that goes on from this step, whose iteration is given."""
        return (*self.course, OwnSteps(self.start, iteration))

    def to_plain(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        return {"start": self.start, "course": [list(part) for part in self.course]}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Origin:
        """Reads the fields that `to_plain` wrote. Raises ValueError if a value is wrong."""
        if "start" not in values:
            return cls()
        parts = []
        for part in plain.as_list(plain.field(values, "course"), "course"):
            if not isinstance(part, list) or len(part) != 2:
                raise ValueError(f"course must be a list of pairs (got {plain.quoted(part)})")
            parts.append(
                OwnSteps(
                    plain.as_whole(part[0], "course", 0, MOST_STARTS),
                    plain.as_whole(part[1], "course", 0, MOST_ITERATIONS),
                )
            )
        return cls(plain.whole(values, "start", 0, MOST_STARTS), tuple(parts))
