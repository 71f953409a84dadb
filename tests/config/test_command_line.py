"""The commands that messages and reports name are those that their reader can type."""

from __future__ import annotations

import shlex

import pytest

from megatron_lite.config.invocation import shell_lines, subcommand, training_command

MODULE = "python -m megatron_lite"


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
