"""JSON that is no run is refused with the place of the fault.

The presets: their published numbers of parameters, and the one error.
"""

import json

import pytest

from megatron_lite.config.known_models import PRESETS
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.states import parameter_count
from tests.support.runs import tiny_run


def plain():
    return json.loads(tiny_run().to_json())


def test_a_whole_number_is_read_as_a_float_where_a_float_is_meant():
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
    ("model", "no_rope_freq"): (2.0, True, [1, True], "[1,0]"),
}


@pytest.mark.parametrize("topic, field", ILL_TYPED)
def test_an_ill_typed_field_is_refused_by_name(topic, field):
    for value in ILL_TYPED[topic, field]:
        values = plain()
        values[topic][field] = value
        with pytest.raises(ValueError, match=rf"run\.{topic}\.{field}: expected .*, got "):
            RunConfig.from_json(json.dumps(values))


def test_an_unknown_and_a_missing_field_are_named():
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
    "text, message",
    [
        ("", "Expecting value"),
        (json.dumps({"model": 3}), "run: missing field data"),
        ("[" * 200_000, "brackets nested too deeply: a run is an object of objects"),
        (" " * 2_000_000, "longer than 1048576 characters, which no run is"),
        ('{"model": {"num_layers": 1%s}}' % ("0" * 5000), "(5001 characters) is no whole number"),
        (
            '{"model": {"num_layers": 9223372036854775808}}',
            "9223372036854775808 is no whole number",
        ),
        ('{"model": {"num_layers": 2, "num_layers": 3}}', "'num_layers' is given twice"),
        ('{"optimizer": {"clip_grad": Infinity}}', "Infinity is no JSON number"),
    ],
)
def test_text_that_is_no_run_is_one_short_error(text, message):
    with pytest.raises(ValueError) as fault:
        RunConfig.from_json(text)
    assert message in str(fault.value) and len(str(fault.value)) < 300


# The sums over the tensors of the published checkpoints; tied embeddings count once.
EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,  # with its 14,848 biases of experts, 671_026_419_200
}
# Billions as the papers round them, of checkpoints that were not published.
ROUNDED = {"gpt3-175b": 175, "22b": 22, "175b": 175, "530b": 530, "1t": 1000}


def count(name):
    known = PRESETS[name]
    return parameter_count(ModelConfig(**known.fields), known.vocab_size)


@pytest.mark.parametrize("name", EXACT)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert count(name) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_a_preset_has_about_the_parameters_in_its_name(name):
    assert count(name) / 1e9 == pytest.approx(ROUNDED[name], rel=0.02)


def test_every_preset_is_compared():
    assert set(EXACT) | set(ROUNDED) == set(PRESETS)
