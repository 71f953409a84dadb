"""The start of a run: completes and checks the configuration, and formats what rank 0 prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.data.tokenizers import resolve_vocabulary
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.state import ParallelState, choose_device
from megatron_lite.training.apex_kernels import check_kernels


def ready_to_train(config: RunConfig, launch: Launch) -> RunConfig:
    """Returns the configuration, completed by the vocabulary size of its tokenizer's files.

    Raises InputError if a setting that training needs is missing, if a chosen kernel of NVIDIA apex
    cannot be used in this run, or if a file of the tokenizer has a fault.
    """
    try:
        config.check_complete_for_training()
    except ValueError as error:
        raise InputError(str(error)) from error
    check_kernels(config, choose_device(config.parallel, launch).type)
    return dataclasses.replace(config, tokenizer=resolve_vocabulary(config.tokenizer))


def start_lines(config: RunConfig, parallel: ParallelState) -> Iterator[str]:
    """Yields the table of arguments, and a line with the sizes of the parallel groups."""
    yield arguments_table(config)
    yield (
        f"{parallel.world_size} rank(s): tensor-parallel {parallel.tp_size}, context-parallel "
        f"{parallel.cp_size}, pipeline-parallel {parallel.pp_size}, data-parallel "
        f"{parallel.dp_size}, on {parallel.device.type}"
    )


def arguments_table(config: RunConfig) -> str:
    """Returns the dotted table of all arguments as Megatron prints it, sorted by name."""
    rows = {
        field: value
        for topic in dataclasses.asdict(config).values()
        for field, value in topic.items()
    }
    lines = [f"  {field} {'.' * (48 - len(field))} {rows[field]}" for field in sorted(rows)]
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *lines,
            "-------------------- end of arguments ---------------------",
        ]
    )
