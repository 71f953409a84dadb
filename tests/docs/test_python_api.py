"""Every block of code under "From Python" runs, and the functions keep their word."""

import re

import pytest

from megatron_lite import api
from megatron_lite.config.run import RunConfig
from tests.docs.marks import text_of

PAGE = text_of("training").partition("## From Python")[2]
BLOCKS = re.findall(r"^## (.+?)$|^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CODE = [code for _, code in BLOCKS if code]
SMALL = dict(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=8,
    seq_length=8,
    micro_batch_size=2,
    vocab_size=99,
)


@pytest.mark.parametrize("number", range(len(CODE)))
def test_a_block_runs(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(CODE[number], f"block {number} of docs/training.md", "exec"), {})
    if number == 0:
        assert re.match(r"5 4\.\d+$", capsys.readouterr().out.splitlines()[-1])
        assert len(CODE[0].splitlines()) <= 15


def test_the_table_names_every_public_function():
    functions = {name for name in api.__all__ if name[0].islower()}
    assert {*re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE)} == functions


def test_a_configuration_equals_that_of_the_flags():
    from arguments import parse_args

    words = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    config = api.run_config(**SMALL, ffn_hidden_size=48, swiglu=True, add_bias_linear=False)
    assert (
        parse_args([*words, "--ffn-hidden-size", "48", "--swiglu", "--disable-bias-linear"]).config
        == config
    )


def test_a_misspelt_setting_is_named():
    with pytest.raises(TypeError, match="no setting of a run: hiden_size"):
        api.run_config(**SMALL, hiden_size=3)


def test_every_missing_setting_is_in_one_message():
    with pytest.raises(TypeError, match="missing settings of a run: micro_batch_size, seq_length$"):
        api.run_config(preset="llama3-8b")


def test_a_plan_is_a_run_that_fits_its_budget():
    config = api.run_config(
        preset="gpt2", seq_length=1024, micro_batch_size=1, global_batch_size=64, bf16=True
    )
    answer = api.plan(config, gpu="a100-80gb", num_gpus=4, memory="4GiB")
    best = answer.plan
    assert answer.word == "fits" and best is not None and isinstance(best.config, RunConfig)
    assert api.peak_bytes(best.config, num_ranks=4) == best.peak.num_bytes
    assert best.peak.num_bytes <= answer.budget.plan_bytes
