"""Mistakes in layers that differ, each put back: a named test must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config import model as config
from megatron_lite.model import block, core_attention, masked_attention, rotary
from tests.config import test_layer_pattern
from tests.model import test_layers_differ, test_transformers_parity, test_window
from tests.support.mutants import Mutant, assert_seen, replaces
from tests.support.pipelines import Layout

Patch = pytest.MonkeyPatch


@replaces("reach", core_attention)
def a_window_counts_the_query_twice(reach, window, length):
    return None if reach(window, length) is None else window[0] + 1


@replaces("marks", config)
def layers_count_from_one(real, pattern, layer):
    """Of a frequency: layer 0 is skipped, and layer N."""
    return layer % pattern == 0 if isinstance(pattern, int) else real(pattern, layer)


@replaces("__init__", block.TransformerBlock)
def layers_count_from_the_start_of_their_stage(
    real: Any, self: Any, model: Any, context: Any, plan: Any, stage: Any
) -> None:
    @replaces("TransformerLayer", block)
    def shifted(layer: Any, model: Any, context: Any, number: int) -> Any:
        return layer(model, context, number - stage.first_layer)

    with pytest.MonkeyPatch.context() as inner:
        shifted(inner)
        real(self, model, context, plan, stage)


@replaces("attend_backward", masked_attention)
def backward_forgets_the_mask(real, *args, mask, **kwargs):
    return real(*args, **kwargs)


@replaces("has_kernel", core_attention)
def forward_saves_the_mask(_, query):
    """As torch's own attention does, of every layer."""
    return False


@replaces("_scaled", rotary)
def every_frequency_is_divided_by_the_factor(_, frequencies, factor):
    return frequencies / factor


MUTANTS = [
    Mutant(
        a_window_counts_the_query_twice,
        test_window.test_every_backend_reads_the_window_as_the_loops_do,
        dict(backend="flash", groups=3),
    ),
    Mutant(
        every_frequency_is_divided_by_the_factor,
        test_transformers_parity.test_logits_loss_and_gradients_equal_those_of_transformers,
        dict(name="llama 3.1", dtype=torch.float32, tolerance=1e-5),
    ),
    Mutant(layers_count_from_one, test_layer_pattern.test_layers_of_a_frequency_and_of_a_list),
    Mutant(
        layers_count_from_the_start_of_their_stage,
        test_layers_differ.test_a_pipeline_trains_as_one_process_does,
        dict(layout=Layout(pp=2, num_chunks=2)),
    ),
    Mutant(
        backward_forgets_the_mask,
        test_window.test_gradients_of_the_fused_window_are_those_of_the_formula,
        dict(groups=3, reach=2),
    ),
    Mutant(
        forward_saves_the_mask,
        test_window.test_a_window_adds_nothing_to_what_attention_keeps,
        dict(backend="flash", dtype=torch.float32),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
