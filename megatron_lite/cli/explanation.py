"""The output of `--dump-config` and `--explain-recompute`, which print instead of training.

The module does not import torch, which would take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_lite.config.checks import InputError
from megatron_lite.config.recompute_notices import recompute_notices
from megatron_lite.config.run import RunConfig
from megatron_lite.data.tokenizers import resolve_vocabulary
from megatron_lite.memory.explain.report import explain, likely_device
from megatron_lite.memory.explain.report_text import report_text
from megatron_lite.parallel.launch import Launch
from megatron_lite.plan.chosen_policy import with_chosen_policy
from megatron_lite.plan.machine_choice import machine_for_policy


def print_dry_run(
    config: RunConfig, notices: Sequence[str], launch: Launch, *, explain_recompute: bool
) -> None:
    """Prints the explanation, on rank 0 only, or else the configuration as JSON on every rank."""
    if not explain_recompute:
        print(config.to_json())
    elif launch.rank == 0:
        print(*explanation(config, notices, launch.world_size), sep="\n")


def explanation(config: RunConfig, notices: Sequence[str], world_size: int = 1) -> list[str]:
    """Returns the lines that `--explain-recompute` prints.

    The configuration needs only the fields that decide sizes, not those that training needs.

    world_size: the number of ranks that the launcher started. 1: the explanation is for one
        data-parallel rank, since no launcher started more.

    Raises InputError for a fault in the tokenizer's files, and for a batch or a number of ranks
    that the run would refuse.
    """
    config = replace(config, tokenizer=resolve_vocabulary(config.tokenizer))
    if config.recompute.is_to_be_chosen:
        device = likely_device(config.parallel.distributed_backend)
        machine = machine_for_policy(config.logging.machine, device=device, gpu_name=None)
        num_ranks = max(world_size, config.parallel.model_ranks)
        config, notice = with_chosen_policy(
            config, machine, num_ranks, device_bytes=machine.memory_bytes
        )
        notices = [*notices, notice]
    told_in_report = recompute_notices(config)
    try:
        dp_size = config.parallel.data_parallel_size(world_size) if world_size > 1 else 1
        report = explain(
            config, likely_device(config.parallel.distributed_backend), dp_size=dp_size
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    return [*(notice for notice in notices if notice not in told_in_report), report_text(report)]
