"""The presets: their published numbers of parameters, and the one error."""

from __future__ import annotations

import pytest

from megatron_lite.config.known_models import PRESETS, preset
from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.predict.states import parameter_count

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
}
# Billions as the papers round them, of checkpoints that were not published.
ROUNDED = {"gpt3-175b": 175, "22b": 22, "175b": 175, "530b": 530, "1t": 1000}


def count(name: str) -> int:
    known = preset(name)
    return parameter_count(ModelConfig(**known.fields), known.vocab_size)


@pytest.mark.parametrize("name", EXACT)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert count(name) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_a_preset_has_about_the_parameters_in_its_name(name: str) -> None:
    assert count(name) / 1e9 == pytest.approx(ROUNDED[name], rel=0.02)


def test_every_preset_is_compared() -> None:
    assert set(EXACT) | set(ROUNDED) == set(PRESETS)
