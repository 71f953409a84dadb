"""The start of a run, and its supervision, which watches over the ranks and turns each error into
an exit status.

The supervision lasts from when the ranks have joined the process groups until they leave them.

    error of the run             reported by                          exit status
    none                                                              0
    TrainingError                rank 0                               1
    RecomputeMismatch            each rank that finds one             1
    InputError                   the first rank that meets one        2
    any other                    the rank that failed (watch.py)      1
    a signal, Ctrl-C             the rank that it reached first       128 + its number

The last two rows end the process at once: the process groups of a broken run cannot be left in an
orderly way.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_lite.config.checks import InputError, PeerError, input_faults
from megatron_lite.config.notices import notices as notices_of
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.launch import Launch, allocator_settings
from megatron_lite.parallel.messages import print_fault
from megatron_lite.parallel.signals import Stopped
from megatron_lite.parallel.state import ParallelState, choose_device
from megatron_lite.supervision.exits import Exits, Verdict, stopped_by
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.out_of_memory import memory_bytes, memory_limited
from megatron_lite.training.step import TrainingError
from megatron_lite.training.summary import arguments_table, ranks_line, short_settings
from megatron_lite.training.terminal import console, print_lines

if TYPE_CHECKING:
    from megatron_lite.supervision.watch import Watch


def ready_to_train(
    config: RunConfig, notices: Sequence[str], launch: Launch
) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the configuration with which training can begin, and the notices of the run.

    It is completed by the vocabulary size of the tokenizer's files.

    It also has the policy that `--recompute-policy auto` chooses.
    notices: those of the command line.
    Raises InputError if a setting that training needs is missing, if a file of the tokenizer has a
    fault, or if no policy fits.
    """
    with input_faults():
        config.check_complete_for_training()
    device = choose_device(config.parallel, launch)
    on_gpu = device.type == "cuda"
    if on_gpu:
        notices = (*notices, *(f"CUDA's allocator has {one}" for one in allocator_settings()))
    if config.tokenizer.tokenizer_type != "NullTokenizer":
        from megatron_lite.data.tokenizers import resolve_vocabulary

        config = replace(config, tokenizer=resolve_vocabulary(config.tokenizer))
    if not config.recompute.is_to_be_chosen:
        return config, tuple(notices)
    from megatron_lite.plan.auto_policy import with_chosen_policy
    from megatron_lite.plan.hardware import machine_for_policy

    gpu = torch.cuda.get_device_name(device) if on_gpu else None
    config, notice = with_chosen_policy(
        config,
        machine_for_policy(config.logging.machine, device=device.type, gpu_name=gpu),
        launch.world_size,
        device_bytes=memory_bytes(device) if on_gpu else None,
    )
    return config, (*notices, notice)


def print_start(
    config: RunConfig, parallel: ParallelState, notices: Sequence[str]
) -> tuple[str, ...]:
    """Prints on rank 0 the notices of the run, its settings (Megatron's table of all arguments
    under --log-style megatron, else those that differ from their defaults), and the sizes of the
    parallel groups. Returns these notices, for the log file; none on other ranks.

    notices: the notices of the command line.
    """
    if parallel.rank != 0:
        return ()
    device = parallel.device.type
    placed = notices_of(config, "placement", device=device, world_size=parallel.world_size)
    settings = short_settings(config)
    if config.logging.log_style == "megatron":
        settings = [arguments_table(config)]
    with suppress(OSError):  # the log warns of it
        print_lines([*notices, *placed, *settings, ranks_line(parallel)], console())
    return (*notices, *placed)


def supervised(
    config: RunConfig, parallel: ParallelState, launch: Launch, program: str, notices: Sequence[str]
) -> int:
    """Trains, watches over the ranks meanwhile, and returns the exit status.

    program: the name with which each message begins. notices: those of the command line.

    An error that ends the run becomes an exit status, by the table of this module.
    """
    exits, status = Exits(config.training, parallel), 0

    def new_watch() -> Watch:
        # Imported late: a run of one rank needs it only to end at a signal.
        from megatron_lite.supervision.watch import Watch

        return Watch(
            parallel,
            exits.pulse,
            timeout=config.parallel.timeout_seconds,
            graceful=config.training.exit_signal_handler,
            owns_store=not launch.agent_owns_store,
            program=program,
        )

    with new_watch() if parallel.world_size > 1 else nullcontext() as watch:
        # The outer try also catches a signal that arrives while the inner one reports an error.
        try:
            try:
                exits.listen()  # not before: a signal would raise outside of every handler
                with memory_limited(config, parallel.device):
                    printed = print_start(config, parallel, notices)
                    build_trainer(config, parallel).run(exits, printed)
            except Exception as error:
                status = _status_after(error, exits, watch, parallel.rank, program)
        except (Stopped, KeyboardInterrupt) as stopped:
            own = stopped_by(signal.SIGINT, parallel.rank)
            if isinstance(stopped, Stopped):
                name = signal.Signals(stopped.number).name
                text = f"{name} (--exit-signal-handler): nothing was trained, nothing is saved"
                own = Verdict(parallel.rank, 128 + stopped.number, text)
            (watch or new_watch()).end(own)
        exits.finish()
    return status


def _status_after(
    error: Exception, exits: Exits, watch: Watch | None, rank: int, program: str
) -> int:
    """Reports the error and returns the exit status, or ends the process.

    watch: None in a run of one rank. There Python reports an unknown error, with its traceback.
    """
    if isinstance(error, TrainingError):
        if rank == 0:
            print_fault(error, rank, program=program)
        return 1
    from megatron_lite.recompute.replay import RecomputeMismatch

    if isinstance(error, RecomputeMismatch):
        print_fault(f"--recompute-verify: {error}", rank, program=program, always_named=True)
        return 1
    exits.begin()  # a signal from the launcher must not disturb what follows
    if isinstance(error, InputError):
        # This rank reports before it leaves the groups: leaving ends the ranks that wait for it.
        after_others = isinstance(error, PeerError)
        if watch is None or watch.is_first_to_say(str(error), after_others=after_others):
            print_fault(error, rank, program=program)
        return 2
    if watch is None:
        raise error
    watch.leave(watch.explain(error))
