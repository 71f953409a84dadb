"""The bytes of every tensor storage that a block creates and that is still alive.

It is the check of meter.py, since it counts a storage whoever keeps it. Weak references follow the
storages, so that counting keeps nothing alive. A storage counts with its own size, without the
allocator's rounding. Three kinds do not count: workspaces that live only within one operator,
storages that existed before the block, and storages that no operator of torch creates. The state of
a generator is of the last kind until it is copied.

The first operator under a dispatch mode costs seconds of imports, once per process. The class is
meant for tests, pictures and cross-checks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Follows storages within `with`. peak_bytes: the most bytes alive right after an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for storage in _storages(results):
            if storage._cdata not in given:
                self._references[storage._cdata] = weakref.ref(storage)
        self.after(func)
        return results

    def after(self, func: Any) -> None:
        """Runs after every operator."""
        self.peak_bytes = max(self.peak_bytes, self.total_bytes())

    def storages(self) -> dict[int, int]:
        """Returns the bytes of every live storage, by its address.

        It reads the sizes anew each time, because storages can be resized.
        """
        alive = {}
        for address, reference in list(self._references.items()):
            storage = reference()
            if storage is None:
                del self._references[address]
            else:
                alive[address] = storage.nbytes()
        return alive

    def total_bytes(self) -> int:
        """Returns the bytes that are alive now."""
        return sum(self.storages().values())

    def bytes_beside(self, known: Set[int]) -> int:
        """Returns the bytes of live storages at other addresses than the known ones.

        A backend's thread may free a collective's tensors a little late. The call therefore waits
        for up to one second until nothing is left.
        """
        for _ in range(100):
            beside = sum(size for address, size in self.storages().items() if address not in known)
            if beside == 0:
                break
            time.sleep(0.01)
        return beside


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
        elif isinstance(leaf, torch.UntypedStorage):  # an argument of Tensor.set_
            yield leaf
