"""Host offload: the same bits back, originals freed in time, copies back early enough, whatever the
device's haste."""

import pytest
import torch

from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.layer_runner import run_layers
from megatron_lite.recompute.offload import CopyStreams
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.recompute.stores import Stores
from tests.support.models import sample_tokens
from tests.support.offload import (
    CONTIGUOUS,
    CPU,
    POLICIES,
    Late,
    build,
    config_of,
    draw_alike,
    equal,
    step,
)


@pytest.fixture
def rng():
    return RngStreams(CPU, seed=3)


@pytest.mark.runs(daily=3, ci=10)
@pytest.mark.parametrize("policy", [*POLICIES, CONTIGUOUS])
def test_copies_that_are_made_as_late_as_they_may_be_change_no_gradient(policy):
    """Two steps of two micro-batches in flight, so that buffers are used again."""
    copy_streams = Late()
    ours, plain = build(policy, copy_streams), build("*:none")
    ours.decoder.stores.micro_batches = 2
    for batches in ((3, 4), (4, 5)):
        assert (
            equal(step(ours, batches=batches), step(plain, batches=batches))
            and copy_streams.faults == []
        )
    assert copy_streams.count > 0


@pytest.mark.parametrize(
    "policy", ["*:full/2@host", "*:none@host", "*:pointwise@host", "*:ops(matmul)@host", CONTIGUOUS]
)
def test_two_backwards_through_a_retained_graph_equal_those_without(policy):
    def outcome(model):
        draw_alike(model)
        loss = model.loss(*sample_tokens()).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    copy_streams = Late()
    assert (
        equal(outcome(build(policy, copy_streams)), outcome(build("*:none")))
        and copy_streams.faults == []
    )


def grads_of(layer, policy, rng, copy_streams):
    """Of a leaf, through one layer that calls no region."""
    leaf = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    stores = Stores(CPU)
    stores.copy_streams = copy_streams
    run_layers(
        plan_stage(config_of(policy), 1), [layer], leaf * 1, rng=rng, tp_group=None, stores=stores
    ).sum().backward()
    assert stores.host_bytes == 0
    return [leaf.grad]


def test_a_layer_may_run_a_backward_of_its_own_in_its_forward(rng):
    """It reads what is still on its way."""

    def layer(hidden, _):
        energy = hidden.tanh().exp().sum()
        (force,) = torch.autograd.grad(energy, hidden, create_graph=True)
        return force.square() + hidden.sin()

    copy_streams = Late()
    assert (
        equal(
            grads_of(layer, "*:none@host", rng, copy_streams),
            grads_of(layer, "*:none", rng, CopyStreams()),
        )
        and copy_streams.faults == []
    )


def test_a_tensor_that_is_written_to_on_its_way_is_an_error(rng):
    """As it is without offload."""

    def layer(hidden, _):
        y = hidden * 1
        z = y.square()
        y.add_(1.0)
        return z

    for policy in ("*:none@host", "*:none"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grads_of(layer, policy, rng, Late())
