"""Tells by how much a verified call of a layer raises the memory of its forward.

Its replay needs no more than every replay of the layer does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.recompute.contents import tensors_of
from megatron_lite.recompute.layer_state import LayerState, Written


class VerifiedMemory(NamedTuple):
    """The bytes that one verified call of a layer holds until it returns.

    held_bytes: what the layer saves for backward, in its first call and in every verified one.
    copied_bytes: copies of buffers, attributes and arguments, in the first call alone.
    """

    held_bytes: int
    copied_bytes: int


def verified_memory(layer: nn.Module, *args: Any, **kwargs: Any) -> VerifiedMemory:
    """Returns the bytes of a verified call `layer(*args, **kwargs)`.

    It runs the layer's forward once, without a policy on it: its state and the random numbers move.
    Tensors that the layer holds or gets, and its results, exist without verification as well.
    """
    state = LayerState("the layer", layer, Written())
    given = tensors_of((args, kwargs))
    copied = {id(each): each.nbytes for each in given if not isinstance(each, nn.Parameter)}
    held: dict[int, Any] = {}  # the storages themselves, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        held[address_of(tensor.untyped_storage())] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = layer(*args, **kwargs)
    for each in (*given, *layer.parameters(), *layer.buffers(), *tensors_of(outputs)):
        held.pop(address_of(each.untyped_storage()), None)
    return VerifiedMemory(
        sum(storage.nbytes() for storage in held.values()),
        sum(copied.values()) + state.copied_bytes(),
    )
