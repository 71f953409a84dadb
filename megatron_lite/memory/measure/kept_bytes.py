"""Measures the bytes that any model keeps for backward: a check of what recomputation saves.

    with measure_kept_bytes(model) as kept:
        loss = model(input_ids=tokens, labels=tokens).loss
    print(kept.measure(loss))                       while the loss, and with it the graph, is alive

Saved-tensor hooks alone undercount, because torch calls only the innermost pair. They miss tensors
that a checkpoint inside the model holds in its own hooks, on a context or in a cache. The module
therefore also counts the storages that were created in the block and are still alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.meter import KeptForBackward, kept_for_backward
from megatron_lite.parallel.torch_internals import address_of, tree_leaves
from megatron_lite.parallel.weights import weights_in_use


@dataclass(frozen=True)
class KeptBytes:
    """The kept bytes of a forward. Each storage counts once, and whole.

    saved: bytes of the storages that our saved-tensor hooks saw.
    beside: bytes of other storages that the block created and that are alive: those held by
        checkpoints inside the model, by contexts or in caches.
    """

    saved: int
    beside: int

    @property
    def total(self) -> int:
        """All kept bytes."""
        return self.saved + self.beside


class KeptBytesMeter:
    """Measures the kept bytes of one forward. `measure_kept_bytes` creates it."""

    def __init__(self, meter: KeptForBackward, live: LiveStorages, weights: list[Tensor]) -> None:
        self._meter, self._live = meter, live
        self._weights = {address_of(tensor.untyped_storage()) for tensor in weights}

    def measure(self, outputs: Any = ()) -> KeptBytes:
        """Returns the bytes that are kept now. Call it while the loss, and so the graph, is alive.

        outputs: the tensors that the forward returned and the caller still holds, as any pytree.
            They count only if the graph saves them too.
        """
        saved = self._meter.storages()
        returned = {
            address_of(leaf.untyped_storage())
            for leaf in tree_leaves(_plain(outputs))
            if isinstance(leaf, Tensor)
        }
        known = saved.keys() | self._weights | returned
        return KeptBytes(
            saved=sum(storage.num_bytes for storage in saved.values()),
            beside=self._live.bytes_beside(known),
        )


@contextmanager
def measure_kept_bytes(model: nn.Module) -> Iterator[KeptBytesMeter]:
    """Measures the kept bytes of the forward inside the block, and changes none of its bits.

    Use it to look at a model, not in every step, because each operator takes longer in the block.
    Parameters, buffers and their views do not count. Tensors that existed before the block (token
    ids, masks) count if they are saved. A copy in host memory counts like any tensor. Do not
    compile the model, because compiled code hides its operators.
    """
    weights = [*weights_in_use(model), *model.buffers()]
    live = LiveStorages()
    with kept_for_backward(exclude=weights, model=model) as meter, live:
        yield KeptBytesMeter(meter, live, weights)


def _plain(outputs: Any) -> Any:
    """Returns the outputs' fields as a plain dict if a library has its own dict class for them.

    transformers does. tree_leaves may treat an object of such a class as one leaf.
    """
    return dict(outputs) if isinstance(outputs, dict) else outputs
