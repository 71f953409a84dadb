"""JSON that is no run is refused with the place of the fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_lite.api import run_config
from megatron_lite.config.run import RunConfig


def plain() -> dict[str, Any]:
    config = run_config(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        max_position_embeddings=8,
        micro_batch_size=2,
        seq_length=8,
        vocab_size=99,
    )
    values: dict[str, Any] = json.loads(config.to_json())
    return values


def test_a_whole_number_is_read_as_a_float_where_a_float_is_meant() -> None:
    values = plain()
    values["optimizer"]["clip_grad"] = 1
    clip_grad = RunConfig.from_json(json.dumps(values)).optimizer.clip_grad
    assert clip_grad == 1.0 and isinstance(clip_grad, float)


ILL_TYPED = {
    ("model", "num_layers"): ("2", 2.0, True, None),
    ("model", "swiglu"): (1,),
    ("model", "hidden_dropout"): (False, "0.1"),
    ("model", "normalization"): (3,),
    ("training", "global_batch_size"): ("8", [8]),
    ("training", "rampup_batch_size"): (["1"], [True, 1, 1]),
    ("data", "data_path"): ("a", [1]),
    ("model", "window_size"): ("3,0", 3, [3.0, 0], [True, 0]),
    ("model", "window_attn_skip_freq"): ([1, True], "[1,0]"),
    ("model", "no_rope_freq"): (2.0, True),
}


@pytest.mark.parametrize(("topic", "field"), ILL_TYPED)
def test_an_ill_typed_field_is_refused_by_name(topic: str, field: str) -> None:
    for value in ILL_TYPED[topic, field]:
        values = plain()
        values[topic][field] = value
        with pytest.raises(ValueError, match=rf"run\.{topic}\.{field}: expected .*, got "):
            RunConfig.from_json(json.dumps(values))


def test_an_unknown_and_a_missing_field_are_named() -> None:
    values = plain()
    del values["model"]["num_layers"]
    for changed, message in (
        ({}, "run.model: missing field num_layers"),
        ({"hidden_sizes": 3}, "run.model: unknown field hidden_sizes"),
    ):
        values["model"] |= changed
        with pytest.raises(ValueError, match=message):
            RunConfig.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        (json.dumps({"model": 3}), "run: missing field data"),
        ("[" * 200_000, "brackets nested too deeply: a run is an object of objects"),
        ('{"a":' * 100_000, "brackets nested too deeply"),
        (" " * 2_000_000, "longer than 1048576 characters, which no run is"),
        ('{"model": {"num_layers": 1%s}}' % ("0" * 5000), "(5001 characters) is no whole number"),
        (
            '{"model": {"num_layers": 9223372036854775808}}',
            "9223372036854775808 is no whole number",
        ),
        ('{"model": {"num_layers": -9223372036854775809}}', "-9223372036854775809 is no whole"),
        ('{"model": {}, "model": {}}', "'model' is given twice"),
        ('{"model": {"num_layers": 2, "num_layers": 3}}', "'num_layers' is given twice"),
        ('{"optimizer": {"clip_grad": Infinity}}', "Infinity is no JSON number"),
    ],
)
def test_text_that_is_no_run_is_one_short_error(text: str, message: str) -> None:
    with pytest.raises(ValueError) as fault:
        RunConfig.from_json(text)
    assert message in str(fault.value) and len(str(fault.value)) < 300
