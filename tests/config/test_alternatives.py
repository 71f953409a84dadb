"""`--config-json FILE` and a flag that is an alternative to what the file says: the flag wins, and
says what it replaces."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from arguments import ParsedArguments, build_parser, parse_args
from megatron_lite.config.alternatives import (
    ALTERNATIVES,
    BELONGS_TO,
    BELONGS_TO_VALUE,
    NEEDS_MORE_THAN_ONE,
)

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 "
    "--global-batch-size 8 --vocab-size 9 "
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
# What the file was dumped from, flags given with it, and flags that give the same run without a
# file. BASE stands for the flags above.
CASES = json.loads(Path(__file__).with_name("alternatives.json").read_text())


def dumped(words: str, folder: Path) -> list[str]:
    path = folder / "run.json"
    path.write_text(parse_args(words.split()).config.to_json())
    return ["--config-json", str(path)]


@pytest.mark.parametrize(("stored", "flags", "alone"), CASES)
def test_a_flag_replaces_every_stored_alternative(
    stored: str, flags: str, alone: str, tmp_path: Path
) -> None:
    stored = stored.replace("BASE ", BASE)
    try:
        read = parse_args([*dumped(stored, tmp_path), *shlex.split(flags)])
    except SystemExit:
        pytest.fail("the file's value is still there")
    assert (
        read.config
        == parse_args((alone if "--num-layers" in alone.split() else BASE + alone).split()).config
    )


def notices(stored: str, flags: str, folder: Path) -> list[str]:
    found: ParsedArguments = parse_args([*dumped(stored, folder), *flags.split()])
    return [notice.replace(str(folder), "") for notice in found.notices if "replaces" in notice]


def test_what_is_replaced_is_said_once_and_only_where_something_is(tmp_path: Path) -> None:
    assert notices(BASE + FULL, "--recompute-policy *:mlp", tmp_path) == [
        "--recompute-policy replaces what --config-json /run.json gives as "
        "recompute_granularity, recompute_method, "
        "recompute_num_layers"
    ]
    for flags in ("--seed 3", "--recompute-num-layers 4", "--tensor-model-parallel-size 1"):
        assert notices(BASE + FULL, flags, tmp_path) == []


def test_alternatives_on_the_command_line_itself_are_still_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (
            "--recompute-policy *:mlp --recompute-activations",
            "are two ways to say what is recomputed",
        ),
        ("--train-iters 4 --train-samples 8", "both give the length of the run"),
        ("--recompute-policy *:ful", "--recompute-policy: expected an action"),
    ):
        with pytest.raises(SystemExit):
            parse_args([*dumped(BASE + FULL, tmp_path), *flags.split()])
        assert message in capsys.readouterr().err


def test_the_tables_name_fields_that_flags_set() -> None:
    fields = {action.dest for action in build_parser().actions}
    named = {field for group in ALTERNATIVES for way in group for field in way}
    for table in (BELONGS_TO, NEEDS_MORE_THAN_ONE):
        named |= table.keys() | {field for names in table.values() for field in names}
    named |= {
        field
        for values in BELONGS_TO_VALUE.values()
        for names in values.values()
        for field in names
    }
    assert named | BELONGS_TO_VALUE.keys() <= fields
