"""Recorded timelines: the same gradients, every byte in one category, each operator in its phase
and module."""

import pytest
import torch

from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.measure.recorder import record_timeline
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state

TOKENS, LABELS = sample_tokens()
UNIFORM_2 = "*:full/2"


def tiny_model(parallel, policy, *, dropout=0.1):
    config = tiny_config(hidden_dropout=dropout, attention_dropout=dropout)  # 3 layers
    return build_tiny_model(config, parallel, dtype=torch.float32, plan=policy)


def mean_loss(model):
    return model.loss(TOKENS, LABELS).mean()


def recorded(policy):
    with tp_state(1) as parallel:
        model = tiny_model(parallel, policy)
        return record_timeline(model, lambda: mean_loss(model), name="x")


@pytest.mark.parametrize("policy", ["*:none", UNIFORM_2, "*:core_attn"])
def test_activations_at_the_end_of_forward_are_those_of_the_meter(policy):
    with tp_state(1) as parallel:
        model = tiny_model(parallel, policy)
        with kept_for_backward(exclude=model.parameters()) as meter:
            loss = mean_loss(model)
        # the embedding keeps the tokens, which existed before
        expected = meter.total_bytes() - TOKENS.nbytes
        assert loss.requires_grad
    forward = [event for event in recorded(policy).events if event.phase == "forward"]
    # the float32 loss of each label, and the mean
    assert forward[-1].live_bytes == (expected, 0, 0, LABELS.numel() * 4 + 4)


def test_replays_are_told_from_backward_layer_by_layer_from_the_last_unit():
    def order(phase):
        layers = [
            ".".join(event.module.split(".")[:3])
            for event in recorded(UNIFORM_2).events
            if event.phase == phase and event.module.startswith("decoder.layers.")
        ]
        return [
            layer for place, layer in enumerate(layers) if place == 0 or layer != layers[place - 1]
        ]

    first, second, third = (f"decoder.layers.{layer}" for layer in range(3))
    assert order("forward") == [first, second, third]
    assert order("replay") == [third, first, second]
    assert order("backward") == [third, second, first]
