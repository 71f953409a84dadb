"""Tensors that are lent: those who save one for backward keep a note of how to rebuild it, and the tensor itself is freed.

    forward    y = norm(x), which keeps x only;   z = linear(y), which keeps the note
    backward   of linear: the note runs norm(x) again;   of norm: goes back through that same run

For the cheap functions between two matmuls. Nothing is resized or written in place: saved-tensor hooks, in force during one
layer, exchange tensor and note. The hooks that were in force before get everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.recompute.checkpoint import rebuilt_outputs
from megatron_lite.recompute.saved import exchanging


class Lending:
    """The tensors lent during one layer's forward."""

    def __init__(self) -> None:
        self._lent: dict[int, Tensor] = {}  # by the address of the storage, which the tensor keeps from being used again

    def lend(self, output: Tensor) -> None:
        """From here on, whoever saves `output`, or a view of it, keeps a note. output: that of a checkpoint(..)."""
        self._lent[_storage(output)] = output

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """The stretch in which what is lent may be saved."""
        # No pair of Lending and note: it would be a cycle with the graph in it.
        lent = self._lent

        def note(tensor: Tensor) -> _Note | None:
            owner = lent.get(_storage(tensor))
            if owner is None:
                return None
            return _Note(owner.grad_fn, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with exchanging(note):
            try:
                yield
            finally:
                lent.clear()


@dataclass(frozen=True)
class _Note:
    """How to get a saved view back: the checkpoint that made its storage, and the view's place in it."""

    node: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return rebuilt_outputs(self.node).detach().as_strided(self.size, self.stride, self.offset)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
