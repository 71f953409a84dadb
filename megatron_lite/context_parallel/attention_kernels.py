"""Which of torch's kernels a core attention runs, and what its queries may read: windows, and the
documents of packed samples.

Kernels that this library calls itself are in fused_attention.py, which few runs load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.sequence_spans import positions_by_rank
from megatron_lite.parallel.torch_internals import disable_current_modes

LARGEST_FLASH_HEAD = 256
# by torch's names; FlashAttention has none for float32
KERNELS = {"flash": ("FLASH_ATTENTION", "EFFICIENT_ATTENTION"), "fused": ("CUDNN_ATTENTION",)}


class CuSeqlens(NamedTuple):
    """The documents of packed samples, as lists and not as masks.

    bounds: on the host, over the samples in a row: 0, the ends of the documents, b s. A sample ends
        its last document.
    ends: the same numbers on the device, in int32.
    """

    bounds: Sequence[int]
    ends: Tensor

    @classmethod
    def of(
        cls, bounds: Sequence[int], *, batch: int, seq_length: int, device: torch.device
    ) -> CuSeqlens:
        """Returns the documents between these bounds.

        ValueError: they are no documents of `batch` whole samples.
        """
        total = batch * seq_length
        needed, rises = range(0, total + 1, seq_length), all(a < b for a, b in pairwise(bounds))
        if not rises or not {*needed} <= {*bounds} or bounds[0] != 0 or bounds[-1] != total:
            raise ValueError(
                f"the bounds of documents must rise from 0 to {total} and pass every multiple of "
                f"{seq_length}: cut those that are longer than a sequence (got {[*bounds[:9]]})"
            )
        ends = torch.tensor(bounds, dtype=torch.int32)
        if device.type == "cuda":
            ends = ends.pin_memory().to(device, non_blocking=True)
        return cls(bounds, ends)

    def starts(self, seq_length: int) -> Tensor:
        """Returns for each token, [b, s], the place of the first token of its document."""
        begins = self.ends[:-1] % seq_length
        each = begins.repeat_interleave(self.ends.diff(), output_size=self.bounds[-1])
        return each.view(-1, seq_length)

    @property
    def longest(self) -> int:
        """The tokens of the longest document."""
        return max(stop - start for start, stop in pairwise(self.bounds))

    def one_by_one(self, run: Callable[..., Iterable[Tensor]], *tensors: Tensor) -> Any:
        """Returns the results of `run` for the rows of each document, joined.

        tensors: each [b, .., n, d], as the results. They lie in memory as [n, b, .., d]. `run` gets
            contiguous rows of statistics [b, .., n].
        """
        b, _, n = tensors[0].shape[:3]
        whole: list[Tensor] = []
        for start, stop in pairwise(self.bounds):
            sample = slice(start // n, start // n + 1)
            rows = sample, slice(None), slice(start % n, (stop - 1) % n + 1)
            parts = (tensor[rows] for tensor in tensors)
            found = [*run(*(one if one.dim() > 3 else one.contiguous() for one in parts))]
            whole = whole or [
                one.new_empty(n, b, one.shape[1], *one.shape[3:]).movedim(0, 2) for one in found
            ]
            for one, part in zip(whole, found, strict=True):
                one[rows] = part
            del found, part  # before the next document has its own
        return whole


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


def causal_mask(query: Tensor, readable: Readable, cp_group: ProcessGroup | None = None) -> Tensor:
    """Returns 0 for each key that a query reads, and -inf for the others, in the query's dtype.

    [s, s], or with documents [b, 1, s, s]. The mask is added to scores. query: [s, ..]. Under
    context parallelism it is [s/c, s], with the keys in the order of a gather over the ranks.
    """
    keys = queries = torch.arange(query.shape[0], device=query.device)
    if cp_group is not None:
        positions = positions_by_rank(query.shape[0], cp_group.size(), query.device)
        keys, queries = positions.flatten(), positions[cp_group.rank()]
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


@lru_cache
def cpu_attention_takes_groups() -> bool:
    """Returns whether a head of the CPU's flash kernel finds the key and value of its group.

    Before torch 2.9 the kernel reads past the last group's key and value, and computes something
    else. Here it finds a second head, since key and value are parts of larger tensors.
    """
    with disable_current_modes(), torch.no_grad():
        heads = torch.arange(2.0).view(1, 2, 1, 1)  # [b, a, s, d]
        group = heads[:, :1]
        output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, group, group)
        return output[0, 1].item() == 0.0
