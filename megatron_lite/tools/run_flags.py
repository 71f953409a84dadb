"""The flags of a run for tools that must not depend on cli/arguments/: one for each config field.

They are the flags that `pretrain_gpt.py` has too (tests/config/test_command_line.py compares both).
Megatron's other spellings are not among them: `pretrain_gpt.py --dump-config` prints a run as JSON,
and `--config-json` takes it. This file does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.command_line import OFF_SWITCHES, flag_of
from megatron_lite.config.json_text import parse_whole_number, shown
from megatron_lite.config.pattern_text import parse_pattern, parse_window
from megatron_lite.config.run import RunConfig

PATTERNS = ("window_attn_skip_freq", "no_rope_freq")
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


class RunField(NamedTuple):
    """A field of a config class. hint: its type, without None."""

    topic: str
    name: str
    hint: Any


def run_fields() -> Iterator[RunField]:
    """Yields all fields of a run."""
    hints = typing.get_type_hints(RunConfig)
    for topic in dataclasses.fields(RunConfig):
        own = typing.get_type_hints(hints[topic.name])
        for field in dataclasses.fields(hints[topic.name]):
            yield RunField(topic.name, field.name, _without_none(own[field.name]))


def add_run_flags(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """Adds a flag for every field. A flag that is not given stores nothing.

    without: the fields whose flags mean something else in this tool.
    """
    group = parser.add_argument_group(
        "the run", "the flags of `megatron-lite train`; see its --help for their meaning"
    )
    for field in run_fields():
        if field.name in without:
            continue
        options: dict[str, Any] = dict(dest=field.name, default=argparse.SUPPRESS)
        options["help"] = argparse.SUPPRESS
        if field.hint is bool:
            value = field.name not in OFF_SWITCHES
            options["action"] = "store_true" if value else "store_false"
        elif typing.get_origin(field.hint) is tuple and field.name != "window_size":
            options["nargs"] = "*"
        group.add_argument(flag_of(field.name), **options)


def parsed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given fields with values of their types.

    given: texts by field, lists of texts for tuples, and booleans for switches.
    Raises InputError for a text that is no value of its field.
    """
    hints = {field.name: field.hint for field in run_fields()}
    # `translate_values` reads the texts of windows and patterns, and the flags without a field.
    as_text = {"window_size", *PATTERNS} | given.keys() - hints.keys()
    return {
        name: value if name in as_text else _value(name, hints[name], value)
        for name, value in given.items()
    }


def fixed_value(text: str) -> tuple[str, Any]:
    """Returns the field and the value of "tensor-model-parallel-size=8".

    Raises InputError if no field has that name, or if the text is no value of it.
    """
    name, equals, value = text.partition("=")
    field = name.strip().removeprefix("--").replace("-", "_")
    hints = {one.name: one.hint for one in run_fields()}
    if not equals or field not in hints:
        raise InputError(
            f"--fix {shown(repr(text))}: give NAME=VALUE with the name of a flag, such as "
            "tensor-model-parallel-size=8"
        )
    return field, _value(field, hints[field], value.strip())


def build_run(values: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Returns the run of these values by topic and field.

    Raises InputError if a rule is broken.
    """
    hints = typing.get_type_hints(RunConfig)
    try:
        return RunConfig(**{topic: hints[topic](**values.get(topic, {})) for topic in hints})
    except ValueError as error:
        raise InputError(str(error)) from None


def _without_none(hint: Any) -> Any:
    """Returns the type of a field that may be None."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        left = [one for one in typing.get_args(hint) if one is not type(None)]
        return left[0]
    return hint


def _value(name: str, hint: Any, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    try:
        if name == "window_size":
            return parse_window(value)
        if name in PATTERNS:
            return parse_pattern(flag_of(name), value)
        if typing.get_origin(hint) is tuple:
            kind = typing.get_args(hint)[0]
            texts = value.split() if isinstance(value, str) else value
            return tuple(_whole_number(one) if kind is int else one for one in texts)
        if hint is bool:
            return _truth(value)
        if hint is int:
            return _whole_number(value)
        return _number(value) if hint is float else value
    except ValueError as error:
        text = str(error)
        raise InputError(text if text.startswith("--") else f"{flag_of(name)}: {text}") from None


def _whole_number(text: str) -> int:
    if not text.strip().lstrip("+-").isdigit():
        raise ValueError(f"give a whole number (got {shown(repr(text))})")
    return parse_whole_number(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"give a number (got {shown(repr(text))})") from None


def _truth(text: str) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise ValueError(f"give true or false (got {shown(repr(text))})")
