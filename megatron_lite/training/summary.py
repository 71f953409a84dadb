"""The start and the end of a run: its settings, and what was predicted of its steps beside what was
measured.

The last lines of the log have the predictions as text. A JSON file beside the metrics,
METRICS.summary.json, has them for other programs.
"""

from __future__ import annotations

import platform
import shlex
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_lite.checkpointing.step_files import Progress, step_directory
from megatron_lite.config.checks import printable, shown
from megatron_lite.config.invocation import subcommand
from megatron_lite.config.notices import Here
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import changed_settings, run_fields
from megatron_lite.config.units import plural
from megatron_lite.parallel import torch_internals
from megatron_lite.parallel.state import ParallelState

from .terminal import log_file_path

if TYPE_CHECKING:
    from .loop import Trainer

# The texts at the start of a run: its settings, what computes it, and what notices ask torch.
#
# The terminal gets the settings that differ from their defaults, as flags. The log file gets the
# dotted table of all arguments, in Megatron's form.


def arguments_table(config: RunConfig) -> str:
    """Returns the dotted table of all arguments as Megatron prints it, sorted by name."""
    rows = config.values
    lines = [
        printable(f"  {field} {'.' * (48 - len(field))} {rows[field]}") for field in sorted(rows)
    ]
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *lines,
            "-------------------- end of arguments ---------------------",
        ]
    )


def ranks_line(parallel: ParallelState) -> str:
    """Returns the line with the sizes of the parallel groups, and what computes."""
    experts = parallel.experts
    spread = "" if experts is None else f", expert-parallel {experts.ep_size} x {experts.tp_size}"
    if parallel.num_instances > 1:
        spread += f" (states over {parallel.shard_size}, {parallel.num_instances} instances)"
    return (
        f"{plural(parallel.world_size, 'rank')}: tensor-parallel {parallel.tp_size}, "
        f"context-parallel {parallel.cp_size}, pipeline-parallel {parallel.pp_size}, data-parallel "
        f"{parallel.dp_size}{spread}, on {described(parallel.device)}"
    )


def short_settings(config: RunConfig) -> list[str]:
    """Returns the settings that differ from their defaults: a heading, and one line a topic.

    Of a long value they have the beginning.
    """
    log = log_file_path(config)
    everything = "--dump-config prints all" if log is None else f"all of them: {log}"
    topics: dict[str, list[str]] = {}
    for name, (flag, *values) in changed_settings(config).items():
        topic = run_fields()[name].topic.replace("_", " ")
        text = shown(shlex.join(values))
        topics.setdefault(topic, []).append(f"{flag} {text}".rstrip())
    lines = (f"  {topic:12} {' '.join(settings)}" for topic, settings in topics.items())
    heading = f"settings that differ from the defaults ({everything})"
    return [*map(printable, (heading, *lines))]


# Raised whenever the same flags give other low bits on the same machine: "Bits changed" in
# CHANGELOG.md.
BITS = 2


def here(precision: str) -> Here:
    """Returns what the notices of a run with this precision say about this machine."""
    missing = ", ".join(torch_internals.MISSING)
    multiplies = precision == "fp32"  # whether oneDNN has instructions for 16-bit products
    if not multiplies and torch.backends.mkldnn.is_available():
        supports = getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported", lambda: True)
        multiplies = bool(supports())
    return Here(f"torch {torch.__version__} lacks {missing}" if missing else "", multiplies)


def described(device: torch.device) -> str:
    """Returns one line about what computes, for a reader who compares it with another run's.

    Runs with different lines can differ in their low bits. Equal lines promise nothing.
    """
    if device.type != "cpu":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, bits {BITS}"
    return (
        f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}, "
        f"{plural(torch.get_num_threads(), 'thread')} a rank, torch {torch.__version__}, "
        f"bits {BITS}"
    )


FIRST_STEPS = 2  # whose times do not count: kernels compile, and the peak is measured


def summary_of(trainer: Trainer) -> dict[str, Any]:
    """Returns the figures of a run, as its file has them. A figure that is not known is None.

    peak_bytes_*: the peak of a step on the rank that holds most, and what the allocator of a GPU
        reserved.
    step_ms_*: the time of a step; the measured one is the median of the steps after the second.
    machine, pace: the name and the pace of the machine for which the time was predicted.
    num_ranks: the ranks of the run.
    """
    config, parallel, peak = trainer.config, trainer.parallel, trainer.peak
    machine, predicted, later = None, None, trainer.seconds[FIRST_STEPS:]
    given = config.logging.machine
    if given is not None or parallel.device.type == "cuda":
        # Imported late: only such a run has a machine for which times are predicted.
        from megatron_lite.plan.hardware import load_hardware, machine_of_gpu
        from megatron_lite.plan.step_time import step_time

        if given is not None:
            machine = load_hardware(given)
        else:
            machine = machine_of_gpu(torch.cuda.get_device_name(parallel.device))
        if machine is not None:
            predicted = 1000.0 * step_time(config, machine, parallel.world_size).seconds
    peak_predicted, measured, reserved = peak or (None, None, None)
    return dict(
        peak_bytes_predicted=peak_predicted,
        peak_bytes_measured=measured,
        peak_bytes_reserved=reserved or None,
        step_ms_predicted=predicted,
        step_ms_measured=1000.0 * statistics.median(later) if later else None,
        machine=None if machine is None else machine.name,
        pace=None if machine is None else machine.pace,
        num_ranks=parallel.world_size,
    )


def step_time_text(summary: Mapping[str, Any]) -> str:
    """Returns the text of the step time if it was both predicted and measured, else ""."""
    measured, predicted = summary["step_ms_measured"], summary["step_ms_predicted"]
    if predicted is None or not measured:
        return ""
    return (
        f"{measured:.1f} ms measured, {predicted:.1f} ms predicted for {summary['machine']} "
        f"({predicted / measured:.1%} of it)"
    )


def file_lines(config: RunConfig, progress: Progress) -> Iterator[tuple[str, str]]:
    """Yields the names and the paths of the files of a run."""
    save, metrics, log = config.checkpoint.save, config.logging.metrics_jsonl, log_file_path(config)
    if save is not None and progress.iteration:
        yield "checkpoint", str(step_directory(Path(save), progress.iteration))
    if log is not None:
        yield "log", log
    if metrics is not None:
        words = [*subcommand("report"), metrics, *filter(None, [log])]
        yield "report", shlex.join(words)
