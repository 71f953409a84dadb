"""Prints the settings of a run at its start.

The terminal gets the settings that differ from their defaults, as flags. The log file gets the
dotted table of all arguments, in Megatron's form.
"""

from __future__ import annotations

import dataclasses
import shlex

from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import changed_settings, run_fields
from megatron_lite.config.units import plural
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.log_files import log_file_path
from megatron_lite.training.run_notices import described

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
