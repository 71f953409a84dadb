"""The memory of an optimizer, without running it: its states and the peak of its update."""

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.parallel.weights import bytes_of, local_part
from megatron_lite.recompute.contents import CONSTANT, tensors_of, unobserved


def update_bytes(
    model: nn.Module, optimizer: Any, device: torch.device, notes: list[str]
) -> tuple[int, int]:
    """Returns the bytes of an optimizer's states that do not exist yet, and the peak of an update
    above weights, gradients and existing states.

    A copy of the optimizer runs one update of tensors that have no memory.

    optimizer: an optimizer, or what makes one of parameters, such as its class.
    notes: gets a line if the update cannot run so, but all states exist.
    Raises ValueError if it cannot, and there are no states yet.
    """
    is_made = isinstance(optimizer, Optimizer)
    if is_made and "param_groups" not in vars(optimizer):
        raise ValueError(f"{type(optimizer).__name__} is a wrapper: give the optimizer inside")
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = optimizer.param_groups if is_made else [{"params": trained}]
    existing = bytes_of(tensors_of(list(optimizer.state.values()))) if is_made else 0
    try:
        with unobserved():  # fake tensors are ten times as slow
            stand_ins = [
                {**one, "params": [_without_memory(x) for x in one["params"] if x.requires_grad]}
                for one in groups
            ]
            new = copy.copy(optimizer) if is_made else optimizer(stand_ins)
            new.state = defaultdict(dict)
            if is_made:
                new.param_groups = stand_ins
                # torch copies groups and states alone
                held = vars(optimizer).items()
                vars(new).update({name: one for name, one in held if isinstance(one, CONSTANT)})
            for group in new.param_groups:
                for each in group["params"]:
                    each.grad = torch.empty_like(each)
                # Without a choice torch updates all tensors of a GPU at once, which takes memory.
                is_fused = group.get("fused")
                if device.type == "cuda" and group.get("foreach", 0) is None:
                    group["foreach"] = not is_fused
                group["fused"] = False if is_fused else is_fused
            with LiveStorages() as live:
                type(new).step(new)
                states = bytes_of(tensors_of(list(new.state.values())))
                temporary = live.peak_bytes - live.total_bytes()
    except Exception as error:  # whatever the code of others raises without values
        if existing:
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            notes.append(f"note: what the update takes for a time is in no figure ({told})")
            return 0, 0
        raise ValueError(
            f"the states of {optimizer} cannot be counted before they exist ({error}): give an "
            "optimizer that has run a step"
        ) from error
    missing = max(0, states - existing)
    return missing, missing + temporary


def _without_memory(parameter: Tensor) -> nn.Parameter:
    own = local_part(parameter)
    return nn.Parameter(
        torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
    )
