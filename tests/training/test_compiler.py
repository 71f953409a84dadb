"""torch.compile on each layer, and the compiler's own memory budget."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.parallel.torch_internals import compiler_settings
from megatron_lite.training.build_trainer import compile_layers_
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state
from tests.support.runs import run_to_end, tiny_run
from tests.support.uncompiled import uncompiled_kernels

ONE_LAYER = dict(num_layers=1, hidden_dropout=0.0, attention_dropout=0.0)


@pytest.fixture(autouse=True)
def without_inductors_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its division of the graph into forward and backward, which is what a budget changes."""
    compile_layer = functools.partialmethod(
        torch.nn.Module.compile, backend="aot_eager_decomp_partition"
    )
    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    uncompiled_kernels(monkeypatch)


def kept_and_grads(budget: float | None, *, compiled: bool) -> tuple[int, list[torch.Tensor]]:
    torch.compiler.reset()
    with tp_state(1) as parallel:
        model = build_tiny_model(tiny_config(num_layers=1), parallel, dtype=torch.float64)
        if compiled:
            compile_layers_(model)
        patch = compiler_settings().patch(activation_memory_budget=budget)
        with patch, kept_for_backward(exclude=model.parameters()) as meter:
            loss = model.loss(*sample_tokens()).mean()
        kept = meter.total_bytes()
        loss.backward()
    return kept, [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


@pytest.mark.long
def test_a_smaller_budget_keeps_less_and_gives_the_same_gradients() -> None:
    _, expected = kept_and_grads(None, compiled=False)
    kept = []
    for budget in (1.0, 0.5, 0.0):
        bytes_kept, grads = kept_and_grads(budget, compiled=True)
        kept.append(bytes_kept)
        for mine, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert kept[0] > kept[1] > kept[2]


@pytest.mark.weekly
def test_a_compiled_run_learns_and_claims_nothing_about_its_bytes(tmp_path: Path) -> None:
    run_to_end(
        tiny_run(
            metrics=tmp_path / "m",
            **ONE_LAYER,
            train_iters=3,
            torch_compile=True,
            activation_memory_budget=0.5,
        )
    )
    compiled = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    run_to_end(tiny_run(metrics=tmp_path / "eager", **ONE_LAYER, train_iters=3))
    eager = [json.loads(line) for line in (tmp_path / "eager").read_text().splitlines()]
    assert [row["lm_loss"] for row in compiled] == pytest.approx(
        [row["lm_loss"] for row in eager], rel=1e-5
    )
    assert {row["activation_bytes_predicted"] for row in compiled} == {None}
