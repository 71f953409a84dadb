"""--model NAME and --hf-config FILE give the model, and flags override them."""

import itertools
import json

import pytest

from arguments import parse_args
from megatron_lite import __main__ as command
from megatron_lite.cli.explanation import assumed_words
from megatron_lite.config.hf_config import from_hf
from megatron_lite.config.known_models import PRESETS
from megatron_lite.config.model import ModelConfig
from tests.config.test_hf_config import GPT2, LLAMA_3_8B, QWEN2_0_5B
from tests.support.commands import ended, fault_of, parsed_line
from tests.support.pairs import in_one_test

RUN = "--seq-length 64 --micro-batch-size 1"


@in_one_test("flag, name", itertools.product(["--model", "--preset"], PRESETS))
def test_the_name_gives_the_model_and_its_vocabulary(flag, name):
    parsed = parsed_line(f"{RUN} {flag} {name}")
    assert parsed.config.model == ModelConfig(**PRESETS[name].fields)
    assert parsed.config.tokenizer.true_vocab_size == PRESETS[name].vocab_size
    assert not [notice for notice in parsed.notices if "--model" in notice]
    assert parsed.config.training.bf16


def test_the_name_means_bf16_in_every_command_unless_a_flag_says_otherwise():
    """`plan` and `explain` assume it, and weights in float32 would not fit where they say."""
    for words, precision in (
        ("", "bf16"),
        ("--bf16", "bf16"),
        ("--fp16", "fp16"),
        ("--no-bf16", "fp32"),
    ):
        parsed = parsed_line(f"{RUN} --model gpt2 {words}")
        assert parsed.config.training.precision == precision
        told = "--bf16 is assumed for this model (--no-bf16 trains in float32)"
        assert (told in parsed.notices) == (not words)
        assert ("--bf16" in assumed_words(["--model", "gpt2", *words.split()])) == (not words)


@pytest.mark.parametrize("flag", ["--gpu", "--machine"])
def test_explain_is_of_the_gpu_that_is_named(flag):
    on_gpu = ended(command.main, f"explain --model gpt2 {flag} a100-80gb")
    assert on_gpu.status == 0 and "No GPU" not in on_gpu.out
    assert " estimate\n" in on_gpu.out and " bound\n" not in on_gpu.out
    on_cpu = ended(command.main, f"explain --model gpt2 {flag}=cpu")
    assert on_cpu.status == 0 and on_cpu.out != on_gpu.out
    wrong = ended(command.main, f"explain --model gpt2 {flag} a900")
    assert wrong.status == 2 and "no machine is called 'a900'" in wrong.err


def test_flags_override_the_model_and_a_notice_names_both():
    parsed = parsed_line(f"{RUN} --model llama3-8b --num-layers 4 --squared-relu")
    assert parsed.config.model.num_layers == 4
    assert parsed.config.model.activation == "squared_relu"
    assert [notice for notice in parsed.notices if "--model" in notice] == [
        "--num-layers 4 replaces 32 of --model llama3-8b",
        "--model llama3-8b gives --swiglu, which the flags replace",
    ]


def written(folder, text, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(text), **values}))
    return str(path)


@pytest.mark.parametrize("text", [GPT2, LLAMA_3_8B, QWEN2_0_5B])
def test_the_file_gives_the_model_and_its_vocabulary(text, tmp_path):
    path = written(tmp_path, text)
    expected = from_hf(json.loads(text))
    for source in (path, str(tmp_path)):
        parsed = parsed_line(f"{RUN} --hf-config {source}")
        assert parsed.config.model == ModelConfig(**expected.fields)
        assert parsed.config.tokenizer.true_vocab_size == expected.vocab_size
        assert not [notice for notice in parsed.notices if "--hf-config" in notice]


def test_what_does_not_map_exactly_is_refused(tmp_path):
    def fault(flags):
        return fault_of(parse_args, f"{RUN} --hf-config {flags}")

    path = written(tmp_path, LLAMA_3_8B, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "does not map exactly: rope_scaling 'dynamic', which depends" in fault(path)
    assert "No such file" in fault(tmp_path / "gone")
    assert "each describes the model. Leave one" in fault(f"{path} --config-json {path}")
