"""torch.compile on each layer, and the compiler's own memory budget."""

import functools

import pytest
import torch

from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.parallel.torch_internals import compiler_settings
from megatron_lite.training.build_trainer import compile_layers_
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state
from tests.support.uncompiled import uncompiled_kernels


@pytest.fixture(autouse=True)
def without_inductors_kernels(monkeypatch):
    """With its division of the graph into forward and backward, which is what a budget changes."""
    compile_layer = functools.partialmethod(
        torch.nn.Module.compile, backend="aot_eager_decomp_partition"
    )
    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    uncompiled_kernels(monkeypatch)


def kept_and_grads(budget, *, compiled):
    torch.compiler.reset()
    with tp_state(1) as parallel:
        model = build_tiny_model(tiny_config(num_layers=1), parallel, dtype=torch.float64)
        if compiled:
            compile_layers_(model)
        patch = compiler_settings().patch(activation_memory_budget=budget)
        with patch, kept_for_backward(exclude=model.parameters()) as meter:
            loss = model(*sample_tokens()).mean()
        kept = meter.total_bytes()
        loss.backward()
    return kept, [parameter.grad for parameter in model.parameters()]


@pytest.mark.long
def test_a_smaller_budget_keeps_less_and_gives_the_same_gradients():
    _, expected = kept_and_grads(None, compiled=False)
    kept = []
    for budget in (1.0, 0.0):
        bytes_kept, grads = kept_and_grads(budget, compiled=True)
        kept.append(bytes_kept)
        for mine, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    assert kept[0] > kept[1]
