"""Records every collective that torch dispatches in a block of code, from any caller."""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.context_parallel import sharded_attention as attention
from megatron_lite.parallel.torch_internals import group_of_name
from tests.support.dispatch import Dispatches, tensors_in


class Sent(NamedTuple):
    """One collective: its name and the shape of the largest tensor that it reads or writes.

    Names are "allreduce_", "_allgather_base_", "_reduce_scatter_base_", "send" and so on. A
    functional collective has the name of the in-place one that does the same.
    """

    name: str
    shape: tuple[int, ...]


FUNCTIONAL = {
    "all_reduce": "allreduce_",
    "all_gather_into_tensor": "_allgather_base_",
    "reduce_scatter_tensor": "_reduce_scatter_base_",
    "all_to_all_single": "alltoall_base_",
}


class _Recorder(Dispatches):
    def __init__(self, sent):
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "megatron_lite":  # our one operator: torch does not dispatch its parts
            query, key, value, group, *rest = args
            with self:
                return attention._attend(query, key, value, group_of_name(group), *rest)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def saw(self, func, args, kwargs, results):
        name = func.name().split("::")[1]
        if func.namespace == "c10d" or (
            func.namespace == "_c10d_functional" and name != "wait_tensor"
        ):
            largest = max(tensors_in((args, kwargs, results)), key=Tensor.numel)
            self.sent.append(
                Sent(
                    FUNCTIONAL[name] if func.namespace == "_c10d_functional" else name,
                    tuple(largest.shape),
                )
            )


@contextmanager
def recorded_collectives():
    """Yields the list of collectives that this thread issues in the block, backward included."""
    sent = []
    with torch.autograd.set_multithreading_enabled(False), _Recorder(sent):
        yield sent
