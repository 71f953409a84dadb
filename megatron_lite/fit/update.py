"""The memory of an optimizer, without running it: its states and the peak of its update."""

import copy
from collections import defaultdict
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel.weights import bytes_of, local_part
from megatron_lite.recompute.contents import tensors_of, unobserved

PAGED = 10**5  # elements, from which on bitsandbytes pages a state


def update_bytes(
    model: nn.Module, optimizer: Any, device: torch.device, notes: list[str]
) -> tuple[int, int]:
    """Returns the bytes of an optimizer's states that do not exist yet, and the peak of an update
    above weights, gradients and existing states.

    A copy of the optimizer runs one update of tensors that have no memory. If it reads values, it
    updates zeros on the CPU instead, one tensor of each form.

    optimizer: an optimizer, or what makes one of parameters, such as its class. One that is made of
        the model's own parameters counts as if it had been given.
    notes: gets a line if the update cannot run so, but all states exist.
    Raises ValueError if it cannot, and there are no states yet.
    """
    is_made = isinstance(optimizer, Optimizer)
    if not (is_made or callable(optimizer)):
        raise ValueError(f"optimizer {optimizer!r}: give an optimizer or its class")
    if is_made and "param_groups" not in vars(optimizer):
        raise ValueError(f"{type(optimizer).__name__} is a wrapper: give the optimizer inside")
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = optimizer.param_groups if is_made else [{"params": trained}]
    existing = bytes_of(tensors_of(list(optimizer.state.values()))) if is_made else 0
    try:
        with unobserved():  # fake tensors are ten times as slow
            new = _copy(model, optimizer, groups, "meta")
            updated = {each for group in new.param_groups for each in group["params"]}
            if is_ours := all(each.is_meta for each in updated):
                try:
                    states, temporary, _ = _update(new, device)
                except Exception:  # whatever the code of others raises without values
                    states, temporary = _of_each_form(model, optimizer, groups, device)
    except Exception as error:
        if existing:
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            notes.append(f"note: what the update takes for a time is in no figure ({told})")
            return 0, 0
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        fix = "let it run a step first" if is_made else "give the optimizer itself"
        raise ValueError(
            f"the states of {name} cannot be counted before they exist ({error}): {fix}"
        ) from error
    if is_ours:
        missing = max(0, states - existing)
        return missing, missing + temporary
    if not updated <= {*model.parameters()}:
        raise ValueError(
            "optimizer= makes one of parameters that are not the model's: give the optimizer itself"
        )
    return update_bytes(model, new, device, notes)


def _copy(model: nn.Module, optimizer: Any, groups: list[dict[str, Any]], device: str) -> Any:
    """Returns an optimizer of stand-ins for parameters, which lie on a device."""
    trained = {x: _stand_in(x, device) for one in groups for x in one["params"] if x.requires_grad}
    stand_ins = [
        {**one, "params": [trained[x] for x in one["params"] if x in trained]} for one in groups
    ]
    if not isinstance(optimizer, Optimizer):
        return optimizer(stand_ins)
    new = object.__new__(type(optimizer))
    state = defaultdict[Tensor, Any](dict)
    for x in trained.keys() & optimizer.state.keys():
        if not tensors_of(optimizer.state[x]):  # such as a seed, from the constructor
            state[trained[x]] = {**optimizer.state[x]}
    new.__setstate__(
        {"defaults": {**optimizer.defaults}, "state": state, "param_groups": stand_ins}
    )
    # What it holds besides is copied, as bitsandbytes's choices by parameter, but for the model.
    known: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    known |= {id(x): stand_in for x, stand_in in trained.items()}
    known |= {id(optimizer): new, id(optimizer.state): state}
    for name, value in vars(optimizer).items():
        is_hook = name.startswith("_optimizer_") or getattr(value, "__closure__", None)
        if name not in vars(new) and not is_hook:
            with suppress(Exception):  # not everything can be copied
                vars(new)[name] = copy.deepcopy(value, known)
    return new


def _update(new: Any, device: torch.device) -> tuple[int, int, bool]:
    """Runs one update of stand-ins, as on a device. Returns the bytes of the states, what the
    update takes above them, and whether it takes that for all tensors at once.

    A fused kernel takes nothing. Neither it nor what a graph can capture runs without a GPU.
    """
    is_at_once, is_fused = False, True
    for group in new.param_groups:
        for each in group["params"]:
            each.grad = torch.zeros_like(each)
        fused = bool(group.get("fused"))
        # Without a choice torch updates all tensors of a GPU at once, which takes memory.
        if device.type == "cuda" and group.get("foreach", 0) is None:
            group["foreach"] = not fused
        if "capturable" in group:
            group["lr"] = 1.0  # not a tensor
        group |= {"fused": False, "capturable": False}
        is_at_once |= bool(group.get("foreach"))
        is_fused &= fused
    if hasattr(new, "train"):  # as schedule-free ones
        new.train()
    with LiveStorages() as live, torch.compiler.set_stance("force_eager"):
        type(new).step(new)
        # Pages of the host serve a paged optimizer of bitsandbytes.
        is_paged = device.type == "cuda" and getattr(new, "is_paged", False)
        states = bytes_of(
            each
            for parameter, held in new.state.items()
            for each in tensors_of(held)
            if not (is_paged and parameter.numel() == each.numel() >= PAGED)
        )
        return states, 0 if is_fused else live.peak_bytes - live.total_bytes(), is_at_once


def _of_each_form(
    model: nn.Module, optimizer: Any, groups: list[dict[str, Any]], device: torch.device
) -> tuple[int, int]:
    """Returns the bytes of the states, and of the update above them, from updates of zeros."""
    found, states, most, every = dict[Any, tuple[int, int, bool]](), 0, 0, 0
    for number, group in enumerate(groups):
        for each in group["params"]:
            if not each.requires_grad:
                continue
            own = local_part(each)
            key = number, own.shape, own.stride(), own.dtype
            if key not in found:
                one = _copy(model, optimizer, [{**group, "params": [each]}], "cpu")
                found[key] = _update(one, device)
            more, temporary, is_at_once = found[key]
            states += more
            most = max(most, temporary)
            every += temporary * is_at_once
    return states, max(most, every)


def _stand_in(parameter: Tensor, device: str) -> nn.Parameter:
    own = local_part(parameter)
    empty = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=device)
    return nn.Parameter(empty.fill_(1))  # Prodigy keeps nothing of zeros
