"""Keeps what the routers of a unit chose in the forward, so that its replays choose the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from megatron_lite.parallel.collectives import results_may_be_kept
from megatron_lite.parallel.torch_internals import disable_current_modes
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.saved import Handle, hooks_in_force, saved_value


class Choices:
    """The choices of the layers of one forward. It lives as long as the graph of its replays.

    A choice is a tuple of tensors without gradients: indices of experts, counts of tokens. A router
    that draws noise, or whose kernel breaks ties in any order, could choose otherwise in a replay.
    Its tensors go to the saved-tensor hooks that are in force when this object is made.
    is_replayed: whether a replay calls the routers; else nothing is kept here.
    """

    def __init__(self, *, is_replayed: bool = True) -> None:
        self._is_replayed = is_replayed
        self._hooks = hooks_in_force()
        self._kept: dict[int, tuple[Handle, ...]] = {}

    def of(self, layer: int, choose: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Returns the choice of a layer: `choose()` in the forward, and the same in a replay."""
        if is_recomputing() and layer in self._kept:
            return tuple(each() for each in self._kept[layer])
        # A mode that numbers the calls of operators must not see calls that a replay leaves out.
        with disable_current_modes() if results_may_be_kept() else nullcontext():
            choice = choose()
        if not self._is_replayed:
            return choice
        self._kept[layer] = tuple(saved_value(each, self._hooks) for each in choice)
        return choice
