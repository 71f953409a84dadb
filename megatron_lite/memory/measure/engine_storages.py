"""Live storages of a backward as it runs without a dispatch mode.

Where two gradients meet, the engine of autograd adds them up in place if it holds the only
reference to the first one. Under any dispatch mode the mode holds references too, and the engine
would allocate the sum. The mode here therefore adds in place itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel.torch_internals import (
    address_of,
    fills_its_memory,
    num_users_of_storage,
    num_users_of_tensor,
)

# The reference counts of a gradient and of its storage, seen from a dispatch mode, if the engine
# holds the only reference.
ONLY_REFERENCE = (4, 2)


class EngineStorages(LiveStorages):
    """Follows the storages that a backward has without a dispatch mode."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and _engine_is_caller() and _only_reference(args[0]):
            func = torch.ops.aten.add_.Tensor
        return super().__torch_dispatch__(func, types, args, kwargs)


def _engine_is_caller() -> bool:
    frame = sys._getframe(1)
    # torch wraps __torch_dispatch__ in two functions.
    wrappers = ("__torch_dispatch__", "_fn", "inner")
    while frame.f_back is not None and frame.f_code.co_name in wrappers:
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def _only_reference(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()  # a user of the storage, in each release of torch
    counts = (num_users_of_tensor(tensor), num_users_of_storage(address_of(storage)))
    return counts == ONLY_REFERENCE and fills_its_memory(tensor)
