"""Measures the bytes that a forward keeps for its backward.

    with kept_for_backward(exclude=model.parameters(), model=model) as meter:
        loss = model.loss(tokens, labels).mean()
    meter.total_bytes(), meter.by_module()          as long as the loss, and with it the graph, is alive

torch hands every tensor that is saved for backward to the meter's hooks. Counted are whole storages, each once, as they are at
the time of asking: what has been dropped since, or resized to 0, is not. What a Function puts on its context as a plain
attribute, or a cache keeps, passes by the hooks: live_storages.py finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

Label = TypeVar("Label")


class KeptForBackward(Generic[Label]):
    """What is saved through `pack` and not yet let go. label: called at each save, for the module that is running.

    Hooks that are put on top of these must call them for what is to be counted; torch itself calls the topmost only.
    """

    def __init__(self, exclude: Iterable[Tensor], label: Callable[[], Label]) -> None:
        self._excluded = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in exclude)}
        self._label = label
        self._numbers = count()
        self._saved: WeakValueDictionary[int, SavedTensor[Label]] = WeakValueDictionary()  # in the order of saving

    def pack(self, tensor: Tensor) -> SavedTensor[Label]:
        """The pack hook. Copies nothing."""
        saved = SavedTensor(tensor, self._label())
        self._saved[next(self._numbers)] = saved
        return saved

    def unpack(self, saved: SavedTensor[Label]) -> Tensor:
        """The unpack hook."""
        return saved.tensor()

    def storages(self) -> dict[int, KeptStorage[Label]]:
        """Every kept storage, by its address."""
        kept: dict[int, KeptStorage[Label]] = {}
        for saved in list(self._saved.values()):
            storage = saved.detached.untyped_storage()
            if storage._cdata not in self._excluded and storage._cdata not in kept:
                kept[storage._cdata] = KeptStorage(storage.nbytes(), saved.label)
        return kept

    def total_bytes(self) -> int:
        """Bytes of all kept storages."""
        return sum(storage.num_bytes for storage in self.storages().values())

    def by_module(self) -> dict[Label, int]:
        """Bytes by the module whose forward was the first to save a storage; "" outside of every module."""
        totals: Counter[Label] = Counter()
        for storage in self.storages().values():
            totals[storage.label] += storage.num_bytes
        return dict(totals)


@dataclass(frozen=True)
class KeptStorage(Generic[Label]):
    """The size of a storage, and the label of the first save of it."""

    num_bytes: int
    label: Label


class SavedTensor(Generic[Label]):
    """What the graph holds in place of a tensor. Lives exactly as long as the graph needs the tensor.

    RuntimeError on reading it after the tensor was written to: with hooks in place, torch leaves that check to them.
    """

    __slots__ = ("__weakref__", "_version", "detached", "label")

    def __init__(self, tensor: Tensor, label: Label) -> None:
        self.detached = tensor.detach()  # an output keeps its graph alive, and the graph would keep it: a cycle
        self.label = label
        self._version = tensor._version

    def tensor(self) -> Tensor:
        """The tensor that was saved."""
        if self.detached._version != self._version:
            raise RuntimeError(f"a tensor {list(self.detached.shape)} saved in {self.label!r} has been modified by an "
                               f"inplace operation: is at version {self.detached._version}, expected {self._version}")
        return self.detached


@contextmanager
def kept_for_backward(*, exclude: Iterable[Tensor] = (), model: nn.Module | None = None) -> Iterator[KeptForBackward[str]]:
    """Counts what is saved in the block. Neither copies nor synchronises; gradients are the same bits as without it.

    exclude: tensors whose storages do not count, views of them included: the parameters. model: tells modules apart.
    """
    with running_modules(model) as running:
        meter = KeptForBackward(exclude, lambda: running[-1] if running else "")
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, meter.unpack):
            yield meter


@contextmanager
def running_modules(model: nn.Module | None) -> Iterator[list[str]]:
    """The qualified names of the modules whose forward is running, outermost first; always empty without a model."""
    running: list[str] = []

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as stack:
        for name, module in [] if model is None else model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield running
