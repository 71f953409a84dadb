"""A 64-bit hash of a tensor's bits and their places, on its device, and whether ranks hold the same.

    hash = sum over words of mix(word + place * GOLDEN), modulo 2^64        a word: 8 bytes; the last are filled up with zeros

mix is the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection in which every bit of the input changes half
of the output's: one changed word always changes the hash, and of several changes one in 2^64 goes unseen. Integers only, so the
sum's order does not matter: a tensor has one hash on every device and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_lite.parallel.collectives import all_gather_first_dim, all_reduce_

CHUNK = 2**16  # words: what is under way fits into a CPU's cache
LARGE_CHUNK = 2**22
GOLDEN, FIRST, SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def weight_hash(tensor: Tensor) -> Tensor:
    """0-d int64, on the tensor's device. Nothing waits for it."""
    words = _words(tensor)
    size = CHUNK if words.device.type == "cpu" else LARGE_CHUNK
    total = torch.full((), tensor.numel(), dtype=torch.int64, device=words.device)
    keys = torch.arange(min(size, words.numel()), device=words.device) * GOLDEN
    for start in range(0, words.numel(), size):
        part = words[start : start + size]
        total += _mix_(part + keys[: part.numel()] + _wrapped(start * GOLDEN)).sum()
    return total


def weight_hashes(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """[n] int64: the hash of each."""
    hashes = [weight_hash(tensor) for tensor in tensors]
    return torch.stack(hashes) if hashes else torch.zeros(0, dtype=torch.int64, device=device)


def are_equal(hashes: Tensor, group: ProcessGroup | None) -> Tensor:
    """0-d bool: whether all ranks of the group hold the same numbers. One all-reduce of 16 bytes each; nothing waits for it."""
    extremes = all_reduce_(torch.cat([hashes, ~hashes]), group, ReduceOp.MAX)  # ~x is largest where x is smallest
    largest, smallest = extremes.chunk(2)
    return (largest == ~smallest).all()


def odd_ones_out(hashes: Tensor, group: ProcessGroup | None) -> list[int]:
    """Which of this rank's numbers are not those of more than half of the group. One all-gather; waits for the device."""
    size = 1 if group is None else group.size()
    gathered = all_gather_first_dim(hashes, group).view(size, -1)
    agreeing = (gathered == hashes).sum(0)
    return [number for number, count in enumerate(agreeing.tolist()) if 2 * count <= size and size > 1]


def _words(tensor: Tensor) -> Tensor:
    """The bits as int64, a view where possible."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    if whole == data.numel() and data.storage_offset() % 8 == 0:
        return data.view(torch.int64)
    filled = data.new_zeros(-(-data.numel() // 8) * 8)
    filled[: data.numel()] = data
    return filled.view(torch.int64)


def _mix_(words: Tensor) -> Tensor:
    words ^= (words >> 30) & (2**34 - 1)  # >> repeats the sign
    words *= FIRST
    words ^= (words >> 27) & (2**37 - 1)
    words *= SECOND
    words ^= (words >> 31) & (2**33 - 1)
    return words


def _wrapped(number: int) -> int:
    """Modulo 2^64, as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63
