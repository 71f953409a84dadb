"""Trains a GPT: `python pretrain_gpt.py --flags`, under torchrun or srun for more than one rank.

Command line -> frozen RunConfig -> parallel state -> trainer -> run. A reader's way through the project starts here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from arguments import ParsedArguments, arguments_table, parse_args
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.launch import Launch, read_launch

if TYPE_CHECKING:  # torch takes seconds
    from megatron_lite.parallel.state import ParallelState
    from megatron_lite.training.exits import Exits
    from megatron_lite.training.watch import Watch

# A fault that several ranks meet is reported once: the launcher ends the others while they wait.
SPEAKS_BEFORE_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 1 the training failed, 2 a fault in the input."""
    rank = 0
    try:
        launch = read_launch()
        rank = launch.rank
        arguments = parse_on_rank(rank, sys.argv[1:] if argv is None else argv)
        if arguments.dump_config:
            print(arguments.config.to_json())
            return 0
        if arguments.explain_recompute:
            if rank == 0:
                print(*explanation(arguments), sep="\n")
            return 0
        return train(arguments.config, arguments.notices, launch)
    except InputError as error:
        report(error, rank)
        return 2


def report(error: InputError, rank: int) -> None:
    """Prints the one message of a fault found before the ranks join: by rank 0 if it met the fault, else by one that did."""
    time.sleep(2 * SPEAKS_BEFORE_S if isinstance(error, PeerError) else SPEAKS_BEFORE_S if rank else 0.0)
    say(error, rank)


def say(error: InputError, rank: int) -> None:
    """Prints the message of a fault in the input."""
    print(f"pretrain_gpt.py: {f'[rank {rank}] ' if rank else ''}error: {error}", file=sys.stderr, flush=True)


def parse_on_rank(rank: int, argv: Sequence[str]) -> ParsedArguments:
    """The parsed command line. Every rank meets the same faults in it, and rank 0 alone says so; all exit with status 2."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(sys.stderr if rank == 0 else nowhere):
        return parse_args(argv)


def explanation(arguments: ParsedArguments) -> list[str]:
    """What `--explain-recompute` prints. Imports no torch; of the run, only what decides sizes must be known.

    InputError: faults in the tokenizer's files.
    """
    from megatron_lite.data.tokenizers import resolve_vocabulary
    from megatron_lite.memory.report import explain, likely_device
    from megatron_lite.memory.report_text import report_text

    config = replace(arguments.config, tokenizer=resolve_vocabulary(arguments.config.tokenizer))
    told_in_report = config.recompute_warnings()
    notices = [notice for notice in arguments.notices if notice not in told_in_report]
    return [*notices, report_text(explain(config, likely_device(config.parallel.distributed_backend)))]


def train(config: RunConfig, notices: Sequence[str], launch: Launch) -> int:
    """Trains as the configuration says. Returns 0, 1 where the training failed, or 2 after a fault in the input.

    Ends this process, with 1 or with 128 + a signal, where another rank is gone or a signal comes before the first iteration.
    InputError: a fault in files or launch.
    """
    from megatron_lite.data.tokenizers import resolve_vocabulary
    from megatron_lite.parallel.state import parallel_state
    from megatron_lite.training.exits import Exits, StoppedEarly
    from megatron_lite.training.watch import Watch

    try:
        config.check_complete_for_training()
    except ValueError as error:
        raise InputError(str(error)) from error
    config = replace(config, tokenizer=resolve_vocabulary(config.tokenizer))
    with parallel_state(config.parallel, seed=config.training.seed, launch=launch, run=config) as parallel:
        exits = Exits(config.training, parallel)
        with Watch(parallel, timeout=config.parallel.timeout_seconds, graceful=config.training.exit_signal_handler,
                   owns_store=not launch.agent_owns_store) as watch:
            try:
                exits.listen()
                return train_watched(config, notices, parallel, exits, watch)
            except StoppedEarly as stopped:
                watch.leave(watch.stop(stopped))


def train_watched(config: RunConfig, notices: Sequence[str], parallel: ParallelState, exits: Exits, watch: Watch) -> int:
    """The part of `train` that lies between joining and leaving the other ranks. The same, but for faults before it."""
    from megatron_lite.recompute.verify import RecomputeMismatch
    from megatron_lite.training.build import build_trainer
    from megatron_lite.training.step import TrainingError

    if parallel.rank == 0:
        print(*notices, *config.data_parallel.notices(parallel.data_size), arguments_table(config), sep="\n", flush=True)
        print(f"{parallel.world_size} rank(s): tensor-parallel {parallel.tp_size}, context-parallel {parallel.cp_size}, "
              f"pipeline-parallel {parallel.pp_size}, data-parallel {parallel.dp_size}, on {parallel.device.type}", flush=True)
    try:
        trainer = build_trainer(config, parallel)
        trainer.pulse = watch.pulse
        trainer.run(exits)
    except TrainingError as error:
        if parallel.rank == 0:
            print(f"pretrain_gpt.py: error: {error}", file=sys.stderr, flush=True)
        return 1
    except RecomputeMismatch as error:
        print(f"pretrain_gpt.py: [rank {parallel.rank}] error: --recompute-verify: {error}", file=sys.stderr, flush=True)
        return 1
    except InputError as error:  # said before the groups are left, which ends the ranks that wait for this one
        exits.begin()
        if watch.is_first_to_say(str(error), after_others=isinstance(error, PeerError)):
            say(error, parallel.rank)
        return 2
    except Exception as error:
        exits.begin()  # a signal from the launcher must not disturb what follows
        verdict = watch.explain(error)
        if verdict is None:
            raise
        watch.leave(verdict)
    return 0


if __name__ == "__main__":
    faulthandler.enable()  # a stack where a data file is truncated during the run (SIGBUS), or a library crashes
    sys.exit(main())
