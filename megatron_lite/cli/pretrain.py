"""Trains a GPT, or prints what a run would do: the program of `pretrain_gpt.py` and `megatron-lite
train`.

    command line -> frozen RunConfig -> parallel state -> trainer -> run

Continue in `megatron_lite/training/loop.py`. supervised.py decides how errors and signals end a run
whose ranks have joined the process groups; this module has those before and after.
"""

import os
import signal
import sys
from collections.abc import Sequence

from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import SCRIPT
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.launch import Launch, read_launch, use_expandable_segments
from megatron_lite.parallel.messages import await_turn, print_fault, silent_unless
from megatron_lite.parallel.signals import die_of, safe_output

from .flags import parse_args

SPEAKS_BEFORE_S = 2.0  # that each other rank waits before it reports a fault


def main(argv: Sequence[str] | None = None, program: str = SCRIPT) -> int:
    """Runs the command line and returns the exit status.

    program: the name of the program in its help and in its messages.

    The status is 0 if the run is done, 1 if the training failed, and 2 for a fault in the input.
    After Ctrl-C the process ends by SIGINT itself, as a shell expects. It ends by SIGPIPE if nobody
    reads the output of `--help`, `--dump-config` or `--explain-recompute` to its end.
    """
    words, rank = sys.argv[1:] if argv is None else argv, 0
    try:
        launch = read_launch()
        rank = launch.rank
        with safe_output():
            return run(words, launch, program)
    except InputError as error:
        # Rank 0 reports at once and ends, and the launcher ends the ranks that wait. So only one
        # message appears, however many ranks meet the fault.
        await_turn(rank, error, seconds=SPEAKS_BEFORE_S)
        print_fault(error, rank, program=program)
        return 2
    except KeyboardInterrupt:
        if rank == 0:
            print_fault("stopped by SIGINT", rank, program=program)
        die_of(signal.SIGINT)


def run(argv: Sequence[str], launch: Launch, program: str = SCRIPT) -> int:
    """Prints the configuration or the explanation if a flag asks for it, or else trains."""
    # Every rank meets the same faults and exits with status 2. Only rank 0 prints them.
    with silent_unless(launch.rank == 0):
        arguments = parse_args(argv, program)
    if arguments.prints:
        from .explanation import print_instead

        print_instead(arguments, launch)
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
    if config.training.cuda_graph_impl == "none":  # a graph's memory stays in one piece by itself
        use_expandable_segments()
    # Imported late: these modules import torch, which takes seconds.
    from megatron_lite.parallel.state import parallel_state

    from .supervised import ready_to_train, supervised

    config, notices = ready_to_train(config, notices, launch)
    seed = config.training.seed
    with parallel_state(config.parallel, seed=seed, launch=launch, run=config) as parallel:
        return supervised(config, parallel, launch, program, notices)
