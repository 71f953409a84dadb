"""Adds up what a micro-batch holds on a stage, and finds the fullest moment.

Standard library only.
"""

from __future__ import annotations

from typing import NamedTuple


class Moment(NamedTuple):
    """A moment, and the bytes held at it.

    where: the operation that runs, such as "backward of linear_fc2".
    layer: the number of the layer in its stage, or None outside of the layers.
    kept: the bytes kept for backward. rebuilt: those that a replay has rebuilt.
    other: hidden states, gradients, temporaries, gathered weights, and what the allocator rounds.
    """

    where: str = ""
    layer: int | None = None
    kept: int = 0
    rebuilt: int = 0
    other: int = 0

    @property
    def num_bytes(self) -> int:
        """All bytes together."""
        return self.kept + self.rebuilt + self.other


class Passage(NamedTuple):
    """A forward or a backward of a stage: bytes beyond those held when it began.

    fullest: the moment at which most is held.
    end: the bytes held when it ends, negative if it frees more than it allocates. kept: how many of
        them are kept for backward.
    """

    fullest: Moment
    end: int
    kept: int


class Walk:
    """Adds up the bytes held at the present moment of a forward or a backward; see Moment.

    reduced: the bytes of the buffer of FSDP2's last reduction, which are among the others.
    """

    def __init__(self) -> None:
        self.kept = self.rebuilt = self.other = self.reduced = 0
        self._began = 0, 0
        self._fullest: Moment | None = None

    def look(
        self,
        where: str,
        layer: int | None = None,
        *,
        kept: int = 0,
        rebuilt: int = 0,
        other: int = 0,
    ) -> None:
        """Notes a moment at which these bytes are held besides."""
        found = Moment(where, layer, self.kept + kept, self.rebuilt + rebuilt, self.other + other)
        if self._fullest is None or found.num_bytes > self._fullest.num_bytes:
            self._fullest = found

    def passage(self) -> Passage:
        """Returns what happened since the last call."""
        kept, other = self._began
        fullest = self._fullest or Moment(kept=kept, other=other)
        passage = Passage(
            fullest._replace(kept=fullest.kept - kept, other=fullest.other - other),
            self.kept - kept + self.other - other,
            self.kept - kept,
        )
        self._began, self._fullest = (self.kept, self.other), None
        return passage
