"""The update rule: it updates a weight by its complete gradient, and owns the states for that.

`optimizer.py` reduces, scales and clips the gradients, decides whether the step is skipped, and
publishes the new weights. A rule owns its states and their names, and changes master weights. It
never waits for the device, and a skipped step changes nothing.

    adam_update.py    AdamW, for all weights
    muon_update.py    Muon for the matrices of layers, AdamW for all other weights
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class LearningRates(NamedTuple):
    """The learning rates of one step.

    every: that of all weights, except those that have one of their own.
    ends: that of the word embedding and the output layer (--decoupled-lr); None: `every`.
    """

    every: float
    ends: float | None = None

    def of(self, *, at_an_end: bool) -> float:
        """Returns the rate of a weight."""
        return self.ends if at_an_end and self.ends is not None else self.every


class UpdateRule(Protocol):
    """Updates this rank's pieces by the `.grad` of their masters."""

    @property
    def states(self) -> Mapping[str, Mapping[str, Tensor]]:
        """states[parameter][state], in the order of the pieces: shape and dtype of the master.

        A parameter of which this rank has no piece has no entry.
        """

    def state_names(self, parameter: str) -> tuple[str, ...]:
        """Returns the names of a parameter's states, as in checkpoints.

        They are the same on every rank, whether it has a piece of the parameter or not.
        """

    def step(self, rates: LearningRates, skipped: Tensor) -> None:
        """Makes one update, or none if `skipped` (0-d float32) is 1.

        Every rank must call this, also one without pieces: a rule may issue collectives.
        """

    def set_num_updates(self, number: int) -> None:
        """Sets how many updates the states have seen. A rule that does not count ignores it."""
