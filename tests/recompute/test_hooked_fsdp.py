"""Policies on models that FSDP2 shards: units around layers, units inside layers, and either order
of wrapping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_lite.recompute.apply import apply_policy_
from tests.support.odd_layers import Block, Model, Norms, assert_equal, batches
from tests.support.ranks import run_ranks


class Deep(Block):
    """A layer with a unit of its own, whose weights come and go within the layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Norms()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(self.body(hidden)).sin()


def trained(
    rank: int, world_size: int, kind: type[Block], policy: str | None, policy_first: bool
) -> list[Any]:
    """Losses of three micro-batches and the whole gradients."""
    torch.manual_seed(3)
    model, mesh = Model(kind), init_device_mesh("cpu", (world_size,))
    if policy is not None and policy_first:
        apply_policy_(model, layers_fqn="layers", policy=policy)
    for layer in model.layers:
        if isinstance(layer, Deep):
            fully_shard(layer.inner, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if policy is not None and not policy_first:
        apply_policy_(model, layers_fqn="layers", policy=policy)
    torch.manual_seed(rank)
    losses = [model(batch + rank) for batch in batches()]
    for loss in losses:
        loss.backward()
    return [
        *(loss.detach() for loss in losses),
        *(parameter.grad.full_tensor() for parameter in model.parameters()),
    ]


def faults(rank: int, world_size: int) -> None:
    expected = trained(rank, world_size, Deep, None, False)
    for policy, policy_first in (
        ("*:full", True),
        ("every-2:full", False),
        ("*:ops(matmul)", True),
        ("*:full@host", False),
    ):
        assert_equal(trained(rank, world_size, Deep, policy, policy_first), expected)


@pytest.mark.slow
def test_fsdp2_shards_a_model_with_a_policy_to_the_same_bits() -> None:
    run_ranks(faults, 2)
