"""Computes a 64-bit hash of a tensor's bits and their places, and compares hashes between ranks.

    hash = number of elements + sum over words of mix(word + place * GOLDEN), modulo 2^64

A word is 8 bytes; the last word is padded with zeros. mix is the finalizer of splitmix64 (Steele,
Lea and Flood, OOPSLA 2014). It is a bijection in which every bit of the input changes half of the
output bits. One changed word always changes the hash; several changes stay unnoticed once in 2^64.
The hash uses integers only, so the order of the sum does not matter. A tensor has the same hash on
every device and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, reduce

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_lite.config.row_blocks import hashed_at_a_time
from megatron_lite.parallel.collectives import all_gather_first_dim, all_reduce_
from megatron_lite.parallel.fake_tensors import is_fake
from megatron_lite.parallel.torch_internals import sparse_indices, sparse_values

GOLDEN, FIRST, SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def tensor_hash(tensor: Tensor) -> Tensor:
    """Returns the hash, 0-d int64 on the tensor's device. Does not wait for the device."""
    words = _words(tensor)
    size = _block(words.device)
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=words.device)
    # int64 wraps around in torch, which is the arithmetic modulo 2^64 of the formula.
    keys = torch.arange(min(size, words.numel()), device=words.device) * GOLDEN
    for start in range(0, words.numel(), size):
        part = words[start : start + size]
        total += _mix_(part + keys[: part.numel()] + _wrapped(start * GOLDEN)).sum()
    return total


def quick_hash(tensor: Tensor) -> Tensor:
    """Returns a hash of the tensor's bits and places, 0-d int64. Does not wait for the device.

    It has two kernels a block where `tensor_hash` has ten: halves of words are multiplied by odd
    keys of 64 bits and added up. It takes tensors of every kind: sparse, nested, conjugated,
    DTensors by their local part. A tensor without values, such as one of a dry run, has the hash 0.
    """
    sums = []
    for data in _dense_parts(tensor.detach()):
        halves, keys = _words(data).view(torch.int32), _keys(data.device)
        blocks = (halves,) if halves.numel() <= keys.numel() else halves.split(keys.numel())
        sums += [(block * keys[: block.numel()]).sum() for block in blocks]
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    return reduce(lambda total, each: total * FIRST + each, sums)


def prepare(tensors: Iterable[Tensor]) -> None:
    """Makes the tables that hashes keep for good: 512 KiB on a CPU, 32 MiB on a GPU."""
    for tensor in tensors:
        if tensor.device.type != "meta" and not is_fake(tensor):
            _keys(tensor.device)


def differing(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Tells for each pair of tensors whether their bits differ. Waits once for each device."""
    hashes = read([quick_hash(each) for pair in pairs for each in pair])
    return [one != other for one, other in zip(hashes[::2], hashes[1::2], strict=True)]


def read(hashes: Sequence[Tensor]) -> list[int]:
    """Returns the values of 0-d tensors. Waits once for each device that holds some."""
    by_device: dict[torch.device, list[int]] = {}
    for number, each in enumerate(hashes):
        by_device.setdefault(each.device, []).append(number)
    found = {
        number: value
        for numbers in by_device.values()
        for number, value in zip(
            numbers, torch.stack([hashes[number] for number in numbers]).tolist(), strict=True
        )
    }
    return [found[number] for number in range(len(hashes))]


def tensor_hashes(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the hash of each tensor, [n] int64."""
    hashes = [tensor_hash(tensor) for tensor in tensors]
    return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)


def are_equal(hashes: Tensor, group: ProcessGroup | None) -> Tensor:
    """Returns whether all ranks of the group hold the same hashes, 0-d bool.

    Issues one all-reduce of 16 bytes per hash. Does not wait for the device.
    """
    # ~x is largest where x is smallest
    extremes = all_reduce_(torch.cat([hashes, ~hashes]), group, ReduceOp.MAX)
    largest, smallest = extremes.chunk(2)
    return (largest == ~smallest).all()


def odd_ones_out(hashes: Tensor, group: ProcessGroup | None) -> list[int]:
    """Returns the indices of this rank's hashes that at most half of the group holds.

    Issues one all-gather, and waits for the device. Returns [] for a group of one rank.
    """
    size = 1 if group is None else group.size()
    gathered = all_gather_first_dim(hashes, group).view(size, -1)
    agreeing = (gathered == hashes).sum(0)
    return [
        number for number, count in enumerate(agreeing.tolist()) if 2 * count <= size and size > 1
    ]


def _dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yields plain dense tensors that together have the bits of a tensor of any kind."""
    if tensor.device.type == "meta" or is_fake(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.is_nested:
        inner = [*tensor.unbind()]
    elif tensor.layout == torch.sparse_coo:
        inner = [sparse_indices(tensor), sparse_values(tensor)]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        inner = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.layout != torch.strided:  # the blocks of oneDNN
        inner = [tensor.to_dense()]
    elif tensor.untyped_storage().nbytes() == 0:  # it was freed, as FSDP does
        return
    else:
        dense = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
        yield torch.view_as_real(dense) if dense.is_complex() else dense
        return
    for part in inner:
        if isinstance(part, Tensor):  # a DTensor names its mesh as well
            yield from _dense_parts(part)


@cache
def _keys(device: torch.device) -> Tensor:
    """Returns odd numbers that look random, int64, one for each half word of a block."""
    return _mix_((torch.arange(_block(device), device=device) + 1) * GOLDEN) | 1


def _block(device: torch.device) -> int:
    return hashed_at_a_time(device.type)


def _words(tensor: Tensor) -> Tensor:
    """Returns the tensor's bits as int64, as a view if possible."""
    data = tensor.detach().contiguous().view(-1)
    if data.stride() == (0,):  # one element is contiguous with any stride
        data = data.repeat(1)
    data = data.view(torch.uint8)
    whole = data.numel() // 8 * 8
    # A view of bytes as int64 must begin at a multiple of 8 bytes of its storage.
    if whole == data.numel() and data.storage_offset() % 8 == 0:
        return data.view(torch.int64)
    filled = data.new_zeros(-(-data.numel() // 8) * 8)
    filled[: data.numel()] = data
    return filled.view(torch.int64)


def _mix_(words: Tensor) -> Tensor:
    # >> on int64 repeats the sign bit; the masks make the shifts logical.
    words ^= (words >> 30) & (2**34 - 1)
    words *= FIRST
    words ^= (words >> 27) & (2**37 - 1)
    words *= SECOND
    words ^= (words >> 31) & (2**33 - 1)
    return words


def _wrapped(number: int) -> int:
    """Returns the int64 that is equal to `number` modulo 2^64."""
    return (number + 2**63) % 2**64 - 2**63
