"""Replaces `--recompute-policy auto` by a policy, at the start of a run. Standard library only."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.byte_size import parse_bytes
from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.explain.units import size
from megatron_lite.plan.auto_policy import choose_policy
from megatron_lite.plan.budget import Budget, default_reserve
from megatron_lite.plan.hardware import Hardware


class ChosenPolicy(NamedTuple):
    """The configuration with its policy, and a line for the log."""

    config: RunConfig
    notice: str


def with_chosen_policy(
    config: RunConfig, hardware: Hardware, num_ranks: int, *, device_bytes: int | None
) -> ChosenPolicy:
    """Returns the configuration with the fastest policy that fits its --memory-budget.

    hardware: the machine for which times are compared.
    device_bytes: the memory of one rank's device, for a run without a budget.
    Raises InputError if no policy fits, with the smallest peak that can be reached, and if the
    budget is missing.
    """
    recompute = config.recompute
    assert recompute.is_to_be_chosen
    if recompute.memory_budget is not None:
        budget = parse_bytes("--memory-budget", recompute.memory_budget)
        words = f"--memory-budget {recompute.memory_budget}"
    elif device_bytes is None:
        raise InputError(
            "--recompute-policy auto needs to know how much memory a rank may use: give "
            "--memory-budget, such as --memory-budget 4GiB"
        )
    else:
        budget = Budget(device_bytes, default_reserve(device_bytes)).plan_bytes
        words = f"{size(budget)}, the GPU's memory less a reserve"
    try:
        text = choose_policy(config, hardware, budget, num_ranks)
        chosen = replace(
            config, recompute=replace(recompute, recompute_policy=text, memory_budget=None)
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    return ChosenPolicy(
        chosen, f"--recompute-policy auto chose {text!r}, the fastest policy within {words}"
    )
