"""Trains a GPT, or prints what a run would do: the program of `pretrain_gpt.py` and `megatron-lite
train`.

    command line -> frozen RunConfig -> parallel state -> trainer -> run

Continue in `megatron_lite/training/loop.py`. The modules beside this one decide how errors and
signals end the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_lite.cli.explanation import print_dry_run, print_dry_run_memory
from megatron_lite.cli.flags import parse_args
from megatron_lite.cli.status import exit_status
from megatron_lite.config.invocation import SCRIPT, Invocation
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.launch import Launch, read_launch
from megatron_lite.parallel.one_voice import silent_unless


def main(argv: Sequence[str] | None = None, program: str = SCRIPT) -> int:
    """Runs the command line and returns the exit status.

    program: the name of the program in its help and in its messages.

    The status is 0 if the run is done, 1 if the training failed, and 2 for a fault in the input.
    """
    words = sys.argv[1:] if argv is None else argv
    return exit_status(lambda launch: run(words, launch, program), program)


def run(argv: Sequence[str], launch: Launch, program: str = SCRIPT) -> int:
    """Prints the configuration or the explanation if a flag asks for it, or else trains."""
    # Every rank meets the same faults and exits with status 2. Only rank 0 prints them.
    with silent_unless(launch.rank == 0):
        arguments = parse_args(argv, program)
    if arguments.dry_run is not None:
        print_dry_run_memory(arguments.config, arguments.dry_run, arguments.notices, launch)
        return 0
    if arguments.dump_config or arguments.explain_recompute:
        print_dry_run(
            arguments.config,
            arguments.notices,
            launch,
            program,
            explain_recompute=arguments.explain_recompute,
        )
        return 0
    launch = read_launch(local_rank=arguments.local_rank)
    return train(arguments.config, arguments.notices, launch, program)


def train(config: RunConfig, notices: Sequence[str], launch: Launch, program: str = SCRIPT) -> int:
    """Trains and returns the exit status.

    Raises InputError for a fault that is found before the ranks join the process groups.
    """
    if config.logging.log_peak_memory:
        # torch's profiler, which measures the peak on a CPU, warns when a step frees a tensor that
        # is older than the profiler. torch reads the variable when it is loaded.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imported late: these modules import torch, which takes seconds.
    from megatron_lite.cli.preparation import ready_to_train
    from megatron_lite.cli.supervised import supervised
    from megatron_lite.parallel.state import parallel_state
    from megatron_lite.training.build_trainer import build_trainer
    from megatron_lite.training.out_of_memory import memory_limited

    config, notices = ready_to_train(config, notices, launch)
    with (
        parallel_state(
            config.parallel, seed=config.training.seed, launch=launch, run=config
        ) as parallel,
        supervised(config, parallel, launch, program) as supervision,
        memory_limited(config, parallel.device),
    ):
        invocation = Invocation(program, supervision.start(notices))
        trainer = build_trainer(config, parallel, pulse=supervision.pulse, invocation=invocation)
        trainer.run(supervision.exits)
    return supervision.status
