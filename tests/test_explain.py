"""`--explain-recompute` as a user runs it: without what only training needs, and true of the
training. tests/test_command.py runs it without torch."""

import shlex

import pytest

from arguments import parse_args
from megatron_lite.cli.explanation import explanation
from megatron_lite.tools import plan
from pretrain_gpt import main
from tests.support.commands import SMALL_MODEL, ended, fault_of

# no data, no length, no --lr
EXPLAIN = [*SMALL_MODEL, "--micro-batch-size", "2", "--explain-recompute", "--vocab-size", "98"]


def test_the_vocabulary_comes_from_the_tokenizers_files(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(200)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(
        str(tmp_path / "tokenizer.json")
    )
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    found = ended(main, [*EXPLAIN[:-2], *flags.split()])
    assert "V 256, fp32" in found.out  # 200 ids, rounded up to a multiple of 128


def test_with_a_vocabulary_size_the_tokenizers_files_may_be_missing():
    missing = ["--vocab-file", "nowhere.json", "--merge-file", "nowhere.txt"]
    found = ended(main, [*EXPLAIN, *missing])
    assert found.status == 0 and "V 128, fp32" in found.out  # 98 ids, rounded up
    assert "--vocab-file nowhere.json: no such file" in fault_of(main, [*EXPLAIN[:-2], *missing])
    assert "set --lr; and something" in fault_of(main, EXPLAIN[:-3] + EXPLAIN[-2:])


def test_the_last_lines_name_the_planner_which_takes_the_run(tmp_path):
    words = [*EXPLAIN, "--tensor-model-parallel-size", "2", "--bf16", "--window-size", "8,0"]
    config = parse_args(words).config
    last = " ".join("\n".join(explanation(config, ())).rpartition("\n\n")[2].split())
    run = tmp_path / "run.json"
    run.write_text(config.to_json())
    command = last.partition(" finds ")[0].replace("RUN.json", str(run)).replace("NAME", "cpu")
    assert command.startswith("python -m megatron_lite plan ")
    done = ended(plan.main, shlex.split(command)[4:])
    assert (done.status, done.err) == (0, "") and "To run plan 1:" in done.out
