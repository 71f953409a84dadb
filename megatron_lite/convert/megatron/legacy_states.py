"""The optimizer states of a legacy Megatron checkpoint, by the names of the parameters.

The files number the states and do not name their parameters. Megatron's optimizer has a group of
parameters with weight decay and a group without it, each in the order of the model. The float32
weights beside the 16-bit ones show whether the states were mapped as they were saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_lite.checkpointing.metadata import MOST_UPDATES
from megatron_lite.config.checks import InputError
from megatron_lite.convert.megatron.distributed_states import states_of_chunks
from megatron_lite.convert.megatron.legacy_files import DISTRIBUTED_OPTIMIZER, LegacyFiles
from megatron_lite.convert.megatron.torch_file import StoredTensor

if TYPE_CHECKING:
    from megatron_lite.convert.megatron.legacy_source import StagePart

KEYS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
COMPARED = 256  # numbers of each parameter
WEIGHTS_ONLY = "the weights alone are converted"

Named = tuple[str, StoredTensor]


@dataclass(frozen=True, kw_only=True)
class States:
    """The optimizer states that can be converted.

    keys: the states that every parameter has; () if there are none.
    tensors: by parameter and state, the part of every TP rank.
    """

    keys: tuple[str, ...] = ()
    num_updates: int = 0
    tensors: Mapping[tuple[str, str], list[StoredTensor]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _Unmapped(ValueError):
    """A reason for which the states cannot be mapped to parameters."""


def read_states(files: LegacyFiles, parts: Sequence[StagePart]) -> States:
    """Returns the states that can be mapped exactly. If there are none, a note has the reason.

    parts: the model's parts of all ranks, in the order of the model.
    """
    if not any(value.get("optimizer") for value in files.values.values()):
        return _without("the checkpoint holds no optimizer states")
    tensors: dict[tuple[str, str], list[StoredTensor]] = {}
    updates, keys = set(), set()
    try:
        for pp_rank in range(files.pp_size):
            for tp_rank in range(files.tp_size):
                ranks = (tp_rank, pp_rank)
                named = [
                    one for part in parts if part.ranks == ranks for one in part.tensors.items()
                ]
                saved = files.values[ranks].get("optimizer")
                if files.has_distributed_optimizer:
                    chunks = [list(part.tensors.items()) for part in parts if part.ranks == ranks]
                    states, step = _of_distributed(files.folders[ranks], saved, chunks)
                else:
                    states, step = _of_rank(saved, named)
                updates.add(step)
                for name, own in states.items():
                    keys.add(tuple(own))
                    for key, tensor in own.items():
                        tensors.setdefault((name, key), []).append(tensor)
        if len(updates) != 1 or len(keys) != 1:
            raise _Unmapped("the ranks or the parameters have different states")
    except _Unmapped as reason:
        return _without(f"the optimizer states cannot be mapped to parameters ({reason})")
    return States(keys=keys.pop(), num_updates=updates.pop(), tensors=tensors)


def _without(reason: str) -> States:
    return States(notes=(f"{reason}: {WEIGHTS_ONLY}",))


def _of_rank(saved: Any, named: Sequence[Named]) -> tuple[dict[str, dict[str, StoredTensor]], int]:
    """Returns one rank's states by parameter and state, and the number of updates."""
    if not isinstance(saved, dict):
        raise _Unmapped("they are not those of one optimizer")
    masters = next(
        (saved[name] for name in ("fp32_from_fp16_params", "fp32_from_fp16") if name in saved), None
    )
    inner = saved.get("optimizer", saved)
    groups, by_number = (
        inner.get(name) if isinstance(inner, dict) else None for name in ("param_groups", "state")
    )
    if not isinstance(groups, list) or not isinstance(by_number, dict):
        raise _Unmapped("they have no groups of parameters")
    found: dict[str, dict[str, StoredTensor]] = {}
    for number, (group, members) in enumerate(_members(groups, named)):
        held = _masters_of_group(masters, number, len(members))
        for place, (name, weight) in enumerate(members):
            own = _states(by_number.get(group["params"][place]), name, weight)
            if held is not None:
                own[MASTER] = _master(held[place], name, weight)
            found[name] = own
    return found, _updates(groups, by_number)


def _of_distributed(
    folder: Path, saved: Any, chunks: Sequence[Sequence[Named]]
) -> tuple[dict[str, dict[str, StoredTensor]], int]:
    """Returns one rank's states of the distributed optimizer, and the number of updates."""
    inner = saved.get("optimizer", saved) if isinstance(saved, dict) else None
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    path = folder / DISTRIBUTED_OPTIMIZER[0]
    if not isinstance(groups, list) or not path.exists():
        raise _Unmapped(f"{folder.name} has no {path.name}, or no groups of parameters")
    try:
        return dict(states_of_chunks(path, chunks)), _updates(groups, {})
    except InputError:
        raise  # the file is damaged or malicious
    except ValueError as error:
        raise _Unmapped(str(error)) from error


def _members(groups: list[Any], named: Sequence[Named]) -> list[tuple[dict[str, Any], list[Named]]]:
    """Returns the parameters of each group, in the order of its numbers."""
    decays = [_decays(group) for group in groups]
    if len(set(decays)) != len(decays):
        raise _Unmapped(f"it has {len(groups)} groups of parameters of its own choice")
    found = []
    for group, decay in zip(groups, decays, strict=True):
        # Megatron's rule: biases and one-dimensional parameters do not decay.
        members = [
            (name, weight)
            for name, weight in named
            if decay is not (name.endswith(".bias") or len(weight.shape) == 1)
        ]
        numbers = group.get("params")
        if not isinstance(numbers, list) or len(numbers) != len(members):
            raise _Unmapped("a group has another number of parameters than the model")
        if any(type(one) is not int for one in numbers):
            raise _Unmapped("a group does not number its parameters")
        found.append((group, members))
    if sum(len(members) for _, members in found) != len(named):
        raise _Unmapped("some parameters are in no group")
    return found


def _decays(group: Any) -> bool:
    """Returns whether the parameters of a group have weight decay."""
    if not isinstance(group, dict):
        raise _Unmapped("a group is no dict")
    if type(group.get("wd_mult")) is float:
        return bool(group["wd_mult"])
    return group.get("weight_decay") != 0.0


def _masters_of_group(masters: Any, number: int, count: int) -> list[Any] | None:
    if masters is None:
        return None
    if not isinstance(masters, list) or number >= len(masters):
        raise _Unmapped("a group has no float32 weights")
    held = masters[number]
    if not isinstance(held, list) or len(held) != count:
        raise _Unmapped("a group has another number of float32 weights")
    return held


def _states(saved: Any, name: str, weight: StoredTensor) -> dict[str, StoredTensor]:
    own = {} if not isinstance(saved, dict) else {key: saved.get(key) for key in KEYS}
    if not own or any(
        not isinstance(one, StoredTensor) or one.shape != weight.shape for one in own.values()
    ):
        raise _Unmapped(f"{name} has no states {' and '.join(KEYS)} of its shape")
    return own  # type: ignore[return-value]


def _master(saved: Any, name: str, weight: StoredTensor) -> StoredTensor:
    fits = (
        isinstance(saved, StoredTensor)
        and saved.shape == weight.shape
        and torch.equal(saved.head(COMPARED).to(weight.dtype), weight.head(COMPARED))
    )
    if not fits:
        raise _Unmapped(f"the float32 weights of {name} are not those of its 16-bit weights")
    return saved


def _updates(groups: list[Any], by_number: Mapping[Any, Any]) -> int:
    steps = [group.get("step") for group in groups if isinstance(group, dict)]
    steps += [one.get("step") for one in by_number.values() if isinstance(one, dict)]
    steps.append(by_number.get("common_step"))
    values = {
        int(step.read().item())
        if isinstance(step, StoredTensor) and step.shape in ((), (1,))
        else step
        for step in steps
        if step is not None
    }
    found = values.pop() if len(values) == 1 else None
    if type(found) is float and found.is_integer():
        found = int(found)
    if type(found) is not int or not 0 <= found <= MOST_UPDATES:
        raise _Unmapped("they do not say how many updates were made")
    return found
