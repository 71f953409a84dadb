"""The optimizer states of a legacy Megatron checkpoint, by the names of the parameters.

The files number the states and do not name their parameters. Megatron's optimizer has a group of
parameters with weight decay and a group without it, each in the order of the model. The float32
weights beside the 16-bit ones show whether the states were mapped as they were saved.

The distributed optimizer has one long row of numbers for each state of a model chunk, in a file of
its own and without names. The parameters lie in it from the last to the first. A parameter begins
at a multiple of 64 within its bucket of gradients, and buckets follow each other without a gap. The
file does not say where buckets begin. The float32 weights show that: they round to the 16-bit
weights at the right place only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lite.checkpointing.metadata import MOST_UPDATES
from megatron_lite.convert.megatron.source import States, Unmapped
from megatron_lite.convert.megatron.torch_file import Window, read_torch_file

if TYPE_CHECKING:
    from megatron_lite.convert.megatron.legacy_source import StagePart

KEYS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"
ROWS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", MASTER: "param"}  # keys of its file
ALIGNMENT = 64
COMPARED = 256  # numbers of each parameter

Named = tuple[str, Tensor]
Own = dict[str, Tensor]  # one parameter's states


def read_states(
    saved: Mapping[tuple[int, int], tuple[Path, Any]],
    parts: Sequence[StagePart],
    *,
    distributed: bool,
) -> States:
    """Returns the states that can be mapped exactly. If there are none, a note has the reason.

    saved: by TP and pipeline rank, the folder of its files, and its optimizer.
    parts: the model's parts of all ranks, in the order of the model.
    distributed: whether the states are those of the distributed optimizer.
    """
    if not any(optimizer for _, optimizer in saved.values()):
        return States.missing("the checkpoint holds no optimizer states")
    found: dict[str, dict[str, list[Tensor]]] = {}
    updates, keys = set(), set()
    try:
        for ranks, (folder, optimizer) in sorted(saved.items(), key=lambda one: one[0][::-1]):
            chunks = [list(part.tensors.items()) for part in parts if part.ranks == ranks]
            inner = _dict(optimizer).get("optimizer", optimizer)
            groups: Any = _dict(inner).get("param_groups")
            states: Any = _dict(inner).get("state")
            _need(isinstance(groups, list), "they have no groups of parameters")
            if distributed:
                own, states = dict(_of_chunks(folder / DISTRIBUTED_OPTIMIZER, chunks)), {}
            else:
                named = [one for chunk in chunks for one in chunk]
                own = dict(_of_rank(_dict(optimizer), groups, _dict(states), named))
            updates.add(updates_of(groups, states))
            for name, of_parameter in own.items():
                keys.add(tuple(of_parameter))
                for key, tensor in of_parameter.items():
                    found.setdefault(key, {}).setdefault(name, []).append(tensor)
        _need(
            len(updates) == 1 and len(keys) == 1,
            "the ranks or the parameters have different states",
        )
    except Unmapped as reason:
        return States.missing(f"the optimizer states cannot be mapped to parameters ({reason})")
    return States(num_updates=updates.pop(), parts={key: found[key] for key in keys.pop()})


def updates_of(groups: list[Any], states: Mapping[Any, Any]) -> int:
    """Returns how many updates an optimizer made. Raises Unmapped if that is not clear."""
    steps = [one.get("step") for one in (*groups, *states.values()) if isinstance(one, dict)]
    steps.append(states.get("common_step"))
    values: set[Any] = {
        step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
        for step in steps
        if step is not None
    }
    found: Any = values.pop() if len(values) == 1 else None
    if type(found) is float and found.is_integer():
        found = int(found)
    _need(
        type(found) is int and 0 <= found <= MOST_UPDATES,
        "they do not say how many updates were made",
    )
    return found


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise Unmapped(reason)


def _dict(value: Any) -> Any:
    _need(isinstance(value, dict), "they are not those of one optimizer")
    return value


def _of_rank(
    saved: dict[Any, Any], groups: list[Any], by_number: dict[Any, Any], named: Sequence[Named]
) -> Iterator[tuple[str, Own]]:
    """Yields one rank's parameters with their states."""
    masters = saved.get("fp32_from_fp16_params", saved.get("fp32_from_fp16"))
    decays = [_decays(group) for group in groups]
    _need(
        len(set(decays)) == len(decays),
        f"it has {len(groups)} groups of parameters of its own choice",
    )
    count = 0
    for place, (group, decay) in enumerate(zip(groups, decays, strict=True)):
        # Megatron's rule: biases and one-dimensional parameters do not decay.
        members = [
            (name, weight)
            for name, weight in named
            if decay is not (name.endswith(".bias") or weight.ndim == 1)
        ]
        numbers = _row(group.get("params"), len(members), "parameters than the model")
        _need(all(type(one) is int for one in numbers), "a group does not number its parameters")
        held: list[Any] = [None] * len(members)
        if masters is not None:
            _need(
                isinstance(masters, list) and place < len(masters), "a group has no float32 weights"
            )
            held = _row(masters[place], len(members), "float32 weights")
        for number, master, (name, weight) in zip(numbers, held, members, strict=True):
            yield name, _states(by_number.get(number), master, masters is not None, name, weight)
        count += len(members)
    _need(count == len(named), "some parameters are in no group")


def _row(value: Any, length: int, what: str) -> Any:
    _need(isinstance(value, list) and len(value) == length, f"a group has another number of {what}")
    return value


def _decays(group: Any) -> bool:
    """Returns whether the parameters of a group have weight decay."""
    if type(_dict(group).get("wd_mult")) is float:
        return bool(group["wd_mult"])
    return group.get("weight_decay") != 0.0


def _states(saved: Any, master: Any, has_master: bool, name: str, weight: Tensor) -> Own:
    own = {key: saved.get(key) if isinstance(saved, dict) else None for key in KEYS}
    _need(
        all(isinstance(one, Tensor) and one.shape == weight.shape for one in own.values()),
        f"{name} has no states {' and '.join(KEYS)} of its shape",
    )
    if has_master:
        _need(
            _is_master(master, weight),
            f"the float32 weights of {name} are not those of its 16-bit weights",
        )
        own[MASTER] = master
    return own  # type: ignore[return-value]


def _is_master(master: Any, weight: Tensor) -> bool:
    """Returns whether these are the float32 weights of a parameter, by its first numbers."""
    if not isinstance(master, Tensor) or master.shape != weight.shape:
        return False
    head = master.flatten()[:COMPARED].to(weight.dtype)
    return torch.equal(head, weight.flatten()[:COMPARED])


def _of_chunks(path: Path, chunks: Sequence[Sequence[Named]]) -> Iterator[tuple[str, Own]]:
    """Yields the parameters of one rank with their states of the distributed optimizer.

    chunks: the names and weights of each model chunk, in the order of the model's parameters.
    """
    _need(path.exists(), f"{path.parent.name} has no {path.name}")
    value = read_torch_file(Window(path))
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    _need(
        isinstance(value, dict) and value.get("buckets_coalesced") is True,
        "the file of the distributed optimizer is of an older release",
    )
    buffers = [value[key] for key in sorted(key for key in value if type(key) is int)]
    _need(
        len(buffers) == len(chunks),
        "the distributed optimizer has other buffers than the model has chunks",
    )
    for buffer, named in zip(buffers, chunks, strict=True):
        rows = _rows(buffer)
        for (name, weight), start in zip(
            reversed(named), _starts(rows[MASTER], named), strict=True
        ):
            yield name, {key: _part(row, start, weight) for key, row in rows.items()}


def _rows(buffer: Any) -> Own:
    by_dtype = list(buffer.values()) if isinstance(buffer, dict) else []
    _need(
        len(by_dtype) == 1 and isinstance(by_dtype[0], dict),
        "a buffer of the distributed optimizer has several dtypes",
    )
    rows = {key: by_dtype[0].get(name) for key, name in ROWS.items()}
    shapes = {one.shape if isinstance(one, Tensor) else () for one in rows.values()}
    _need(
        len(shapes) == 1 and len(shapes.pop()) == 1,
        "a buffer of the distributed optimizer holds other states than Adam's",
    )
    return rows


def _starts(masters: Tensor, named: Sequence[Named]) -> Iterator[int]:
    """Yields where each parameter begins, from the last parameter to the first."""
    bucket = end = 0
    for name, weight in reversed(named):
        # The parameter is in the bucket of the one before, at the next multiple of 64, or it begins
        # a bucket of its own right behind.
        aligned = bucket + -(-(end - bucket) // ALIGNMENT) * ALIGNMENT
        start = next((one for one in (aligned, end) if _fits(masters, weight, one)), None)
        if start is None:
            raise Unmapped(f"{name} is not where the distributed optimizer should have it")
        if start != aligned:
            bucket = start
        yield start
        end = start + weight.numel()
    _need(end == len(masters), "the distributed optimizer holds more than the model's parameters")


def _fits(masters: Tensor, weight: Tensor, start: int) -> bool:
    return start + weight.numel() <= len(masters) and _is_master(
        _part(masters, start, weight), weight
    )


def _part(row: Tensor, start: int, weight: Tensor) -> Tensor:
    return row[start : start + weight.numel()].view(weight.shape)
