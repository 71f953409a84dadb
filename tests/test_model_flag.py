"""`--model NAME`: a known model's shape and vocabulary, flags that override it, and the report that
`megatron-lite explain` prints of it."""

from __future__ import annotations

import pytest

from arguments import parse_args
from megatron_lite import __main__ as command
from megatron_lite.cli.explain_command import assumed_words
from megatron_lite.config.known_models import PRESETS, nearest_presets, preset
from megatron_lite.config.model import ModelConfig

RUN = ["--seq-length", "64", "--micro-batch-size", "1"]
SIZES = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 1024"
    " --vocab-size 50256 --seq-length 1024 --micro-batch-size 1 --bf16"
)
POLICY = ["--recompute-policy", "every-2:full"]


@pytest.mark.parametrize("flag", ["--model", "--preset"])
@pytest.mark.parametrize("name", PRESETS)
def test_the_name_gives_the_model_and_its_vocabulary(flag: str, name: str) -> None:
    parsed = parse_args([*RUN, flag, name])
    assert parsed.config.model == ModelConfig(**preset(name).fields)
    assert parsed.config.tokenizer.true_vocab_size == preset(name).vocab_size
    assert not [notice for notice in parsed.notices if "--model" in notice]
    assert parsed.config.training.bf16


def test_the_name_means_bf16_in_every_command_unless_a_flag_says_otherwise() -> None:
    """`plan` and `explain` assume it, and weights in float32 would not fit where they say."""
    for words, precision in (
        ([], "bf16"),
        (["--bf16"], "bf16"),
        (["--fp16"], "fp16"),
        (["--no-bf16"], "fp32"),
    ):
        parsed = parse_args([*RUN, "--model", "gpt2", *words])
        assert parsed.config.training.precision == precision
        told = "--bf16 is assumed for this model (--no-bf16 trains in float32)"
        assert (told in parsed.notices) == (words == [])
        assert ("--bf16" in assumed_words(["--model", "gpt2", *words])) == (words == [])


@pytest.mark.parametrize("flag", ["--gpu", "--machine"])
def test_explain_is_of_the_gpu_that_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["explain", "--model", "gpt2", flag, "a100-80gb"]) == 0
    on_gpu = capsys.readouterr().out
    assert "No GPU" not in on_gpu
    assert " estimate\n" in on_gpu and " bound\n" not in on_gpu
    assert command.main(["explain", "--model", "gpt2", f"{flag}=cpu"]) == 0
    assert capsys.readouterr().out != on_gpu
    assert command.main(["explain", "--model", "gpt2", flag, "a900"]) == 2
    assert "no machine is called 'a900'" in capsys.readouterr().err


def test_flags_override_the_model_and_a_notice_names_both() -> None:
    parsed = parse_args([*RUN, "--model", "llama3-8b", "--num-layers", "4", "--squared-relu"])
    assert parsed.config.model.num_layers == 4
    assert parsed.config.model.activation == "squared_relu"
    assert [notice for notice in parsed.notices if "--model" in notice] == [
        "--num-layers 4 replaces 32 of --model llama3-8b",
        "--model llama3-8b gives --swiglu, which the flags replace",
    ]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("Llama-3-8B", "llama3-8b"),
        ("GPT2_XL", "gpt2-xl"),
        ("qwen3-7b", "qwen3-8b"),
        ("llama3-7b", "llama3-8b"),
        ("175B", "175b"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(
    name: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nearest in nearest_presets(name)
    with pytest.raises(SystemExit):
        parse_args([*RUN, "--model", name])
    error = capsys.readouterr().err
    assert f"--model {name!r} is not known: did you mean " in error and error.count("\n") == 1
    assert nearest in error.partition("? The names are")[0]
