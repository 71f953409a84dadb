"""Prints the settings of a run at its start.

The terminal gets the settings that differ from their defaults, as flags. The log file gets the
dotted table of all arguments, in Megatron's form.
"""

from __future__ import annotations

import dataclasses
import shlex
import textwrap

from megatron_lite.config.plural import plural
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_settings import changed_settings
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.log_file import log_file_path

MOST_LINES = 18  # of settings; the heading and the line of the ranks come on top
LABEL = 15
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
    """Returns the line with the sizes of the parallel groups."""
    return (
        f"{plural(parallel.world_size, 'rank')}: tensor-parallel {parallel.tp_size}, "
        f"context-parallel {parallel.cp_size}, pipeline-parallel {parallel.pp_size}, data-parallel "
        f"{parallel.dp_size}, on {parallel.device.type}"
    )


def short_settings(config: RunConfig, *, columns: int) -> list[str]:
    """Returns at most 19 lines with the settings that differ from their defaults, by topic.

    columns: the longest line. A value may be shortened, and settings that do not fit are counted.
    """
    log = log_file_path(config)
    everything = "--dump-config prints all" if log is None else f"all of them: {log.path}"
    topics: dict[str, list[str]] = {}
    for setting in changed_settings(config):
        topics.setdefault(setting.topic, []).append(_shown(setting.words, columns - LABEL))
    lines_each = MOST_LINES
    while True:
        lines = [
            line
            for topic, settings in topics.items()
            for line in _of_topic(topic, settings, columns=columns, most=lines_each)
        ]
        if len(lines) <= MOST_LINES or lines_each == 1:
            return [f"settings that differ from the defaults ({everything})", *lines[:MOST_LINES]]
        lines_each -= 1


def _shown(words: tuple[str, ...], columns: int) -> str:
    """Returns a flag with its values, shortened to `columns` and to a value of 60 characters."""
    flag, *values = words
    text = shlex.join(values)
    longest = min(LONGEST_VALUE, columns - len(flag) - 1)
    if len(text) > longest:
        count = f" ({len(values)} words)" if len(values) > 2 else ""
        text = f"{text[: max(0, longest - 3 - len(count))]}...{count}"
    return f"{flag} {text}" if values else flag


def _of_topic(topic: str, settings: list[str], *, columns: int, most: int) -> list[str]:
    """Returns at most `most` lines of one topic. A setting is not broken over two lines."""
    rows = textwrap.wrap(
        " ".join(setting.replace(" ", "\0") for setting in settings),
        width=columns - LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if len(rows) > most:
        kept = " ".join(rows[:most]).split()
        while kept and len(kept) > 1:
            text = f"and {len(settings) - len(kept) + 1} more"
            last = textwrap.wrap(
                " ".join([*kept[:-1], text.replace(" ", "\0")]),
                width=columns - LABEL,
                break_long_words=False,
                break_on_hyphens=False,
            )
            kept.pop()
            if len(last) <= most:
                rows = last
                break
        else:
            rows = rows[:most]
    label = f"  {topic.replace('_', ' ')}"
    return [
        f"{label if not place else '':{LABEL}}{row}".replace("\0", " ")
        for place, row in enumerate(rows)
    ]
