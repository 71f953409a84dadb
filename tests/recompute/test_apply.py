"""Policies on models that are not ours: transformers' GPT-2 and Llama, with dropout."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from megatron_lite.memory.measure.live_storages import LiveStorages, allocator_peak
from megatron_lite.parallel.tensor_hash import keys_on
from megatron_lite.recompute import witness
from megatron_lite.recompute.apply import apply_policy_
from tests.support.foreign_families import FAMILIES, tokens

MODELS = {"GPT-2": "transformer.h", "Llama": "model.layers"}  # by name: their layers


def alive_after_forward(name, prepare):
    """Bytes, whoever keeps them, but for the states of the random numbers: no operator makes those
    of transformers."""
    torch.manual_seed(1)
    model = FAMILIES[name].build()
    prepare(model)
    model.train()
    with LiveStorages() as live:
        loss = model(input_ids=tokens(0), labels=tokens(0), use_cache=False).loss
    states = torch.get_rng_state().numel()
    assert loss.grad_fn is not None
    return sum(size for size in live.storages().values() if size != states)


@pytest.mark.parametrize("name", MODELS)
def test_recomputing_every_layer_keeps_no_more_than_transformers_own_checkpointing_does(name):
    def own(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})

    ours = partial(apply_policy_, layers_fqn=MODELS[name], policy="*:full")
    assert alive_after_forward(name, ours) <= alive_after_forward(name, own)


GPT2 = "transformer.h"


@pytest.mark.parametrize(
    "fqn, text, message",
    [
        (
            "transformer.layers",
            "*:full",
            "'transformer.layers' is no module of the model: a policy needs",
        ),
        ("transformer.h.0", "*:full", "is a GPT2Block: a policy needs a ModuleList, a ModuleDict"),
        ("transformer", "*:full", "a Sequential of layers; its lists of modules are transformer.h"),
        ("outer", "*:full", "is a ModuleList without a module that can be called"),
        (GPT2, "*:mlp", "mlp names regions, and this model's layers have none"),
        (GPT2, "*:full/2", "one by one"),
        (GPT2, "*:full@split", "as DTensors"),
        (
            GPT2,
            "9:full",
            "policy for transformer.h: the rule 9:full never applies: layer 9 does not exist",
        ),
        (GPT2, "every-9+8:full", "does not exist"),
        (GPT2, "*:full; 0:none", "never applies"),
        (GPT2, "*:ful", "in the rule"),
        (GPT2, "0:ops(aten.mmm.default)", "has no operator"),
    ],
)
def test_what_cannot_be_done_is_one_error_and_the_model_is_as_it_was(fqn, text, message):
    model = FAMILIES["GPT-2"].build()
    model.transformer.h.append(None)  # which is no layer
    model.outer = nn.ModuleList([nn.ModuleList(model.transformer.h)])
    with pytest.raises(ValueError) as raised:
        apply_policy_(model, layers_fqn=fqn, policy=text)
    assert message in str(raised.value) and "--recompute-policy" not in str(raised.value)
    assert not any("forward" in module.__dict__ for module in model.modules())


class Chain(nn.Module):
    """A layer whose forward holds nearly nothing but what it saves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(2**19))
        self.load = torch.zeros(2**19)

    def forward(self, hidden):
        for _ in range(60):
            hidden = hidden.sin()
        return hidden


def test_a_verified_call_holds_what_it_saves_and_the_first_one_copies_as_well():
    def peaks(verify):
        """Returns those of two calls."""
        model = nn.Sequential(Chain())
        apply_policy_(model, layers_fqn="", policy="*:full", verify=verify)
        found = []
        for _ in range(2):
            with allocator_peak() as measured:
                model(given)
            found.append(measured.peak_bytes)
        return found

    given = torch.rand(2**19, requires_grad=True)
    keys_on(given.device)  # whichever test comes first in its process
    first, second = peaks(verify=True)
    _, unverified = peaks(verify=False)
    assert first - second == pytest.approx(3 * given.nbytes, rel=0.05)
    assert second - unverified == pytest.approx(59 * given.nbytes, rel=0.05)


def test_the_first_call_does_not_copy_parameters():
    model = nn.Sequential(nn.Linear(1024, 2048))
    apply_policy_(model, layers_fqn="", policy="*:full")
    with allocator_peak() as measured:
        model(torch.rand(1, 1024))
    assert measured.peak_bytes < 4 * 2**20  # the weight has 8 MiB, which the hash reads in parts


class Wobbles(torch.autograd.Function):
    """An operator that does not repeat itself, as kernels that add in any order."""

    runs = itertools.count()

    @staticmethod
    def forward(ctx, value):
        return value * (1 + 1e-6 * next(Wobbles.runs))

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


def test_an_operator_that_does_not_repeat_itself_on_the_device_is_named(monkeypatch):
    class Layer(nn.Module):
        def forward(self, hidden):
            return Wobbles.apply(hidden.exp()).sin()

    monkeypatch.setattr(witness, "_may_round", lambda tensors: True)  # as on a GPU
    model = nn.Sequential(Layer())
    apply_policy_(model, layers_fqn="", policy="*:full")
    with pytest.warns(UserWarning, match="by rounding, first in the result of Wobbles: "):
        model(torch.rand(5, requires_grad=True)).sum().backward()
