"""Output-discarding recomputation: a region's output is freed after the forward, and rebuilt in
backward.

    forward    y = norm(x) keeps x only;   z = linear(y) stores a recipe for y instead of y
    backward   of linear: the recipe runs norm(x) again;   of norm: goes back through that same run

This serves the cheap functions between two matmuls. Nothing is resized or written in place: while a
layer runs, saved-tensor hooks store the recipe where an operation saves the output. Hooks that were
in force before receive every other saved tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.recompute.checkpoint import rebuilt_outputs
from megatron_lite.recompute.saved import exchanging


class DiscardedOutputs:
    """The outputs that are discarded during one layer's forward."""

    def __init__(self) -> None:
        # by the address of the storage; the tensor keeps it in use
        self._discarded: dict[int, Tensor] = {}

    def discard(self, output: Tensor) -> None:
        """Makes every later save of `output`, or of a view of it, store a recipe.

        output: must come from checkpoint(..), since the recipe rebuilds it through its grad_fn.
        """
        self._discarded[_storage(output)] = output

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Stores recipes for discarded outputs that operations inside the block save.

        The discarded outputs are released at the end of the block.
        """
        # A recipe must not refer to this object: that would be a cycle with the graph in it.
        discarded = self._discarded

        def recipe(tensor: Tensor) -> _Recipe | None:
            owner = discarded.get(_storage(tensor))
            if owner is None:
                return None
            return _Recipe(
                owner.grad_fn, tensor.size(), tensor.stride(), int(tensor.storage_offset())
            )

        with exchanging(recipe):
            try:
                yield
            finally:
                discarded.clear()


@dataclass(frozen=True)
class _Recipe:
    """Rebuilds a saved view from the checkpoint whose output it is a view of.

    node: the grad_fn of the checkpoint.
    size, stride, offset: the place of the view in the output's storage.
    """

    node: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return rebuilt_outputs(self.node).detach().as_strided(self.size, self.stride, self.offset)


def _storage(tensor: Tensor) -> int:
    return address_of(tensor.untyped_storage())
