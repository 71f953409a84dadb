"""The states of Megatron's distributed optimizer in a legacy checkpoint, by parameter.

Each rank's distrib_optim.pt has one long row of numbers for each state of a model chunk, without
names. The parameters lie in it from the last to the first. A parameter begins at a multiple of 64
within its bucket of gradients, and buckets follow each other without a gap. The file does not say
where buckets begin. The float32 weights in it show that: they round to the 16-bit weights at the
right place only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_lite.convert.megatron.torch_file import StoredTensor, TorchFile, Window

ALIGNMENT = 64
COMPARED = 256  # numbers of each parameter
# The keys in the file, by the names of the states here.
ROWS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "param"}

Named = tuple[str, StoredTensor]


def states_of_chunks(
    path: Path, chunks: Sequence[Sequence[Named]]
) -> Iterator[tuple[str, dict[str, StoredTensor]]]:
    """Yields the states of each parameter of one rank.

    chunks: the names and weights of each model chunk, in the order of the model's parameters.
    Raises ValueError if the file has another form, or if a parameter is not found in it.
    """
    value = TorchFile(Window(path)).value
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, dict) or value.get("buckets_coalesced") is not True:
        raise ValueError("the file of the distributed optimizer is of an older release")
    buffers = [one for key, one in sorted(_numbered(value))]
    if len(buffers) != len(chunks):
        raise ValueError("the distributed optimizer has other buffers than the model has chunks")
    for buffer, named in zip(buffers, chunks, strict=True):
        rows = _rows(buffer)
        for (name, weight), start in zip(
            reversed(named), _starts(rows["master"], named), strict=True
        ):
            yield name, {key: row.part(start, weight.shape) for key, row in rows.items()}


def _numbered(value: dict[Any, Any]) -> Iterator[tuple[int, Any]]:
    for key, one in value.items():
        if type(key) is int:
            yield key, one


def _rows(buffer: Any) -> dict[str, StoredTensor]:
    by_dtype = list(buffer.values()) if isinstance(buffer, dict) else []
    if len(by_dtype) != 1 or not isinstance(by_dtype[0], dict):
        raise ValueError("a buffer of the distributed optimizer has several dtypes")
    rows = {key: by_dtype[0].get(name) for key, name in ROWS.items()}
    shapes = {one.shape if isinstance(one, StoredTensor) else None for one in rows.values()}
    if len(shapes) != 1 or len(shapes.pop() or ()) != 1:
        raise ValueError("a buffer of the distributed optimizer holds other states than Adam's")
    return rows  # type: ignore[return-value]


def _starts(masters: StoredTensor, named: Sequence[Named]) -> Iterator[int]:
    """Yields where each parameter begins, from the last parameter to the first."""
    bucket = end = 0
    for name, weight in reversed(named):
        # The parameter is in the bucket of the one before, at the next multiple of 64, or it begins
        # a bucket of its own right behind.
        aligned = bucket + -(-(end - bucket) // ALIGNMENT) * ALIGNMENT
        start = next((one for one in (aligned, end) if _fits(masters, weight, one)), None)
        if start is None:
            raise ValueError(f"{name} is not where the distributed optimizer should have it")
        if start != aligned:
            bucket = start
        yield start
        end = start + torch.Size(weight.shape).numel()
    if end != masters.shape[0]:
        raise ValueError("the distributed optimizer holds more than the model's parameters")


def _fits(masters: StoredTensor, weight: StoredTensor, start: int) -> bool:
    if start + torch.Size(weight.shape).numel() > masters.shape[0]:
        return False
    head = masters.part(start, weight.shape).head(COMPARED)
    return torch.equal(head.to(weight.dtype), weight.head(COMPARED))
