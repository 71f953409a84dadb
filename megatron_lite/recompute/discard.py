"""Tensors that are lent: those who save one for backward keep a note of how to rebuild it, and the tensor itself is freed.

    forward    y = norm(x), which keeps x only;   z = linear(y), which keeps the note
    backward   of linear: the note runs norm(x) again;   of norm: goes back through that same run

For the cheap functions between two matmuls. Nothing is resized or written in place: saved-tensor hooks, in force during one
layer, exchange tensor and note. The hooks that were in force before get everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.recompute.checkpoint import rebuilt_outputs


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
        outer = _hooks_in_force()
        # No pair of Lending and note: it would be a cycle with the graph in it.
        lent = self._lent

        def pack(tensor: Tensor) -> Any:
            owner = lent.get(_storage(tensor))
            if owner is not None:
                return _Note(owner.grad_fn, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
            return tensor if outer is None else _Passed(outer.pack(tensor), outer.unpack)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
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


class _Passed(NamedTuple):
    """What the outer hooks made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor]


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _Note):
        return rebuilt_outputs(packed.node).detach().as_strided(packed.size, packed.stride, packed.offset)
    return packed.unpack(packed.packed) if isinstance(packed, _Passed) else packed


class _Hooks(NamedTuple):
    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


def _hooks_in_force() -> _Hooks | None:
    """torch applies only the innermost saved-tensor hooks, and has no public way to ask for the others."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else _Hooks(*top)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
