"""Divides the input of a layer over its tensor-parallel ranks: `@split` on models of others.

Between tensor-parallel layers every rank has the same hidden states. A layer under `full@split`
keeps 1/t of them on each rank of its group, and a replay gathers them in one all-gather. The group
is that of the layer's weights: DTensors of torch's `parallelize_module` or of `tp_plan` in
transformers. Hidden states that are divided already (sequence parallelism) are kept as they are.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from megatron_lite.parallel.tensor_hash import quick_hash
from megatron_lite.parallel.torch_internals import address_of, fills_its_memory
from megatron_lite.parallel.weights import local_part

from .contents import sharded
from .saved import Handle, exchanging

NO_GROUP = (
    "@split needs layers whose weights are divided over tensor-parallel ranks as DTensors: use "
    "torch's parallelize_module or tp_plan of transformers first, or leave @split out"
)


def tensor_parallel_group(layer: nn.Module) -> ProcessGroup | None:
    """Returns the group over which weights of the layer are divided, or None.

    Call it in the layer's forward. Before, FSDP2 has the weights divided over its own ranks.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    if not tensors:
        return None
    inside = {
        id(each) for unit in sharded(layer) if unit is not layer for each in unit.parameters()
    }
    for weight in layer.parameters():
        if isinstance(weight, tensors.DTensor) and id(weight) not in inside:
            for dim, placement in enumerate(weight.placements):
                if placement.is_shard():
                    group = weight.device_mesh.get_group(dim)
                    return group if group.size() > 1 else None
    return None


@contextmanager
def dividing(layer: nn.Module, hidden_states: Tensor, compared: dict[Any, bool]) -> Iterator[None]:
    """Keeps a part of `hidden_states` on each rank, where the block saves them for backward.

    compared: by the shape of hidden states, whether all ranks had the same ones; it adds to it.
    Raises RuntimeError if no weight of the layer is divided.
    """
    group = tensor_parallel_group(layer)
    if not group:
        raise RuntimeError(NO_GROUP)
    place, is_whole = _place(hidden_states), _is_whole(hidden_states, group, compared)

    def exchanged(tensor: Tensor) -> Handle | None:
        return _part(tensor, group) if is_whole and _place(tensor) == place else None

    with exchanging(exchanged):
        yield


def _is_whole(tensor: Tensor, group: ProcessGroup, known: dict[Any, bool]) -> bool:
    """Tells whether all ranks have this tensor, or each has a part of the sequence of its own.

    The first call of each shape compares them, in an all-gather of a hash, and waits for it.
    """
    if not hasattr(tensor, "placements") and all(known.values()) and tensor.shape not in known:
        own = quick_hash(tensor).view(1)
        every = own.new_empty(group.size())
        dist.all_gather_into_tensor(every, own, group=group)
        known[tensor.shape] = bool((every == own).all())
    return all(known.values())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    local = local_part(tensor)
    return address_of(local.untyped_storage()), local.storage_offset(), *local.shape


def _part(tensor: Tensor, group: ProcessGroup) -> Handle | None:
    local, placements = local_part(tensor.detach()), getattr(tensor, "placements", ())
    if not fills_its_memory(local) or any(not each.is_replicate() for each in placements):
        return None
    size, shape, stride = local.numel(), local.shape, local.stride()
    kind: Any = type(tensor)
    mesh = getattr(tensor, "device_mesh", None)
    whole = pad(local.as_strided((size,), (1,), local.storage_offset()), (0, -size % group.size()))
    own = whole.view(group.size(), -1)[group.rank()].clone()

    def gathered() -> Tensor:
        all_ranks = own.new_empty(group.size() * own.numel())
        dist.all_gather_into_tensor(all_ranks, own, group=group)
        found = all_ranks[:size].as_strided(shape, stride)
        return found if mesh is None else kind.from_local(found, mesh, placements, run_check=False)

    return gathered
