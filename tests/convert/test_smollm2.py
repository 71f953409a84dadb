"""SmolLM2-135M with its real weights: the same logits and tokens as transformers, a bitwise round
trip, and training that goes on from the model's own loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron_lite.checkpointing.metadata import read_config
from megatron_lite.checkpointing.start import find_step
from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.indexed_writer import IndexedDatasetWriter
from megatron_lite.parallel.state import parallel_state
from megatron_lite.tools import generation
from tests.support.conversions import converted
from tests.support.programs import run_program
from tests.support.ranks import run_ranks
from tests.support.smollm2 import save_smollm2

pytestmark = pytest.mark.long
PROMPT = "The capital of France is"
# From the quickstart's text, Shakespeare's plays.
TEXT = """To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles"""
SEQ_LENGTH, STEPS = 32, 2
NEW_TOKENS = 12
POLICIES = (
    "*:none",
    "0-7:full@host;8-15:core_attn+mlp+layernorm;16-22:ops(matmul);23-27:full;28-29:none",
)


class Model(NamedTuple):
    """theirs: transformers' model. folder: the checkpoints `theirs` and `ours`."""

    theirs: Any
    folder: Path


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "theirs").mkdir()
    model = save_smollm2(folder / "theirs")
    assert converted(folder / "theirs", folder / "ours", "hf megatron-lite") == 0
    yield Model(model, folder)


def ids_of(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def logits(folder: Path, tokens: list[int], ranks: int) -> torch.Tensor:
    """Returns our logits [s, V] of a text, on one rank of `ranks`."""
    step = find_step(str(folder)).step
    config = generation.config_for_ranks(read_config(step), ranks, "gloo")
    with parallel_state(config.parallel, seed=1) as parallel, torch.no_grad():
        model = generation.load_model(step, config, parallel)
        return model(torch.tensor([tokens]))[0].clone()


def test_logits_are_those_of_transformers(smollm2: Model) -> None:
    """float32 against float32: 1e-4 of the largest logit. On one rank the losses of a training are
    compared below."""
    tokens = ids_of(smollm2.folder / "theirs", PROMPT)
    with torch.no_grad():
        expected = smollm2.theirs(torch.tensor([tokens])).logits[0]
    folder = smollm2.folder / "ours"
    found = run_ranks(lambda rank, size: logits(folder, tokens, size), 3)
    for one in found:
        assert (one - expected).abs().max() < 1e-4 * expected.abs().max()


def test_training_goes_on_from_the_models_own_loss_alike_under_every_policy(
    smollm2: Model, tmp_path: Path
) -> None:
    """Every step sees the same sample, so the loss falls from the first step on: the document has
    exactly SEQ_LENGTH tokens, and the label of its last token is the first token again."""
    tokens = ids_of(smollm2.folder / "theirs", TEXT)[:SEQ_LENGTH]
    assert len(tokens) == SEQ_LENGTH
    with IndexedDatasetWriter(str(tmp_path / "text"), token_dtype(49152)) as writer:
        writer.add_document(torch.tensor(tokens).numpy())
    told = [trained(smollm2.folder, tmp_path, policy) for policy in POLICIES]
    assert set(told) == {told[0]}
    losses = [loss for loss, _ in told[0]]
    sample = torch.tensor([[*tokens, tokens[0]]])
    with torch.no_grad():
        own = smollm2.theirs(sample, labels=sample).loss.item()
    assert losses[0] == pytest.approx(own, rel=1e-4)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1


def trained(model: Path, folder: Path, policy: str) -> tuple[tuple[float, float], ...]:
    """Trains a few steps. Returns the loss and the norm of the gradients of each."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    run = run_program(
        *("--hf-config", str(model / "theirs"), "--load", str(model / "ours")),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model / "theirs")),
        *("--data-path", str(folder / "text"), "--split", "1,0,0"),
        *("--seq-length", str(SEQ_LENGTH), "--micro-batch-size", "1"),
        *("--train-iters", str(STEPS), "--lr", "5e-5", "--lr-decay-style", "constant"),
        *("--eval-iters", "0", "--log-interval", "1", "--distributed-backend", "gloo"),
        *("--metrics-jsonl", str(metrics), "--recompute-policy", policy),
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return tuple((row["lm_loss"], row["grad_norm"]) for row in rows if "lm_loss" in row)
