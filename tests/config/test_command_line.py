"""The flags of a configuration: every one is a flag of arguments.py, and the way back is exact."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from arguments import parse_args
from megatron_lite.config.invocation import shell_lines, subcommand, training_command
from megatron_lite.config.run import RunConfig
from megatron_lite.config.run_flags import flags_of
from tests.plan.runs import preset_run, small_run

MODULE = "python -m megatron_lite"
WINDOWS = dict(
    position_embedding_type="rope",
    window_size=(127, 0),
    window_attn_skip_freq=(1, 0, 1, 1),
    no_rope_freq=2,
)


def test_the_lines_of_a_command_fit_and_are_read_back_by_a_shell() -> None:
    words = ["torchrun", "--node-rank", "$RANK", "-m", "a", "train", "--x", "b c; *:d"]
    assert shell_lines(words) == "torchrun --node-rank $RANK -m a train --x 'b c; *:d'"
    words += [f"--flag-{number}" for number in range(20)]
    text = shell_lines(words)
    assert shlex.split(text.replace("\\\n", "")) == words
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) < 6
    assert shell_lines([]) == ""


@pytest.mark.parametrize(
    ("program", "report", "train"),
    [
        ("pretrain_gpt.py", f"{MODULE} report", "python pretrain_gpt.py"),
        ("megatron-lite convert", "megatron-lite report", "megatron-lite train"),
        (f"{MODULE}.tools.convert", f"{MODULE} report", f"{MODULE} train"),
    ],
)
def test_each_program_names_the_commands_beside_it(program: str, report: str, train: str) -> None:
    assert " ".join(subcommand(program, "report")) == report
    assert " ".join(training_command(program)) == train
    on_2 = " ".join(training_command(program, 2))
    is_script = program == "pretrain_gpt.py"
    assert on_2.endswith(f"2 {program if is_script else '-m megatron_lite train'}")


@pytest.mark.parametrize(
    "config",
    [
        small_run(),
        small_run(**WINDOWS),
        small_run(bias_gelu_fusion=False, add_bias_linear=False, qk_layernorm=True),
        preset_run("qwen3-0.6b", seq_length=4096, batch=64),
        small_run(
            layers=8,
            parallel=dict(
                pipeline_model_parallel_size=2,
                num_virtual_stages_per_pipeline_rank=2,
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                overlap_p2p_comm=False,
            ),
        ),
    ],
)
def test_the_flags_of_a_run_are_parsed_to_the_same_run(config: RunConfig) -> None:
    assert parse_args(flags_of(config)).config == config


def test_the_flags_of_recomputation_are_parsed_to_the_same_run() -> None:
    config = small_run()
    for settings in (
        dict(recompute_policy="0-1:full/2; 2:core_attn+layernorm@host; *:none"),
        dict(recompute_granularity="selective", recompute_modules=("core_attn", "mlp")),
        dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
        dict(recompute_verify=True, recompute_tail_skip=False),
    ):
        one = replace(config, recompute=replace(config.recompute, **settings))
        assert parse_args(flags_of(one)).config == one
