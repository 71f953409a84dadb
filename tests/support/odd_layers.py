"""Layers of plain torch with every kind of side channel and state.

foreign_layers.py has every kind of output and argument.

`Model` has three of them, and `outcome` returns the result of its training.
"""

import random

import numpy as np
import torch
from torch import nn

from megatron_lite.api import apply_policy_

WIDTH = 6


class Block(nn.Module):
    """Two linear layers and dropout, the base of every layer below."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.3)

    def body(self, hidden):
        return hidden + self.second(self.dropout(torch.tanh(self.first(hidden))))

    def forward(self, hidden):
        return self.body(hidden)


class Norms(Block):
    """A layer with BatchNorm. Its kernel writes to its statistics without a new tensor version.

    BatchNorm also counts its batches.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, hidden):
        return self.body(self.norm(hidden))


class InOrder(nn.Module):
    """A list of layers that is called in order."""

    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class SetsAux(Block):
    """A layer whose loss leaves it through an attribute."""

    def forward(self, hidden):
        hidden = self.body(hidden)
        self.aux = hidden.square().mean()
        return hidden


EACH_KIND = ("*:full", "*:ops(matmul)", "*:full@host", "*:none@host")
POLICIES = ["*:full", "every-2:full", "*:ops(matmul)", "0:ops(matmul/2); 1:full@host; *:none@host"]


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Linear(6, 6)
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x):
        hidden = self.embedding(x)
        loss = torch.zeros(())
        for layer in self.layers:
            hidden = layer(hidden)
            loss = loss + getattr(layer, "aux", 0.0)
        return loss + hidden.square().mean()


def put(model, policy, **options):
    """Puts the policy on the layers of a model."""
    apply_policy_(model, layers_fqn="layers", policy=policy, **options)


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(5, 6, generator=generator, dtype=torch.float32) for _ in range(3)]


def outcome(make, policy, run, **options):
    """Trains a model. Returns the result of `run`, gradients, buffers and the next random numbers.

    The gradient of a parameter without one is None.
    """
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model = make()
    if policy is not None:
        put(model, policy, **options)
    results = [value.detach().clone() for value in run(model)]
    return [
        *results,
        *(parameter.grad for parameter in model.parameters()),
        *(buffer.clone() for buffer in model.buffers()),
        torch.rand(3),
        torch.tensor([random.random(), np.random.random()]),
    ]


def step(model):
    """Runs three micro-batches, whose gradients add up. Returns their losses."""
    losses = [model(batch) for batch in batches()]  # all forwards first, as in a pipeline
    for loss in losses:
        loss.backward()
    return losses


def assert_changes_nothing(make, policy, run):
    """A model with the policy has the outcome of one without."""
    assert_equal(outcome(make, policy, run), outcome(make, None, run))


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert (one is None) == (other is None), number
        assert one is None or torch.equal(one, other), number
