"""Mistakes in layers that differ, each put back: a named test must fail."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config import layer_pattern
from megatron_lite.config import model as config
from megatron_lite.config.model import ModelConfig
from megatron_lite.model import block, core_attention, gpt, rotary, window
from megatron_lite.model.attention import CoreAttention, SelfAttention
from tests.config import test_layer_pattern
from tests.model import test_layers_differ, test_transformers_parity, test_window
from tests.model.test_layers_differ import Split
from tests.support.mutants import Mutant, assert_seen, replaces
from tests.support.pipelines import Layout
from tests.training import test_windows

Patch = pytest.MonkeyPatch


def _shift_reach(patch: Patch, by: int) -> None:
    @replaces("reach", core_attention, config)
    def shifted(reach, window, length):
        return None if reach(window, length) is None else window[0] + by

    shifted(patch)


def a_window_counts_the_query_twice(patch: Patch) -> None:
    _shift_reach(patch, 1)


def a_window_counts_the_query_among_the_tokens_before(patch: Patch) -> None:
    _shift_reach(patch, -1)


@replaces("marks", config)
def layers_count_from_one(real, pattern, layer):
    """Of a frequency: layer 0 is skipped, and layer N."""
    return layer % pattern == 0 if isinstance(pattern, int) else real(pattern, layer)


@replaces("marks", config)
def a_list_is_read_backwards(real, pattern, layer):
    return real(pattern, layer) if isinstance(pattern, int) else pattern[-1 - layer] == 1


@replaces("marks", config)
def a_list_is_read_one_layer_late(real, pattern, layer):
    return real(pattern, layer) if isinstance(pattern, int) else pattern[layer - 1] == 1


@replaces("layer_window", ModelConfig)
def every_nth_layer_has_the_window(_: Any, self: ModelConfig, layer: int) -> Any:
    skipped = self.window_attn_skip_freq
    return self.window_size if skipped is None or layer_pattern.marks(skipped, layer) else None


@replaces("layer_window", ModelConfig)
def a_list_names_the_layers_without_the_window(_: Any, self: ModelConfig, layer: int) -> Any:
    skipped = self.window_attn_skip_freq
    return self.window_size if skipped is None or not layer_pattern.marks(skipped, layer) else None


@replaces("layer_rotates", ModelConfig)
def the_layers_that_rotate_are_the_others(real, self, layer):
    return self.positions.rotated and (self.no_rope_freq is None or not real(self, layer))


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


@replaces("__init__", gpt.GPTModel)
def a_stage_has_tables_if_its_first_layer_rotates(
    real: Any, self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    real(self, config, *args, **kwargs)
    self._rotates = config.layer_rotates(self.stage.first_layer)


@replaces("attend_backward", window)
def backward_forgets_the_mask(real, *args, mask, **kwargs):
    return real(*args, **kwargs)


@replaces("attend_backward", window)
def backward_masks_what_is_later_alone(real, *args, mask, **kwargs):
    return real(*args, mask=mask.new_full(mask.shape, -float("inf")).triu_(1), **kwargs)


@replaces("has_kernel", core_attention)
def forward_saves_the_mask(_, query):
    """As torch's own attention does, of every layer."""
    return False


@replaces("_split_heads", SelfAttention)
def heads_are_copied_as_if_they_were_rotated(real: Any, self: SelfAttention, qkv: Any) -> Any:
    """The value alone: query and key stay views, which hold the whole of qkv."""
    with pytest.MonkeyPatch.context() as inner:
        replaces("rotates", self)(lambda rotates: True)(inner)
        return real(self, qkv)


@replaces("_reach", CoreAttention)
def a_window_is_measured_in_the_tokens_of_one_rank(_, self, query):
    return layer_pattern.reach(self.window, query.shape[0])


@replaces("layer_window", ModelConfig)
def a_skipped_layer_has_the_window_too(_, self, layer):
    return self.window_size


@replaces("_scaled", rotary)
def every_frequency_is_divided_by_the_factor(_, frequencies, factor):
    return frequencies / factor


LOOPS = partial(Mutant, test=test_window.test_every_backend_reads_the_window_as_the_loops_do)
LAYERS = partial(Mutant, test=test_layer_pattern.test_layers_of_a_frequency_and_of_a_list)
PEER = test_transformers_parity.test_logits_loss_and_gradients_equal_those_of_transformers
PIPELINE = partial(
    Mutant,
    test=test_layers_differ.test_a_pipeline_trains_as_one_process_does,
    arguments=dict(layout=Layout(pp=2, num_chunks=2)),
)


def peer(fault: Any, name: str) -> Mutant:
    return Mutant(fault, PEER, dict(name=name, dtype=torch.float32, tolerance=1e-5))


MUTANTS = [
    *(
        LOOPS(fault, arguments=dict(backend=backend, groups=3))
        for fault in (
            a_window_counts_the_query_twice,
            a_window_counts_the_query_among_the_tokens_before,
        )
        for backend in ("flash", "unfused")
    ),
    peer(a_window_counts_the_query_twice, "mistral"),
    peer(every_frequency_is_divided_by_the_factor, "llama 3.1"),
    *(
        LAYERS(fault)
        for fault in (
            layers_count_from_one,
            a_list_is_read_backwards,
            a_list_is_read_one_layer_late,
            every_nth_layer_has_the_window,
            a_list_names_the_layers_without_the_window,
            the_layers_that_rotate_are_the_others,
        )
    ),
    peer(layers_count_from_one, "smollm3"),
    peer(the_layers_that_rotate_are_the_others, "smollm3"),
    peer(a_list_is_read_backwards, "qwen2 with windows"),
    peer(a_skipped_layer_has_the_window_too, "qwen2 with windows"),
    PIPELINE(layers_count_from_the_start_of_their_stage),
    Mutant(
        a_stage_has_tables_if_its_first_layer_rotates,
        test_window.test_only_a_stage_with_a_layer_that_rotates_has_rotary_tables,
    ),
    *(
        Mutant(
            fault,
            test_window.test_gradients_of_the_fused_window_are_those_of_the_formula,
            dict(groups=3, reach=2),
        )
        for fault in (backward_forgets_the_mask, backward_masks_what_is_later_alone)
    ),
    Mutant(
        forward_saves_the_mask,
        test_window.test_a_window_adds_nothing_to_what_attention_keeps,
        dict(backend="flash", dtype=torch.float32),
    ),
    Mutant(
        a_window_is_measured_in_the_tokens_of_one_rank,
        test_layers_differ.test_ranks_that_share_a_layer_compute_what_one_rank_computes,
        dict(split=Split(cp_size=3, attention_backend="unfused")),
    ),
    Mutant(
        heads_are_copied_as_if_they_were_rotated,
        test_windows.test_windows_and_rotation_change_no_byte_of_what_is_predicted_and_measured,
        dict(attention=dict(attention_dropout=0.0)),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
