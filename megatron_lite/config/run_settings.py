"""The settings of a run that differ from their defaults. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_lite.config.checks import flag
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import flag_words


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
    for topic in dataclasses.fields(config):
        values = getattr(config, topic.name)
        for item in dataclasses.fields(values):
            value = getattr(values, item.name)
            default, known = _default_of(item)
            if known and (value == default or _is_derived(values, item.name, default)):
                continue
            yield ShownSetting(
                topic.name,
                flag(item.name),
                _shown(value),
                _shown(default) if known else None,
                tuple(flag_words(item.name, value)),
            )


def _default_of(item: dataclasses.Field[Any]) -> tuple[Any, bool]:
    """Returns the default of a field, and whether it has one."""
    if item.default is not dataclasses.MISSING:
        return item.default, True
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory(), True
    return None, False


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
