"""Opens the log of a run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import datetime

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.invocation import BY_SCRIPT, Invocation
from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.logging import RunLog
from megatron_lite.training.peak_rate import peak_rate
from megatron_lite.training.run_facts import run_facts
from megatron_lite.training.start_text import arguments_table, ranks_line


def open_log(
    config: RunConfig,
    parallel: ParallelState,
    batches: BatchSchedule,
    progress: Progress,
    *,
    num_iterations: int,
    shows_peak: bool,
    invocation: Invocation = BY_SCRIPT,
) -> RunLog:
    """Returns the log of a run that goes on from `progress`. Its first line is about MFU.

    shows_peak: whether the run measures the peak of a step.
    invocation: how a command line started the run. The log file gets the notices that were printed.
    Raises InputError on rank 0 if a file of the log cannot be opened.
    """
    writes = parallel.rank == 0
    peak = peak_rate(config.logging, parallel.device, bf16=config.training.precision != "fp32")
    facts = run_facts(
        config,
        batches,
        progress,
        num_iterations=num_iterations,
        world_size=parallel.world_size,
        device=parallel.device,
        peak=peak,
    )
    log = RunLog(
        config,
        facts,
        enabled=writes,
        start=progress,
        program=invocation.program,
        shows_peak=shows_peak,
        opening=[*_opening(config, parallel), *invocation.printed] if writes else (),
    )
    log.line(peak.line())
    return log


def _opening(config: RunConfig, parallel: ParallelState) -> Iterator[str]:
    yield f"started {datetime.now():%Y-%m-%d %H:%M:%S} on {socket.gethostname()}"
    yield arguments_table(config)
    yield ranks_line(parallel)
