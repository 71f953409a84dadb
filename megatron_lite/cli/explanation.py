"""The output of the flags that print instead of training.

They are `--dump-config`, `--explain-recompute` and `--dry-run-memory`. The module imports torch,
which takes seconds, for the last one only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron_lite.cli.planner_command import auto_settings, planner_lines
from megatron_lite.config.checks import InputError
from megatron_lite.config.dry_run_settings import DryRunConfig
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.config.notices import notices as notices_of
from megatron_lite.config.parser import help_columns
from megatron_lite.config.run import RunConfig
from megatron_lite.data.tokenizers import resolve_vocabulary
from megatron_lite.memory.explain.recompute_report import explain, likely_device
from megatron_lite.memory.explain.report_text import report_text
from megatron_lite.parallel.launch import Launch
from megatron_lite.plan.auto_policy import with_chosen_policy
from megatron_lite.plan.hardware import load_hardware, machine_for_policy


def print_dry_run(
    config: RunConfig,
    notices: Sequence[str],
    launch: Launch,
    program: str = SCRIPT,
    *,
    explain_recompute: bool,
) -> None:
    """Prints the explanation, on rank 0 only, or else the configuration as JSON on every rank.

    program: the name of the program that the user started.

    The notices are a part of the explanation. Beside JSON they go to stderr, on rank 0 only.
    """
    if not explain_recompute:
        if launch.rank == 0 and notices:
            print(*notices, sep="\n", file=sys.stderr)
        print(config.to_json())
    elif launch.rank == 0:
        print(*explanation(config, notices, launch.world_size, program), sep="\n")


def explanation(
    config: RunConfig, notices: Sequence[str], world_size: int = 1, program: str = SCRIPT
) -> list[str]:
    """Returns the lines that `--explain-recompute` prints.

    The configuration needs only the fields that decide sizes, not those that training needs.

    world_size: the number of ranks that the launcher started. 1: the explanation is for one
        data-parallel rank, since no launcher started more.
    program: the name of the program that the user started. The last lines have the command that
        starts the planner beside it.

    Raises InputError for a fault in the tokenizer's files, and for a batch or a number of ranks
    that the run would refuse.
    """
    config, device = _with_vocabulary(config), planned_device(config)
    config, chosen = _with_policy(config, world_size, device)
    notices = [*notices, *chosen]
    told_in_report = notices_of(config, "recompute")
    try:
        num_ranks = world_size if world_size > 1 else config.parallel.model_ranks
        report = explain(
            config,
            device,
            dp_size=config.parallel.data_parallel_size(num_ranks),
            others=auto_settings(config, device, num_ranks),
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    return [
        *(notice for notice in notices if notice not in told_in_report),
        report_text(report, help_columns()),
        *planner_lines(config, device, num_ranks, help_columns(), program),
    ]


def planned_device(config: RunConfig) -> str:
    """Returns the device of --machine, else the one on which training would run here."""
    backend, machine = config.parallel.distributed_backend, config.logging.machine
    if machine is None or backend == "gloo":
        return likely_device(backend)
    return load_hardware(machine).device


def _with_policy(config: RunConfig, world_size: int, device: str) -> tuple[RunConfig, list[str]]:
    """Returns the configuration with the policy that `auto` chooses, and a line about it."""
    if not config.recompute.is_to_be_chosen:
        return config, []
    machine = machine_for_policy(config.logging.machine, device=device, gpu_name=None)
    num_ranks = max(world_size, config.parallel.model_ranks)
    chosen = with_chosen_policy(config, machine, num_ranks, device_bytes=machine.memory_bytes)
    return chosen.config, [chosen.notice]


def print_dry_run_memory(
    config: RunConfig, settings: DryRunConfig, notices: Sequence[str], launch: Launch
) -> None:
    """Prints the report of a dry run, on rank 0 only.

    The configuration needs only the fields that decide sizes, not those that training needs.

    Raises InputError for a fault in the tokenizer's files, for a rank beyond the world, for a batch
    that the run would refuse, and for a setting that a dry run cannot follow.
    """
    if launch.rank != 0:
        return
    config, backend = _with_vocabulary(config), config.parallel.distributed_backend
    device = settings.dry_run_device or likely_device(backend)
    try:
        world_size = settings.world_size(config.parallel, launched=launch.world_size)
        config, chosen = _with_policy(config, world_size, device)
        notices = [*notices, *chosen]
        ranks = settings.ranks(config.parallel, config.model.num_layers, world_size=world_size)
        config.batch_schedule(config.parallel.data_parallel_size(world_size))
    except ValueError as error:
        raise InputError(str(error)) from error
    if settings.dry_run_device is None and device == "cpu" and backend == "auto":
        notices = [*notices, "no GPU is here: add --dry-run-device cuda if the run will have GPUs"]
    # Imported late: these modules import torch.
    from megatron_lite.training.dry_run import dry_run
    from megatron_lite.training.dry_run_text import dry_run_text

    measured = []
    told = partial(print, file=sys.stderr, flush=True)
    for rank in ranks:
        measured.append(dry_run(config, rank, world_size=world_size, device=device, told=told))
    print(*notices, dry_run_text(config, measured, device=device), sep="\n")


def _with_vocabulary(config: RunConfig) -> RunConfig:
    """Returns the run with the size of its vocabulary.

    With `--vocab-size` the files of the tokenizer may be missing: nothing else is read of them.
    """
    tokenizer = config.tokenizer
    files = (tokenizer.vocab_file, tokenizer.merge_file, tokenizer.tokenizer_model)
    if all(path is None or os.path.exists(path) for path in files):
        return replace(config, tokenizer=resolve_vocabulary(tokenizer))
    if tokenizer.vocab_size is not None:
        return config
    try:
        return replace(config, tokenizer=resolve_vocabulary(tokenizer))
    except InputError as error:
        raise InputError(f"{error}. With --vocab-size N it is not needed here") from None
