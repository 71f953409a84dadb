"""The start of a run: completes and checks the configuration, and formats what rank 0 prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.data.tokenizers import resolve_vocabulary
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.state import ParallelState, choose_device
from megatron_lite.plan.auto_policy import with_chosen_policy
from megatron_lite.plan.hardware import machine_for_policy
from megatron_lite.training.apex_kernels import check_kernels
from megatron_lite.training.capacity import memory_bytes
from megatron_lite.training.start_text import arguments_table, ranks_line, short_settings


class Ready(NamedTuple):
    """A configuration with which training can begin, and the notices of the run."""

    config: RunConfig
    notices: tuple[str, ...]


def ready_to_train(config: RunConfig, notices: Sequence[str], launch: Launch) -> Ready:
    """Returns the configuration, completed by the vocabulary size of its tokenizer's files.

    It also has the policy that `--recompute-policy auto` chooses.
    notices: those of the command line.
    Raises InputError if a setting that training needs is missing, or if a chosen kernel of NVIDIA
    apex cannot be used in this run. It raises InputError too if a file of the tokenizer has a
    fault, or if no policy fits.
    """
    try:
        config.check_complete_for_training()
    except ValueError as error:
        raise InputError(str(error)) from error
    device = choose_device(config.parallel, launch)
    check_kernels(config, device.type)
    config = dataclasses.replace(config, tokenizer=resolve_vocabulary(config.tokenizer))
    if not config.recompute.is_to_be_chosen:
        return Ready(config, tuple(notices))
    on_gpu = device.type == "cuda"
    gpu = torch.cuda.get_device_name(device) if on_gpu else None
    chosen = with_chosen_policy(
        config,
        machine_for_policy(config.logging.machine, device=device.type, gpu_name=gpu),
        launch.world_size,
        device_bytes=memory_bytes(device) if on_gpu else None,
    )
    return Ready(chosen.config, (*notices, chosen.notice))


def start_lines(config: RunConfig, parallel: ParallelState) -> Iterator[str]:
    """Yields the settings of the run, and a line with the sizes of the parallel groups.

    They are Megatron's table of all arguments under --log-style megatron, else the settings that
    differ from their defaults.
    """
    if config.logging.log_style == "megatron":
        yield arguments_table(config)
    else:
        yield from short_settings(config)
    yield ranks_line(parallel)
