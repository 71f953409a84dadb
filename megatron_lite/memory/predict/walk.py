"""Adds up what a micro-batch holds on a stage, and finds the fullest moment. Standard library only.

Under FSDP2 the walk also holds gathered weights and reduced gradients (gathered_weights.py).
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lite.memory.predict.gathered_weights import NOTHING, FsdpUnit, GatheredWeights


class Moment(NamedTuple):
    """A moment, and the bytes held at it.

    where: the operation that runs, such as "backward of linear_fc2".
    layer: the number of the layer in its stage, or None outside of the layers.
    kept: the bytes kept for backward. rebuilt: those that a replay has rebuilt.
    other: hidden states, gradients, temporaries and gathered weights.
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
    kept, other: the bytes held when it ends, of each kind. They are negative if it frees more than
        it allocates.
    """

    fullest: Moment
    kept: int
    other: int


class Walk:
    """Adds up the bytes held at the present moment of a forward or a backward; see Moment.

    buffer: the bytes of the buffer into which FSDP2 gathered weights last. reduced: those of the
        buffer of its last reduction. Both are among the others.
    """

    def __init__(self, weights: GatheredWeights) -> None:
        self.weights = weights
        self.kept = self.rebuilt = self.other = self.buffer = self.reduced = 0
        self._began = 0, 0
        self._fullest: Moment | None = None

    def look(self, held: Moment) -> None:
        """Notes a moment at which these bytes are held besides."""
        where, layer, kept, rebuilt, other = held
        kept, rebuilt, other = self.kept + kept, self.rebuilt + rebuilt, self.other + other
        found = Moment(where, layer, kept, rebuilt, other)
        if self._fullest is None or found.num_bytes > self._fullest.num_bytes:
            self._fullest = found

    def passage(self) -> Passage:
        """Returns what happened since the last call."""
        kept, other = self._began
        fullest = self._fullest or Moment(kept=kept, other=other)
        fullest = fullest._replace(kept=fullest.kept - kept, other=fullest.other - other)
        self._began, self._fullest = (self.kept, self.other), None
        return Passage(fullest, self.kept - kept, self.other - other)

    def gather(self, unit: FsdpUnit, *, copies_out: bool = True) -> None:
        """Gathers a unit of FSDP2 into a buffer.

        copies_out: whether the weights are copied out of the buffer at once. The buffer of the unit
            before is freed then.
        """
        if unit is NOTHING:
            return
        copy = unit.gathered * self.weights.copies
        if unit.gathered:
            self.look(Moment("gather of weights", other=unit.cast + unit.gathered + copy))
        self.other += unit.gathered
        if copies_out:
            self.other += unit.gathered - self.buffer
            self.buffer = unit.gathered

    def reduce(self, unit: FsdpUnit) -> None:
        """Copies the gradients into a buffer, frees them and sums the buffer over the ranks.

        The buffer of the reduction before is freed first.
        """
        if unit is NOTHING:
            return
        where, copy = "reduction of gradients", unit.buffer * self.weights.copies
        self.other += unit.buffer - self.reduced
        self.reduced = unit.buffer
        self.look(Moment(where))
        self.other += unit.last - unit.gradients
        self.look(Moment(where, other=unit.rows + copy))
        # The first micro-batch's rows stay as `.grad`. Later rows are added to them and freed.
        self.other += (0 if self.weights.accumulates else unit.rows) - unit.last
