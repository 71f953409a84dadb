"""Which of torch's kernels a core attention runs, and what its queries may read.

Those that this library calls itself are in fused_attention.py, which few runs load.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.torch_internals import cpu_attention_takes_groups

if TYPE_CHECKING:
    from megatron_lite.context_parallel.documents import CuSeqlens
    from megatron_lite.parallel.sequence_spans import ContextParallel

LARGEST_FLASH_HEAD = 256
# by torch's names; FlashAttention has none for float32
KERNELS = {"flash": ("FLASH_ATTENTION", "EFFICIENT_ATTENTION"), "fused": ("CUDNN_ATTENTION",)}


class Readable(NamedTuple):
    """The keys up to its own that a query may read. Without both fields it reads them all.

    reach: query i of a window reads the keys from i - reach on.
    documents: a query reads no key of an earlier one.
    """

    reach: int | None = None
    documents: CuSeqlens | None = None


PLAIN = Readable()


def has_kernel(query: Tensor) -> bool:
    """Returns whether a kernel supports tensors of this device, dtype and head dim.

    The last dim of `query` holds the channels of a head.
    """
    channels = query.shape[-1]
    if query.device.type == "cpu":
        return True
    if query.dtype == torch.float32:  # the memory-efficient kernel
        return channels % 4 == 0
    # the flash kernel, or the memory-efficient one with a mask
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and channels % 8 == 0
        and channels <= LARGEST_FLASH_HEAD
    )


def suits_torch(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Returns whether torch's own attention keeps no more than the functions below.

    On a CPU torch 2.8 has no kernel for a key that several heads of the query share, and keeps the
    scores for backward. So it does on CUDA in float32, and for heads of another size.
    query: [s, b, a, d]. key, value: [s, b, g, d].
    """
    if key.shape[-1] != value.shape[-1]:
        return False
    takes_groups = query.element_size() == 2
    if query.device.type == "cpu":
        takes_groups = cpu_attention_takes_groups()
    return takes_groups or query.shape[2] == key.shape[2]


def kernel_context(
    backend: str, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Returns the context in which torch's attention runs the kernel of an --attention-backend.

    It has no other choice there, and raises an error if that kernel cannot run.
    """
    if device.type == "cpu" or backend not in KERNELS:
        return nullcontext
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return partial(sdpa_kernel, [getattr(SDPBackend, name) for name in KERNELS[backend]])


def heads_first(tensor: Tensor) -> Tensor:
    """Returns [n, b, a, d] as a view [b, a, n, d]."""
    return tensor.permute(1, 2, 0, 3)


def heads_last(tensor: Tensor) -> Tensor:
    """Returns [b, a, n, d] as a view [n, b, a, d]."""
    return tensor.permute(2, 0, 1, 3)


def causal_mask(query: Tensor, readable: Readable, cp: ContextParallel | None = None) -> Tensor:
    """Returns 0 for each key that a query reads, and -inf for the others, in the query's dtype.

    [s, s], or with documents [b, 1, s, s]. The mask is added to scores. query: [s, ..]. Under
    context parallelism it is [s/c, s], with the keys in the order of a gather over the ranks.
    """
    keys = queries = torch.arange(query.shape[0], device=query.device)
    if cp is not None and cp.size > 1:
        positions = cp.positions_by_rank(query.shape[0], query.device)
        keys, queries = positions.flatten(), positions[cp.rank]
    hidden = keys > queries.unsqueeze(-1)
    reach, documents = readable
    first = None if documents is None else documents.starts(len(keys))[:, queries]  # [b, s/c]
    if reach is not None:
        nearest = queries - reach
        first = nearest if first is None else first.maximum(nearest)
    if first is not None:
        hidden = hidden | (keys < first.unsqueeze(-1))
    mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return mask if documents is None else mask.unsqueeze(1)
