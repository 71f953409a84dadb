"""Saved-tensor hooks that keep something else in place of a tensor that is saved for backward.

torch applies only the innermost pair of hooks. What these do not exchange goes to the pair that was in force before: regions that
are lent, tensors that are moved, and whoever counts bytes can all look at the same forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Kept(Protocol):
    """What the graph holds in place of a tensor."""

    def tensor(self) -> Tensor:
        """The tensor, which backward needs now."""


class Moved(Protocol):
    """A copy of a storage. Lives as long as the graph needs any view of it."""

    def memory(self) -> Tensor:
        """Its bytes, on the device of the original, ready to be read."""


@contextmanager
def exchanging(exchange: Callable[[Tensor], Kept | None]) -> Iterator[None]:
    """Inside, whatever saves a tensor keeps `exchange(tensor)`; where that is None, what the hooks in force make of it."""
    outer = hooks_in_force()

    def pack(tensor: Tensor) -> Kept:
        kept = exchange(tensor)
        if kept is not None:
            return kept
        # An output that is kept as it is keeps its graph, which keeps the output: a cycle.
        return _Passed(tensor.detach(), None) if outer is None else _Passed(outer.pack(tensor), outer.unpack)

    with torch.autograd.graph.saved_tensors_hooks(pack, _tensor):
        yield


@contextmanager
def moving(move: Callable[[Tensor], Moved], *, kind: str, stay: Iterable[Tensor]) -> Iterator[None]:
    """Inside, what is saved is kept as `move(tensor)`: the copy of its whole storage, made once for all views of it.

    Not moved are the tensors `stay` and views of them, tensors on another kind of device, and bytes: states of generators, which
    live in host memory on every device.
    """
    fixed = {tensor.untyped_storage()._cdata for tensor in stay}
    moved: dict[tuple[int, int], tuple[weakref.ref[torch.UntypedStorage], Moved]] = {}

    def exchange(tensor: Tensor) -> Kept | None:
        storage = tensor.untyped_storage() if _can_move(tensor, kind) else None
        if storage is None or storage._cdata in fixed or storage.nbytes() == 0:
            return None
        place = storage._cdata, tensor._version  # written to since: no longer what was copied
        known = moved.get(place)
        if known is None or known[0]() is not storage:  # an address is used again
            known = moved[place] = weakref.ref(storage), move(tensor)
        return _View.of(tensor, known[1])

    with exchanging(exchange):
        try:
            yield
        finally:
            moved.clear()


class Hooks(NamedTuple):
    """A pair of saved-tensor hooks."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


def hooks_in_force() -> Hooks | None:
    """The innermost pair. torch has no public way to ask for it."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if top is None else Hooks(*top)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Passed(NamedTuple):
    """What the hooks that were in force made of a tensor; without any, the tensor."""

    packed: Any
    unpack: Callable[[Any], Tensor] | None

    def tensor(self) -> Tensor:
        return self.packed if self.unpack is None else self.unpack(self.packed)


@dataclass(frozen=True)
class _View:
    """A moved storage, and the place of a tensor in it."""

    moved: Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, moved: Moved) -> _View:
        return cls(moved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def tensor(self) -> Tensor:
        memory = self.moved.memory()
        first = int(memory.storage_offset()) // self.dtype.itemsize + self.offset
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), first, self.size, self.stride)


def _tensor(kept: Kept) -> Tensor:
    return kept.tensor()


def _can_move(tensor: Tensor, kind: str) -> bool:
    if tensor.device.type != kind or tensor.dtype == torch.uint8:
        return False
    # Whether dtype, sizes and strides say all that its memory does not.
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_conj() and not tensor.is_neg()
