"""OSLO's tutorial, as a user runs it: a GPT-2 of Hugging Face in, tensor parallelism 2 with
partitioned, contiguous activation checkpointing on the CPU, one training step, and out again."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path

import pytest
import torch

from megatron_lite.config.data_settings import DataConfig
from megatron_lite.data.datasets import build_datasets
from megatron_lite.tools import translate_recompute
from tests.support.conversions import converted, same_weights, saved_peer, weights_in
from tests.support.hf import V
from tests.support.programs import run_program

SEED, SEQ_LENGTH, BATCH = 1234, 16, 2
OSLO = {
    "model_parallelism": {"enable": True, "tensor_parallel_size": 2},
    "activation_checkpointing": {
        "enable": True,
        "cpu_checkpointing": True,
        "partitioned_checkpointing": True,
        "contiguous_checkpointing": True,
    },
}


def flags_of(config: Path) -> list[str]:
    """Returns the flags that the tool prints for a config of OSLO."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert translate_recompute.main([str(config)]) == 0
    return shlex.split(printed.getvalue().splitlines()[0], comments=True)


def trained(folder: Path, name: str, recompute: list[str]) -> float:
    """Trains one step from the converted checkpoint. Returns its loss."""
    run = run_program(
        *("--hf-config", str(folder / "theirs"), "--load", str(folder / "ours")),
        *("--save", str(folder / name), "--tensor-model-parallel-size", "2"),
        *("--hidden-dropout", "0", "--attention-dropout", "0", "--mock-data"),
        *("--seq-length", str(SEQ_LENGTH), "--micro-batch-size", str(BATCH)),
        *("--train-iters", "1", "--lr", "1e-3", "--lr-decay-style", "constant"),
        *("--eval-iters", "0", "--distributed-backend", "gloo"),
        *("--metrics-jsonl", str(folder / f"{name}.jsonl")),
        *recompute,
        ranks=2,
    )
    assert run.returncode == 0, run.stderr
    assert "holds no optimizer states (it was converted): they start from zero" in run.stdout
    rows = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
    return float(next(row["lm_loss"] for row in rows if "lm_loss" in row))


def test_oslos_tutorial_gives_transformers_loss_and_the_weights_of_a_run_without_recompute(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    model = saved_peer("gpt2", tmp_path / "theirs")
    (tmp_path / "oslo.json").write_text(json.dumps(OSLO))
    assert converted(tmp_path / "theirs", tmp_path / "ours", "hf megatron-lite") == 0
    recompute = flags_of(tmp_path / "oslo.json")
    loss = trained(tmp_path, "oslo", recompute)
    assert trained(tmp_path, "plain", []) == loss
    for name in ("oslo", "plain"):
        assert converted(tmp_path / name, tmp_path / f"{name} out", "megatron-lite hf") == 0
    before, after = weights_in(tmp_path / "theirs"), weights_in(tmp_path / "oslo out")
    assert before.keys() == after.keys() and not same_weights(before, after)
    assert same_weights(after, weights_in(tmp_path / "plain out"))
    samples = build_datasets(
        DataConfig(seq_length=SEQ_LENGTH, mock_data=True),
        vocab_size=V,
        seed=SEED,
        num_samples=(BATCH, 0, 0),
    ).train
    assert samples is not None
    text = torch.stack([torch.as_tensor(samples[number]) for number in range(BATCH)]).long()
    with torch.no_grad():
        expected = model(input_ids=text, labels=text).loss
    assert loss == pytest.approx(expected.item(), rel=1e-5)
