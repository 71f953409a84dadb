"""Computes a 64-bit hash of a tensor's bits and their places.

    hash of a block = sum over its words of fold(word) * key of the place, modulo 2^64
    fold(word) = word + word / 2^31, rounded down

A word is 8 bytes. Without the fold, a changed sign of a float32 number in its upper half would add
2^63 whatever the key, so two of them would cancel. (With a fold by 2^32, two words in which both
signs change would.) Bytes after the last whole word are a block of their own, with zeros behind
them. The keys are odd and look random: they come from the finalizer of splitmix64 (Steele, Lea and
Flood, OOPSLA 2014). One changed float32 number always changes the hash; several changes stay
unnoticed about once in 2^32. The hash uses integers only, so the order of the sum does not matter.
A tensor has the same hash on every device of one type and with any number of threads.
"""

from collections.abc import Iterator, Sequence
from functools import cache, reduce

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_lite.config.row_blocks import hashed_at_a_time

from .torch_internals import has_values

Hashes = dict[tuple[int, int], Tensor]  # by address and number of bytes
GOLDEN, FIRST, SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def quick_hash(tensor: Tensor) -> Tensor:
    """Returns a hash of the tensor's bits and places, 0-d int64. Does not wait for the device.

    It takes tensors of every kind: sparse, nested, conjugated, DTensors by their local part. A
    tensor without values, such as one of a dry run, has the hash 0.
    """
    sums = []
    for data in _dense_parts(tensor.detach()):
        keys = keys_on(data.device)
        for block in _words(data, keys.numel()):
            folded = block >> 31
            sums.append(folded.add_(block).mul_(keys[: block.numel()]).sum())
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    return reduce(lambda total, each: total * FIRST + each, sums)


def hash_once(tensor: Tensor, known: Hashes) -> Tensor:
    """Returns `quick_hash(tensor)`. known: of tensors that are alive, by place; it adds to them."""
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided
    is_plain = is_plain and not tensor.is_nested and tensor.is_contiguous()
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        return quick_hash(tensor)
    key = tensor.data_ptr(), tensor.nbytes  # views of other shapes have the same bytes
    if key not in known:
        known[key] = quick_hash(tensor)
    return known[key]


def are_equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Tells whether the bits of tensors are those of others. Waits once for each device."""
    hashes = read([*map(quick_hash, [*ones, *others])])
    return hashes[: len(ones)] == hashes[len(ones) :]


def read(hashes: Sequence[Tensor]) -> list[int]:
    """Returns the values of 0-d tensors. Waits once for each device that holds some."""
    values: dict[int, int] = {}
    for device in dict.fromkeys(each.device for each in hashes):
        here = [number for number, each in enumerate(hashes) if each.device == device]
        values |= zip(here, torch.stack([hashes[number] for number in here]).tolist(), strict=True)
    return [values[number] for number in range(len(hashes))]


def _dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yields plain dense tensors that together have the bits of a tensor of any kind."""
    if not has_values(tensor):
        return
    if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor, whose collective may run yet
        inner = [tensor.trigger_wait()]
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ and _is_empty(tensor):
        inner = [*vars(tensor).values()]  # a wrapper of others, such as a MaskedTensor
    elif tensor.is_nested:
        inner = [*tensor.unbind()]
    elif str(tensor.layout).startswith("torch.sparse"):  # as a dense tensor it may be too large
        inner = tensor.__reduce_ex__(2)[1][1]  # what pickle keeps: the indices and the values
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


def _is_empty(tensor: Tensor) -> bool:
    """Tells whether a tensor of another class has no memory of its own."""
    try:
        return not tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return True


@cache
def keys_on(device: torch.device) -> Tensor:
    """Returns odd numbers that look random, int64, one for each word of a block.

    The table is kept for good: 512 KiB on a CPU, 32 MiB on a GPU.
    """
    keys = (torch.arange(hashed_at_a_time(device.type), device=device) + 1) * GOLDEN
    # >> on int64 repeats the sign bit; the mask makes the shift logical.
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        keys ^= (keys >> shift) & (2 ** (64 - shift) - 1)
        keys *= factor
    return keys | 1


def _words(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yields the tensor's bits as int64, at most `most` at once, as views if possible."""
    data = tensor.detach().contiguous().view(-1)
    if data.stride() == (0,):  # one element is contiguous with any stride
        data = data.repeat(1)
    data = data.view(torch.uint8)
    if data.storage_offset() % 8:  # where views as int64 must begin
        data = data.clone()
    whole = data.numel() // 8 * 8
    yield from data[:whole].view(torch.int64).split(most) if whole else ()
    if whole < data.numel():
        rest = data.new_zeros(8)
        rest[: data.numel() - whole] = data[whole:]
        yield rest.view(torch.int64)
