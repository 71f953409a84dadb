"""FSDP2's units: what is gathered and reduced and when, of our model."""

import pytest
import torch
from torch import nn

from megatron_lite.parallel.fsdp import UnitGradients
from tests.support.collectives import recorded_collectives
from tests.support.layouts import LAYOUTS, backward, build
from tests.support.models import on_ranks

NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce"}


def exchanged(name, layout, **model):
    """What one micro-batch sends between two ranks: "gather" or "reduce", and of which unit, told
    by its size."""

    def work(parallel):
        built, optimizer = build(name, parallel, LAYOUTS[layout], dtype=torch.float32, **model)
        layer = sum(parameter.numel() for parameter in built.decoder.layers[0].parameters())
        vocabulary = built.embedding.word_embeddings.weight.numel()
        units = {layer: "layer", vocabulary: "vocabulary"}
        backward(built, optimizer, parallel, 0, micro_batches=1)
        optimizer.step(0.0)
        with recorded_collectives() as sent:
            backward(built, optimizer, parallel, 0, micro_batches=1)
        return [
            f"{NAMES[one.name]} {units.get(one.shape[0], 'rest')}"
            for one in sent
            if one.name in NAMES
        ]

    first, second = on_ranks(work, 2)
    assert first == second
    return first


@pytest.mark.runs
@pytest.mark.parametrize("policy", [None, *("*:full", "*:full/2"), "*:core_attn+layernorm+mlp"])
def test_a_layer_is_gathered_for_forward_and_for_backward_and_not_again_for_its_replay(policy):
    layers = ["gather layer"] * 2
    forward, reduced = ["gather rest", *layers], ["reduce layer", "reduce layer", "reduce rest"]
    assert exchanged("gpt2", "fsdp2", plan=policy) == [*forward, *layers, *reduced]
    assert exchanged("gpt2", "fsdp2, no reshard", plan=policy) == [*forward, *reduced]


def test_a_gradient_that_someone_else_can_read_is_not_freed():
    for hold in (
        lambda grad: grad,
        lambda grad: grad.detach(),
        lambda grad: grad.view(-1),
        lambda grad: grad[:1],
    ):
        parameter, gradients = nn.Parameter(torch.ones(4, 2)), UnitGradients()
        for _ in range(2):
            gradients.record([parameter])
        (parameter * torch.arange(8.0).view(4, 2)).sum().backward()
        torchs, parameter.grad = parameter.grad, None
        held = hold(torchs)
        expected = held.clone()
        gradients.free_()
        # a name of its own: pytest would read the freed memory to print it
        freed = held.untyped_storage().nbytes() == 0
        assert not freed
        assert torch.equal(held, expected)


def test_a_gradient_that_only_torchs_loop_names_is_freed_once_it_is_copied():
    parameter, gradients = nn.Parameter(torch.ones(4, 2)), UnitGradients()
    gradients.record([parameter])
    (parameter * 2.0).sum().backward()
    torchs, parameter.grad = parameter.grad, None
    gradients.free_()
    assert torchs.untyped_storage().nbytes() == 0
