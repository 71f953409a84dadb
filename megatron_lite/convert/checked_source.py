"""A source of weights whose tensors are checked as they are read."""

from __future__ import annotations

from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS
from megatron_lite.config.checks import InputError
from megatron_lite.convert.weight_formats import WeightSource


class CheckedSource:
    """Reads from another source. Raises InputError for a tensor that no model can train from: one
    that is not in floating point, or that holds NaN or infinity."""

    def __init__(self, source: WeightSource) -> None:
        self._source, self.described = source, source.described

    def read(self, name: str) -> Tensor:
        """Returns one parameter."""
        return _checked(name, self._source.read(name))

    def read_state(self, name: str, key: str) -> Tensor:
        """Returns one optimizer state of a parameter."""
        return _checked(f"{name} ({key})", self._source.read_state(name, key))


def _checked(what: str, values: Tensor) -> Tensor:
    if values.dtype not in FLOATS.values():
        raise InputError(f"{what} is {values.dtype}, and only {', '.join(FLOATS)} are read")
    # The smallest and the largest value are NaN if any is, and need no memory of the tensor's size.
    if values.numel() and not all(end.isfinite() for end in values.aminmax()):
        raise InputError(
            f"{what} holds NaN or infinity, so the model is broken: convert an earlier checkpoint"
        )
    return values
