"""`--hf-config FILE`: a model's shape from a config.json, and flags that override it."""

import json

import pytest

from arguments import parse_args
from megatron_lite.config.hf_config import from_hf
from megatron_lite.config.model import ModelConfig
from tests.config.test_hf_config import GPT2, LLAMA_3_8B, QWEN2_0_5B
from tests.support.commands import fault_of

RUN = ["--seq-length", "64", "--micro-batch-size", "1"]


def written(folder, text, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(text), **values}))
    return str(path)


@pytest.mark.parametrize("text", [GPT2, LLAMA_3_8B, QWEN2_0_5B], ids=["gpt2", "llama", "qwen2"])
def test_the_file_gives_the_model_and_its_vocabulary(text, tmp_path):
    path = written(tmp_path, text)
    expected = from_hf(json.loads(text))
    for source in (path, str(tmp_path)):
        parsed = parse_args([*RUN, "--hf-config", source])
        assert parsed.config.model == ModelConfig(**expected.fields)
        assert parsed.config.tokenizer.true_vocab_size == expected.vocab_size
        assert not [notice for notice in parsed.notices if "--hf-config" in notice]


def test_flags_override_the_file_and_a_notice_names_both(tmp_path):
    path = written(tmp_path, LLAMA_3_8B)
    flags = ["--num-layers", "4", "--vocab-size", "999", "--hidden-size", "4096"]
    parsed = parse_args([*RUN, "--hf-config", path, *flags])
    assert parsed.config.model.num_layers == 4
    assert parsed.config.tokenizer.true_vocab_size == 1000
    told = [notice for notice in parsed.notices if "--hf-config" in notice]
    assert told == [
        f"--num-layers 4 replaces 32 of --hf-config {path}",
        f"--vocab-size 999 replaces 128255 of --hf-config {path}",
    ]


def test_what_does_not_map_exactly_is_refused(tmp_path):
    def fault(*flags):
        return fault_of(parse_args, [*RUN, "--hf-config", *flags])

    path = written(tmp_path, LLAMA_3_8B, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "does not map exactly: rope_scaling 'dynamic', which depends" in fault(path)
    path = written(tmp_path, LLAMA_3_8B, model_type="diffllama")
    assert "'diffllama' has no counterpart here (its attention" in fault(path)
    assert "No such file" in fault(str(tmp_path / "gone"))
    assert "each describe the model: give one" in fault(path, "--config-json", path)
