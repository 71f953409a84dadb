"""Builds the RunConfig from the flags that are given and the file that has all other values.

The file is one of --dump-config, or a config.json of Hugging Face. A known model stands for one.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron_lite.config import alternatives, checks, hf_file
from megatron_lite.config.all_faults import Faults
from megatron_lite.config.command_line import flag_of
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.json_text import LARGEST_TEXT
from megatron_lite.config.known_models import preset
from megatron_lite.config.run import RunConfig

# A file of --dump-config holds these derived values. A flag may change the values from which they
# are derived, and they must be derived again.
DERIVED_FIELDS = (("model", "kv_channels"), ("model", "ffn_hidden_size"))
STAND_IN = 1  # for a required value that is missing or wrong


def topics() -> dict[str, type]:
    """Returns the config class of each topic, such as ModelConfig for "model".

    The topics have the order of RunConfig's fields.
    """
    hints = typing.get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}


def build_config(
    given: dict[str, Any],
    config_json: str | None,
    notices: list[str],
    faults: Faults,
    hf_config: str | None = None,
    preset_name: str | None = None,
) -> RunConfig | None:
    """Returns the RunConfig of the given fields, and of a file for all other fields.

    config_json, hf_config: the path of the file, or None. preset_name: a known model, or None.

    Adds notices to `notices` and faults to `faults`. After a broken rule the values that it names
    are taken out, so that the other rules are checked too. The result is of no use then.
    """
    values: dict[str, dict[str, Any]] = {}
    try:
        sources = {"--config-json": config_json, "--hf-config": hf_config, "--model": preset_name}
        both = [name for name, source in sources.items() if source is not None]
        if len(both) > 1:
            raise ValueError(f"{' and '.join(both)} each describe the model: give one")
        if hf_config is not None:
            values = _values_of_hf(hf_config, given, notices)
        elif preset_name is not None:
            known = preset(preset_name)
            values = _values_of_model(*known, given, notices, f"--model {preset_name}")
            if not {"bf16", "fp16"} & given.keys():
                values["training"] = {"bf16": True}
                notices.append("--bf16 is assumed for this model (--no-bf16 trains in float32)")
        elif config_json is not None:
            values = _values_of_file(config_json)
            notices += _take_out_replaced(values, given, f"--config-json {config_json}")
    except ValueError as error:
        faults.texts.append(str(error))
        values = {}
        fields_of = map(dataclasses.fields, topics().values())
        faults.fields |= {one.name for fields in fields_of for one in fields} - given.keys()
    missing: list[str] = []
    for topic, config_class in topics().items():
        fields = dataclasses.fields(config_class)
        names = {field.name for field in fields}
        values[topic] = values.get(topic, {}) | {
            name: value for name, value in given.items() if name in names
        }
        unset = [
            field.name
            for field in fields
            if field.default is dataclasses.MISSING and field.name not in values[topic]
        ]
        missing += [checks.flag(name) for name in unset if name not in faults.fields]
        values[topic] |= dict.fromkeys(unset, STAND_IN)
        faults.fields.update(unset)
    if missing:
        faults.texts.append(
            f"missing {', '.join(missing)}: give {'it' if len(missing) == 1 else 'them'} as "
            "flags, or a whole run with --config-json FILE"
        )
    return _built(values, faults)


def _built(values: Mapping[str, dict[str, Any]], faults: Faults) -> RunConfig | None:
    """Returns the run of these values by topic and field; None if a fault hides the other rules."""

    def topic_built(topic: str, config_class: type) -> Any:
        while True:
            try:
                return config_class(**values[topic])
            except ValueError as error:
                if not _take_out_named(str(error), {topic: values[topic]}, faults):
                    return None

    while True:
        built = {topic: topic_built(topic, kind) for topic, kind in topics().items()}
        if None in built.values():
            return None
        try:
            return RunConfig(**built)
        except ValueError as error:
            if not _take_out_named(str(error), values, faults):
                return None


def _take_out_named(text: str, values: Mapping[str, dict[str, Any]], faults: Faults) -> bool:
    """Takes the values that a broken rule names out. Returns whether there was one.

    The rule is a fault unless it names a field that has no usable value because of another one.
    """

    def is_named(field: str) -> bool:
        return re.search(rf"{flag_of(field)}(?![\w-])", text) is not None

    named = [(own, field) for own in values.values() for field in own if is_named(field)]
    if not any(map(is_named, faults.fields)):
        faults.texts.append(text)
    changed = False
    for own, field in named:
        faults.fields.add(field)
        value = own.pop(field)
        if field in required_fields():
            own[field] = STAND_IN
        changed |= own.get(field) != value
    return changed


@cache
def required_fields() -> frozenset[str]:
    return frozenset(
        field.name
        for config_class in topics().values()
        for field in dataclasses.fields(config_class)
        if field.default is dataclasses.MISSING
    )


def _take_out_replaced(
    values: dict[str, dict[str, Any]], given: dict[str, Any], file: str
) -> list[str]:
    """Removes from the file's values those that the given fields replace.

    Returns notices about the removed values that were not the default.
    """
    replaced = alternatives.replaced_fields(
        {name: value for topic in values.values() for name, value in topic.items()}, given
    )
    defaults = {
        field.name: field.default
        for config_class in topics().values()
        for field in dataclasses.fields(config_class)
    }
    taken = {
        name: values[topic].pop(name)
        for topic in values
        for name in replaced
        if name in values[topic]
    }
    return alternatives.notices(
        {
            name: replaced[name]
            for name in replaced
            if taken.get(name, defaults[name]) != defaults[name]
        },
        file=file,
    )


def _values_of_hf(
    path: str, given: dict[str, Any], notices: list[str]
) -> dict[str, dict[str, Any]]:
    """Returns the values of a config.json of Hugging Face by topic and field.

    Adds a notice for each key that is not read, and for each flag that says otherwise.
    """
    mapped = hf_file.read_hf_file(Path(path))
    fields = hf_file.exact_fields(mapped, Path(path))
    notices += [f"--hf-config {path}: {note}" for note in mapped.notes]
    return _values_of_model(fields, mapped.vocab_size, given, notices, f"--hf-config {path}")


def _values_of_model(
    fields: Mapping[str, Any],
    vocab_size: int,
    given: dict[str, Any],
    notices: list[str],
    source: str,
) -> dict[str, dict[str, Any]]:
    """Returns the values of a model by topic and field.

    vocab_size: V, the rows of its embedding. source: the flag that names the model. Adds a notice
    for each flag that says otherwise.
    """
    tokenizer = hf_file.tokenizer_fields(vocab_size, given)
    values = {"model": dict(fields)}
    notices += hf_file.override_notices({**values["model"], **tokenizer}, given, source)
    # The vocabulary is the model's, whichever tokenizer is chosen.
    notices += _take_out_replaced(values, given, source)
    return {**values, "tokenizer": tokenizer}


def _values_of_file(path: str) -> dict[str, dict[str, Any]]:
    """Returns the values of a --dump-config file by topic and field.

    A derived value becomes None if it equals the value that would be derived anyway.
    """
    try:
        config = RunConfig.from_json(read_input_text(path, LARGEST_TEXT))
    except checks.InputError as error:  # which names the file
        raise ValueError(f"--config-json {error}") from error
    except OSError as error:
        raise ValueError(f"--config-json {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"--config-json {path}: {error}") from error
    values = dataclasses.asdict(config)
    for topic, field in DERIVED_FIELDS:
        if dataclasses.replace(getattr(config, topic), **{field: None}) == getattr(config, topic):
            values[topic][field] = None
    return values
