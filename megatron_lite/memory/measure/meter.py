"""Measures the bytes that a forward keeps for its backward.

    with kept_for_backward(exclude=model.parameters(), model=model) as meter:
        loss = model(tokens, labels).mean()
    meter.total_bytes()    # as long as the loss and its graph are alive

torch passes every tensor that is saved for backward to the meter's hooks. The meter counts whole
storages, each once, with their sizes at the time of the call. A storage that has been freed or
resized to 0 since does not count. The hooks miss a tensor that a Function puts on its context as a
plain attribute, and one that a cache keeps: live_storages.py finds these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.parallel.weights import storages_of
from megatron_lite.recompute.phase import running_modules
from megatron_lite.recompute.saved import check_unwritten, version_of


class KeptForBackward:
    """The saved tensors that went through `pack` and are still alive. `SavedTensor.tensor` unpacks.

    exclude: tensors whose storages do not count.
    label: called at each save; returns the label of the running module.
    torch calls only the topmost pair of hooks. Hooks that are put on top of these must call these
    for every tensor that is to count.
    """

    def __init__(self, exclude: Iterable[Tensor], label: Callable[[], Any]) -> None:
        self._excluded = storages_of(exclude)
        self._label = label
        self._saved = WeakKeyDictionary[SavedTensor, None]()  # in the order of saving

    def pack(self, tensor: Tensor) -> SavedTensor:
        """The pack hook. It copies nothing."""
        saved = SavedTensor(tensor, self._label())
        self._saved[saved] = None
        return saved

    def storages(self) -> dict[int, KeptStorage]:
        """Returns every kept storage, by its address."""
        kept = {}
        for saved in list(self._saved):
            storage = saved.detached.untyped_storage()
            address = address_of(storage)
            if address not in self._excluded and address not in kept:
                kept[address] = KeptStorage(storage.nbytes(), saved.label)
        return kept

    def total_bytes(self) -> int:
        """Returns the bytes of all kept storages."""
        return sum(storage.num_bytes for storage in self.storages().values())


class KeptStorage(NamedTuple):
    """A kept storage: its size, and the label of its first save."""

    num_bytes: int
    label: Any


class SavedTensor:
    """The object that the graph holds in place of a saved tensor, as long as it needs the tensor.

    Reading it raises RuntimeError if the tensor was written to after the save. torch leaves this
    check to the hooks.
    """

    __slots__ = ("__weakref__", "_version", "detached", "label")

    def __init__(self, tensor: Tensor, label: Any) -> None:
        self.detached = tensor.detach()  # an output holds its graph, which would hold the output
        self.label = label
        self._version = version_of(tensor)

    def tensor(self) -> Tensor:
        """The unpack hook. RuntimeError if the tensor was written to after the save."""
        check_unwritten(self.detached, self._version, purpose=f"saved in {self.label!r}")
        return self.detached


@contextmanager
def kept_for_backward(
    *, exclude: Iterable[Tensor] = (), model: nn.Module | None = None
) -> Iterator[KeptForBackward]:
    """Counts the tensors that are saved in the block.

    It copies nothing and does not synchronise, and gradients are the same bits as without it.
    exclude: tensors whose storages (and so whose views) do not count, such as the parameters.
    model: the module whose submodules become the labels; None: all labels are "".
    """
    with running_modules(model) as running:
        meter = KeptForBackward(exclude, lambda: running[-1] if running else "")
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, SavedTensor.tensor):
            yield meter
