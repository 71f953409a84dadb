"""The texts at the start of a run: its settings, what computes it, and what notices ask torch.

The terminal gets the settings that differ from their defaults, as flags. The log file gets the
dotted table of all arguments, in Megatron's form.
"""

from __future__ import annotations

import dataclasses
import platform
import shlex

import torch

from megatron_lite.config.notices import Here
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import changed_settings, run_fields
from megatron_lite.config.units import plural
from megatron_lite.parallel import torch_internals
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.log_files import log_file_path

LONGEST_VALUE = 60


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

    A value of more than 60 characters is shortened.
    """
    log = log_file_path(config)
    everything = "--dump-config prints all" if log is None else f"all of them: {log}"
    topics: dict[str, list[str]] = {}
    for name, (flag, *values) in changed_settings(config).items():
        text = shlex.join(values)
        if len(text) > LONGEST_VALUE:
            count = f" ({len(values)} words)" if len(values) > 2 else ""
            text = f"{text[: LONGEST_VALUE - 3 - len(count)]}...{count}"
        topic = run_fields()[name].topic.replace("_", " ")
        topics.setdefault(topic, []).append(f"{flag} {text}".rstrip())
    return [
        f"settings that differ from the defaults ({everything})",
        *(f"  {topic:12} {' '.join(settings)}" for topic, settings in topics.items()),
    ]


# Raised whenever the same flags give other low bits on the same machine: "Bits changed" in
# CHANGELOG.md.
BITS = 2


def here(precision: str) -> Here:
    """Returns what the notices of a run with this precision say about this machine."""
    missing = ", ".join(torch_internals.MISSING)
    return Here(
        f"torch {torch.__version__} lacks {missing}" if missing else "",
        _multiplies_16_bits(precision),
    )


def described(device: torch.device) -> str:
    """Returns one line about what computes, for a reader who compares it with another run's.

    Runs with different lines can differ in their low bits. Equal lines promise nothing.
    """
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"{name}, torch {torch.__version__}, bits {BITS}"
    threads = torch.get_num_threads()
    return (
        f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}, "
        f"{threads} {'thread' if threads == 1 else 'threads'} a rank, torch {torch.__version__}, "
        f"bits {BITS}"
    )


def moved_from(computed_on: str, computes_on: str) -> tuple[str, ...]:
    """Returns the log's line about a checkpoint that something else computed; none if it did not.

    computed_on: what computed the checkpoint (`described`); "" if that is not known.
    """
    if computed_on in ("", computes_on):
        return ()
    return (
        f"the checkpoint was computed on {computed_on}; this run computes on {computes_on}, so its "
        "results can have other low bits than those of a run that stayed there",
    )


def _multiplies_16_bits(precision: str) -> bool:
    """Returns whether oneDNN, to which torch sends 16-bit products, has instructions for them."""
    question = f"_is_mkldnn_{precision}_supported"
    if precision == "fp32" or not torch.backends.mkldnn.is_available():
        return precision == "fp32"
    return not hasattr(torch.ops.mkldnn, question) or bool(getattr(torch.ops.mkldnn, question)())
