"""What a layer holds is known from a call that left it as it was. Every change since is seen."""

import copy

import pytest
import torch
from torch import nn

from tests.support.odd_layers import Block, Model, assert_equal, batches, outcome


class Holds(Block):
    def __init__(self):
        super().__init__()
        self.more, self.less, self.table, self.scale = [3.0, 2.0], [1.0], {"other": 5.0}, 1.0
        self.first.register_buffer("count", torch.ones(()))

    def forward(self, hidden):
        if "counts" in self.table:
            self.scale += 1
        return self.body(hidden * (sum(self.more) - sum(self.less)) * self.scale)


class Counting(nn.Linear):
    def forward(self, hidden):
        self.count += 1
        return super().forward(hidden) * float(self.count)


CHANGES = {
    "module": lambda layer: setattr(
        layer, "first", nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12))
    ),
    "class": lambda layer: setattr(layer.first, "__class__", Counting),
    "hook": lambda layer: layer.first.register_forward_hook(lambda *given: 2 * given[2]),
    "item that moves": lambda layer: layer.less.insert(0, layer.more.pop()),
    "key, and a counter from then on": lambda layer: layer.table.update(
        counts=layer.table.pop("other")
    ),
}


def trained(policy, name):
    def run(model):
        layer, losses = model.layers[1], [model(batches()[0]) for _ in range(6)]
        if policy:
            assert layer.forward._written.known
            assert not copy.deepcopy(layer).forward._written.known
        if name == "class":  # which no replay restores
            sum(losses).backward()
            losses.clear()
        CHANGES[name](layer)
        losses += map(model, batches())
        sum(losses).backward()
        return losses

    return outcome(lambda: Model(Holds), policy, run)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_forward_and_backward_is_seen(name):
    """The forwards before it are replayed without it, and those after it with it."""
    assert_equal(trained("*:full", name), trained(None, name))
