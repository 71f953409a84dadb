"""The settings of a run that differ from their defaults. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_lite.config.checks import flag
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import flag_words, run_fields


class ShownSetting(NamedTuple):
    """A setting with its topic, such as "model".

    default: None if it has no default.
    words: the words of a command line that set it, such as ("--num-layers", "4").
    """

    topic: str
    flag: str
    value: str
    default: str | None
    words: tuple[str, ...] = ()


def changed_settings(config: RunConfig) -> Iterator[ShownSetting]:
    """Yields the settings whose value is not the default, and those without a default.

    A setting that its topic derives from others, such as --kv-channels, counts only if its value is
    not the derived one.
    """
    for name, field in run_fields().items():
        values = getattr(config, field.topic)
        value, default = getattr(values, name), field.default
        if not field.is_required and (value == default or _is_derived(values, name, default)):
            continue
        shown = None if field.is_required else _shown(default)
        words = tuple(flag_words(name, value))
        yield ShownSetting(field.topic, flag(name), _shown(value), shown, words)


def _is_derived(values: Any, name: str, default: Any) -> bool:
    """Returns whether the topic gives the field its value itself if it is left at the default."""
    try:
        return bool(dataclasses.replace(values, **{name: default}) == values)
    except (ValueError, TypeError):
        return False


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, bool):  # not a dictionary's look-up, in which 1 is True and 0.0 is False
        return "yes" if value else "no"
    return "none" if value is None else str(value)
