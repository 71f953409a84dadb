"""Which tensors differ from those that were predicted, by layer, module, shape and dtype."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.explain.difference import Saved, difference
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.predict.kept_tensors import activation_terms
from megatron_lite.model.layer import MLP
from megatron_lite.recompute.schedule import plan_stage
from tests.support.equality import variant_config
from tests.support.models import (
    BATCH,
    SEQ_LENGTH,
    build_tiny_model,
    padded_vocab_size,
    sample_tokens,
    tp_state,
)
from tests.support.mutants import replaces


def differing(name: str, policy: str | None = None) -> str:
    """Of a tiny model of the variant."""
    config = variant_config(name)
    plan = plan_stage(RecomputeConfig(recompute_policy=policy), config.num_layers)
    with tp_state(1) as parallel:
        model = build_tiny_model(config, parallel, dtype=torch.float32, plan=plan)
        model.loss(*sample_tokens())  # makes the rotary tables
        with kept_for_backward(exclude=model.parameters(), model=model) as meter:
            loss = model.loss(*sample_tokens())
        sizes = Sizes(
            micro_batch_size=BATCH,
            seq_length=SEQ_LENGTH,
            padded_vocab_size=padded_vocab_size(1),
            tp_size=1,
            device="cpu",
            element_bytes=4,
        )
        saved = [
            Saved(kept.label, kept.shape, kept.dtype, kept.num_bytes)
            for kept in meter.storages().values()
        ]
    assert loss.requires_grad
    return difference(activation_terms(config, plan, sizes), saved)


@pytest.mark.parametrize("policy", [None, "*:full", "0:full;1:core_attn+layernorm+mlp"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_saved_tensor_is_paired_with_a_predicted_one(name: str, policy: str | None) -> None:
    assert differing(name, policy) == ""


@replaces("_activate", MLP)
def activations_are_scaled(activate, self, intermediate):
    return activate(self, intermediate) * (torch.ones(SEQ_LENGTH, BATCH, 1) + 0.0)


def test_one_more_saved_tensor_is_named_with_layer_module_shape_and_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activations_are_scaled(monkeypatch)
    found = differing("gpt2")
    where = (
        f"module decoder.layers.0.mlp: float32 [{SEQ_LENGTH}, {BATCH}, 1], "
        f"{SEQ_LENGTH * BATCH * 4} bytes"
    )
    assert f"layer 0, {where}" in found and found.startswith("saved but not predicted: ")
    assert "; layer 1, " in found and "predicted but not saved" not in found


def test_a_predicted_tensor_that_is_not_saved_is_named_with_its_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MLP, "_activate", lambda self, intermediate: intermediate * 2.0)
    found = differing("gpt2")
    assert found.startswith("predicted but not saved: layer 0, operation ")
    assert found.count(": fc1 output, ") == 2 and "saved but" not in found
