"""Adds up a rank's bytes over a stretch of a step, and finds its fullest moment.

Passages follow one another, and a passage can repeat. Standard library only.
"""

from __future__ import annotations

from typing import NamedTuple


class Moment(NamedTuple):
    """The fullest moment of a passage.

    where: the operation that runs, such as "backward of linear_fc2".
    kept: how many more bytes are kept for backward than at the passage's start. It is negative in
        a backward.
    rebuilt: the bytes that a replay has rebuilt.
    layer: the number of the layer in its stage, or None outside of the layers.
    """

    where: str = ""
    kept: int = 0
    rebuilt: int = 0
    layer: int | None = None


class Passage(NamedTuple):
    """The bytes of a stretch of a step, beyond those held when it began.

    most: the most bytes held at any moment. end: the bytes held when it ends, negative if it frees
        more than it allocates. kept: how many of `end` are kept for backward.
    """

    most: int = 0
    end: int = 0
    kept: int = 0
    fullest: Moment = Moment()

    def then(self, other: Passage) -> Passage:
        """Returns this passage, followed by another one."""
        most, fullest = self.most, self.fullest
        # An allocation may have no name. The next passage then names the moment.
        if self.end + other.most > most or not fullest.where:
            most = max(most, self.end + other.most)
            fullest = other.fullest._replace(kept=self.kept + other.fullest.kept)
        return Passage(most, self.end + other.end, self.kept + other.kept, fullest)

    def times(self, number: int) -> Passage:
        """Returns this passage, `number` times in a row."""
        if number == 0:
            return Passage()
        # If each pass leaves more bytes than it found, the last one is the fullest, else the first.
        before = number - 1 if self.end > 0 else 0
        return Passage(
            before * self.end + self.most,
            number * self.end,
            number * self.kept,
            self.fullest._replace(kept=before * self.kept + self.fullest.kept),
        )


def change(num_bytes: int, where: str = "", *, kept: int = 0) -> Passage:
    """Returns the passage of an allocation, or of tensors that are freed."""
    return Passage(max(0, num_bytes), num_bytes, kept, Moment(where))


def in_layer(passage: Passage, number: int) -> Passage:
    """Returns a passage whose layers are counted from this number on."""
    moment = passage.fullest
    if moment.layer is None:
        return passage
    return passage._replace(fullest=moment._replace(layer=moment.layer + number))


def joined(*passages: Passage) -> Passage:
    """Returns passages that follow one another."""
    whole = Passage()
    for one in passages:
        whole = whole.then(one)
    return whole
