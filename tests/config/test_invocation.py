"""The commands that messages and reports name are those that their reader can type."""

from __future__ import annotations

import pytest

from megatron_lite.config.invocation import as_typed, subcommand, training_command

MODULE = "python -m megatron_lite"


@pytest.mark.parametrize(
    ("program", "typed", "report", "train", "train_on_2"),
    [
        (
            "pretrain_gpt.py",
            "python pretrain_gpt.py",
            f"{MODULE} report",
            "python pretrain_gpt.py",
            "torchrun --nproc-per-node 2 pretrain_gpt.py",
        ),
        (
            "megatron-lite convert",
            "megatron-lite convert",
            "megatron-lite report",
            "megatron-lite train",
            "torchrun --nproc-per-node 2 -m megatron_lite train",
        ),
        *(
            (
                program,
                program,
                f"{MODULE} report",
                f"{MODULE} train",
                "torchrun --nproc-per-node 2 -m megatron_lite train",
            )
            for program in (f"{MODULE} train", f"{MODULE}.tools.convert")
        ),
    ],
)
def test_each_program_names_the_commands_beside_it(
    program: str, typed: str, report: str, train: str, train_on_2: str
) -> None:
    assert as_typed(program) == typed
    assert " ".join(subcommand(program, "report")) == report
    assert " ".join(training_command(program)) == train
    assert " ".join(training_command(program, 2)) == train_on_2
