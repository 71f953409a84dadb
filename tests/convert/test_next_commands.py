"""The commands that a conversion prints at its end run as they are printed."""

import json
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_lite import __main__ as command
from megatron_lite.checkpointing.metadata import read_config
from megatron_lite.checkpointing.start import find_step
from tests.support.conversions import converted, save_tokenizer
from tests.support.hf import PEERS
from tests.support.programs import run_program
from tests.support.runs import run_to_end, tiny_run

main = partial(command.main, started="/usr/bin/megatron-lite")
SHORT = ["--train-iters", "2", "--eval-iters", "0", "--distributed-backend", "gloo"]
LAUNCHED = ["torchrun", "--nproc-per-node", "2", "-m", "megatron_lite"]


def printed_commands(output):
    """Returns the words of the two commands at the end of a conversion's output."""
    lines = output.replace(" \\\n", " ").splitlines()
    assert lines[-2] == "To generate:"
    return [shlex.split(lines[-3]), shlex.split(lines[-1])]


def test_a_converted_model_trains_on_and_generates_by_the_printed_commands(
    tmp_path, monkeypatch, capsys
):
    """A small Llama in bfloat16, on two ranks, with the tokenizer of the source."""
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    PEERS["llama"]().to(torch.bfloat16).save_pretrained("theirs")
    save_tokenizer(Path("theirs"))
    text = {"text": "to be or not to be " * 40}
    Path("text.jsonl").write_text(f"{json.dumps(text)}\n" * 200)
    capsys.readouterr()
    way = ["--from", "hf", "--to", "megatron-lite", "--load", "theirs", "--save", "ours"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/megatron-lite"])
    assert main(["convert", *way, "--tensor-model-parallel-size", "2"]) == 0
    train, generate = printed_commands(capsys.readouterr().out)
    files = ["--input", "text.jsonl", "--output-prefix", "text", "--append-eod"]
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "theirs"]
    assert main(["preprocess", *files, *tokenizer]) == 0
    assert train[: len(LAUNCHED)] == LAUNCHED and "--bf16" in train
    trained = run_program(*train[len(LAUNCHED) :], *SHORT, ranks=2, main=main)
    assert trained.returncode == 0, trained.stderr
    config = read_config(find_step("ours-trained").step)
    assert config.training.bf16 and config.model == read_config(find_step("ours").step).model
    few = ["--max-new-tokens", "2", "--distributed-backend", "gloo"]
    generated = run_program(*generate[1:], *few, main=main)
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout.startswith("Once upon a time")


def test_a_run_with_optimizer_states_is_continued_beyond_its_iteration(tmp_path, capsys):
    run_to_end(tiny_run(save=str(tmp_path / "run"), train_iters=3))
    assert converted(tmp_path / "run", tmp_path / "split", "megatron-lite megatron-lite") == 0
    output = capsys.readouterr().out
    train, _ = printed_commands(output)
    assert "The source has no tokenizer." in output and "--bf16" not in train
    assert train[train.index("--train-iters") + 1] == "1003"
