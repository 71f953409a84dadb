"""The bytes of every tensor storage that is created in a block and still alive, whoever keeps it: the check of meter.py.

Storages are followed by weak references, so that nothing lives longer for being watched. A storage's own size counts, not the
allocator's rounding of it, nor the workspace that lives and dies within one operator. What existed before the block is not
counted, and neither is what no operator of torch creates (the state of a generator, until it is copied).

The first operator under a dispatch mode costs seconds of imports, once per process: for tests, pictures and cross-checks.
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
    """Within `with`, follows storages. peak_bytes: the most that was alive right after an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for storage in _storages(results):
            if storage._cdata not in given:
                self._references[storage._cdata] = weakref.ref(storage)
        self.after(func)
        return results

    def after(self, func: Any) -> None:
        """Called after every operator."""
        self.peak_bytes = max(self.peak_bytes, self.total_bytes())

    def storages(self) -> dict[int, int]:
        """Bytes of every storage that is alive, by its address. A size is read anew each time: storages can be resized."""
        alive = {}
        for address, reference in list(self._references.items()):
            storage = reference()
            if storage is None:
                del self._references[address]
            else:
                alive[address] = storage.nbytes()
        return alive

    def total_bytes(self) -> int:
        """Bytes alive now."""
        return sum(self.storages().values())

    def bytes_beside(self, known: Set[int]) -> int:
        """Bytes alive in storages at other addresses than the known ones.

        A backend's thread may let go of a collective's tensors a little late: it is given a second.
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
