"""`--config-json FILE` and a flag that is an alternative to what the file says: the flag wins, and
says what it replaces."""

import json
from pathlib import Path

import pytest

from arguments import parse_args
from tests.support.commands import ended, parsed_line

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 "
    "--global-batch-size 8 --vocab-size 9 "
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
# What the file was dumped from, flags given with it, and flags that give the same run without a
# file. BASE stands for the flags above.
CASES = json.loads(Path(__file__).with_name("alternatives.json").read_text())


def dumped(words, folder):
    path = folder / "run.json"
    path.write_text(parsed_line(words).config.to_json())
    return f"--config-json {path}"


@pytest.mark.parametrize("stored, flags, alone", CASES)
def test_a_flag_replaces_every_stored_alternative(stored, flags, alone, tmp_path):
    stored = stored.replace("BASE ", BASE)
    read = parsed_line(f"{dumped(stored, tmp_path)} {flags}")
    whole = alone if "--num-layers" in alone.split() else BASE + alone
    assert read.config == parsed_line(whole).config


def test_what_is_replaced_is_said_once_and_only_where_something_is(tmp_path):
    for flags, count in (("--recompute-policy *:mlp", 3), ("--recompute-num-layers 4", 0)):
        found = parsed_line(f"{dumped(BASE + FULL, tmp_path)} {flags}").notices
        assert len([notice for notice in found if "which the flags replace" in notice]) == count


def test_a_flag_replaces_no_size_of_the_stored_model(tmp_path):
    stored = f"{BASE} --group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2"
    file = dumped(f"{stored} --norm-position after --min-lr 1e-8", tmp_path)
    for flags in (
        *("--tensor-model-parallel-size 4", "--num-attention-heads 5", "--hidden-size 2"),
        *("--micro-batch-size 3", "--parallel-residual", "--lr 1e-9"),
    ):
        assert flags.split()[0] in ended(parse_args, f"{file} {flags}").err


def test_alternatives_on_the_command_line_itself_are_still_refused(tmp_path):
    file = dumped(f"{BASE} {FULL} --eod-mask-loss", tmp_path)
    for flags, message in (
        (
            "--recompute-policy *:mlp --recompute-activations",
            "excludes --recompute-activations: both say",
        ),
        ("--train-iters 4 --train-samples 8", "both give the length of the run"),
        ("--tokenizer-kwargs a b", "--tokenizer-kwargs with --eod-mask-loss"),
        ("--recompute-policy *:ful", "--recompute-policy: expected an action"),
    ):
        assert message in ended(parse_args, f"{file} {flags}").err
