"""Bounds the memory that FSDP2's units hold during their collectives.

    gather     FSDP2 gathers a unit into one buffer and copies the parameters out of it. Here the
               gather has ended before the copy.
    reduce     FSDP2 copies a unit's gradients into one buffer, often in a wider dtype, and reduces
               that buffer. Here the gradients that have been copied are freed first.

torch's `foreach_reduce` is meant to free the gradients before the reduction, but its loop variable
still holds the last one (seen in torch 2.13). In a unit of one large parameter, a token embedding,
the last one is all of them: a bf16 [V, h] beside the float32 one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_lite.parallel.collectives import all_gather_into_, reduce_scatter_into_
from megatron_lite.parallel.torch_internals import (
    address_of,
    num_users_of_storage,
    num_users_of_tensor,
)

if TYPE_CHECKING:
    import torch.distributed as dist

# The Python references to a gradient that only torch's loop variable holds. They are the loop
# variable, the local variable in `free_`, and the argument of getrefcount.
FREE_TO_DROP = 3


class UnitGradients:
    """The gradients of a unit's gathered parameters, from their accumulation to their reduction.

    It holds weak references, so it keeps no gradient alive.
    """

    def __init__(self) -> None:
        self._recorded = WeakTensorKeyDictionary()
        self._gradients: list[weakref.ref[Tensor]] = []

    def record(self, parameters: Iterable[Tensor]) -> None:
        """Records each gradient that these gathered parameters get from now on.

        Repeated calls change nothing.
        """
        for parameter in parameters:
            if parameter not in self._recorded and parameter.requires_grad:
                self._recorded[parameter] = True
                parameter.register_post_accumulate_grad_hook(self._note)

    def free_(self) -> None:
        """Frees the memory of the recorded gradients that are still alive and have no other reader.

        A gradient stays unchanged if Python or autograd holds a further reference to it, or if
        another tensor shares its storage.
        """
        noted, self._gradients = self._gradients, []
        for reference in noted:
            gradient = reference()
            if (
                gradient is not None
                and sys.getrefcount(gradient) <= FREE_TO_DROP
                and _owns_storage_alone(gradient)
            ):
                gradient.untyped_storage().resize_(0)
            del gradient

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._gradients.append(weakref.ref(parameter.grad))


def bound_buffers_(unit: FSDPModule, gradients: UnitGradients) -> None:
    """Makes the unit gather and reduce through the collectives of this module.

    A torch release without custom collectives for FSDP2 keeps its own collectives.
    """
    if hasattr(unit, "set_custom_all_gather") and hasattr(unit, "set_custom_reduce_scatter"):
        unit.set_custom_all_gather(_GatherWeights())  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_ReduceScatterGradients(gradients))  # type: ignore[arg-type]


class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a new buffer, as FSDP2's own collectives allocate it."""
        return torch.empty(*size, dtype=dtype, device=device)


class _GatherWeights(_Buffers):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Implements FSDP2's AllGather. Ignores async_op: it returns a finished collective.

        On a GPU the collective runs on the stream that FSDP2 has chosen.
        """
        all_gather_into_(output_tensor, input_tensor, group)


class _ReduceScatterGradients(_Buffers):
    def __init__(self, gradients: UnitGradients) -> None:
        self._gradients = gradients

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Implements FSDP2's ReduceScatter for sums. Frees the copied gradients first."""
        assert op == torch.distributed.ReduceOp.SUM, op
        self._gradients.free_()
        reduce_scatter_into_(output_tensor, input_tensor, group)
        return None


def _owns_storage_alone(tensor: Tensor) -> bool:
    """Returns whether no other tensor, in Python or in autograd, shares the tensor's storage."""
    storage = tensor.untyped_storage()
    users = num_users_of_storage(address_of(storage))
    # Two users of the storage remain: the tensor and the local variable `storage`.
    return bool(num_users_of_tensor(tensor) == 1 and users <= 2)
