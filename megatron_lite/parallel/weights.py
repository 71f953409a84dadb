"""Reads a weight that may be sharded (FSDP2) or still being gathered (ZeRO-1).

The ranks in question are data-parallel ranks. The code that shards or gathers a weight stores
functions on modules and dtypes on parameters, under the names below.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from .torch_internals import address_of

READER = "weight_reader"  # () -> the module's whole weight, ready to compute with
STAND_INS = "weight_stand_ins"  # () -> the tensors that replace the parameters while it computes
GATHERED_DTYPE = "gathered_dtype"  # a sharded parameter's dtype after the gather


def weight_of(module: nn.Module) -> Tensor:
    """Returns `module.weight`, ready to compute with, for code that does not call the module."""
    reader = module.__dict__.get(READER)
    return reader() if reader else module.weight  # type: ignore[return-value]


def gathered_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype in which the model computes with a parameter.

    It is the parameter's own dtype, unless the parameter is sharded and gathered in another one.
    """
    return getattr(parameter, GATHERED_DTYPE, parameter.dtype)


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor (a DTensor of FSDP2), else the tensor itself.

    It does not import DTensor, which would take a second of every start.
    """
    return getattr(tensor, "to_local", lambda: tensor)()


def storages_of(tensors: Iterable[Tensor | None]) -> dict[int, torch.UntypedStorage]:
    """Returns the storages of this rank's parts of tensors, each once, by address."""
    found = dict[int, torch.UntypedStorage]()
    for each in tensors:
        # It wraps others, as a quantized one, or a DTensor, which names its mesh as well.
        if hasattr(each, "__tensor_flatten__"):
            found |= storages_of(
                getattr(each, name)
                for name in each.__tensor_flatten__()[0]  # type: ignore[union-attr]
            )
        elif isinstance(each, Tensor):
            storage = each.untyped_storage()
            found[address_of(storage)] = storage
    return found


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Returns the bytes of the storages of this rank's parts of tensors."""
    return sum(one.nbytes() for one in storages_of(tensors).values())


def weights_in_use(module: nn.Module) -> Iterator[Tensor]:
    """Yields the parameters of a module, and the tensors that replace them while it computes.

    They have the same storages in every step. The first call may gather weights, so every rank must
    call it.
    """
    yield from module.parameters()
    for part in module.modules():
        yield from part.__dict__.get(STAND_INS, tuple)()
