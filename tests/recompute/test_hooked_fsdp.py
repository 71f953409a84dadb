"""Policies on models that FSDP2 or FSDP1 shards: units around layers, units inside layers, and
either order of wrapping."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from megatron_lite.parallel.torch_internals import collectives_so_far
from megatron_lite.parallel.weights import local_part
from megatron_lite.recompute.apply import apply_policy_
from tests.support.foreign_families import FAMILIES, tokens
from tests.support.odd_layers import Block, Model, Norms, assert_equal, batches, put
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class Deep(Block):
    """A layer with a unit of its own, whose weights come and go within the layer's forward."""

    def __init__(self):
        super().__init__()
        self.inner = Norms()

    def forward(self, hidden):
        return self.inner(self.body(hidden)).sin()


def of_micro_batches(model, shift=0):
    """Losses of three micro-batches and the whole gradients."""
    losses = [model(batch + shift) for batch in batches()]
    for loss in losses:
        loss.backward()
    gradients = [each.grad for each in model.parameters()]
    return [
        *(loss.detach() for loss in losses),
        *(each.full_tensor() if isinstance(each, DTensor) else each for each in gradients),
    ]


def sharded(rank, world_size, policy, policy_first):
    torch.manual_seed(3)
    model, mesh = Model(Deep), init_device_mesh("cpu", (world_size,))
    if policy_first:
        put(model, policy)
    for layer in model.layers:
        fully_shard(layer.inner, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not policy_first:
        put(model, policy)
    torch.manual_seed(rank)
    return of_micro_batches(model, rank)


def faults(rank, world_size):
    expected = sharded(rank, world_size, "*:none", False)
    for policy, policy_first in (
        ("*:full", True),
        ("every-2:full", False),
        ("*:ops(matmul)", True),
        ("*:full@host", False),
        ("*:none@host", True),
    ):
        assert_equal(sharded(rank, world_size, policy, policy_first), expected)


def test_fsdp2_shards_a_model_with_a_policy_to_the_same_bits():
    run_ranks(faults, 2)


def trained_in_fsdp1(rank, policy, policy_first, use_orig_params):
    """Losses and this rank's gradients of three steps."""
    torch.manual_seed(3)
    model = Model(Block)
    if policy_first:
        put(model, policy)
    for parent, name in ((model, "embedding"), *((model.layers, str(n)) for n in range(3))):
        unit = getattr(parent, name)
        wrapped = FullyShardedDataParallel(unit, device_id=CPU, use_orig_params=use_orig_params)
        setattr(parent, name, wrapped)
    if not policy_first:
        put(model, policy)
    torch.manual_seed(rank)
    found = []
    for batch in batches():
        loss = model(batch + rank)
        loss.backward()
        found += [loss.detach(), *(each.grad for each in model.parameters())]
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each.sub_(each.grad)
                each.grad = None
    return found


def faults_in_fsdp1(rank, world_size):
    for use_orig_params in (False, True):
        expected = trained_in_fsdp1(rank, "*:none", False, use_orig_params)
        for policy, policy_first in (
            ("*:full", use_orig_params),
            ("*:ops(matmul)", not use_orig_params),
            ("*:full@host", use_orig_params),
        ):
            assert_equal(trained_in_fsdp1(rank, policy, policy_first, use_orig_params), expected)
    layer = Deep()
    layer.inner = FullyShardedDataParallel(layer.inner, device_id=CPU)
    with pytest.raises(ValueError, match="around a part of a layer"):
        apply_policy_(nn.Sequential(layer), layers_fqn="", policy="*:full")


@pytest.mark.long
def test_fsdp1_shards_a_model_with_a_policy_to_the_same_bits():
    run_ranks(faults_in_fsdp1, 2)


def trained_in_dtensors(world_size, policy, seed=3):
    """Trains a model whose layers are split by torch's own DTensors. seed: of the rest of it."""
    torch.manual_seed(seed)
    model, mesh = Model(Block), init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        layer.dropout.p = 0.0
        parallelize_module(layer, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    put(model, policy)
    return of_micro_batches(model)


def faults_in_dtensors(rank, world_size):
    expected = trained_in_dtensors(world_size, "*:none")
    for policy in (
        "*:full", "*:ops(matmul)", "*:ops(matmul,collective)", "*:ops(matmul)@host",
        "*:full@split", "every-2:full@split",
    ):  # fmt: skip
        assert_equal(trained_in_dtensors(world_size, policy), expected)
    # As with parts of the sequence, ranks have other hidden states.
    expected = trained_in_dtensors(world_size, "*:none", rank)
    assert_equal(trained_in_dtensors(world_size, "*:full@split", rank), expected)
    whole = Model(Block)
    for policy, reason in (("*:full@split", "as DTensors"), ("*:full@split+host", "not both")):
        with pytest.raises(ValueError, match=reason):
            put(whole, policy)


@pytest.mark.long
def test_layers_of_dtensors_train_to_the_same_bits():
    run_ranks(faults_in_dtensors, 2)


class Sends(Block):
    """A layer that ends with a collective, of which each rank must run equally many."""

    def forward(self, hidden):
        result = self.second(torch.tanh(self.first(hidden)))
        dist.all_reduce(result.detach().clone())
        return result


def collectives(rank, world_size):
    model = Model(Sends)
    put(model, "*:full", verify=False)
    for _ in range(3):
        model(batches()[0]).backward()
    return sum(collectives_so_far())


def test_a_replay_goes_on_to_a_collective_at_its_end():
    assert run_ranks(collectives, 2) == [3 * 2 * len(Model(Sends).layers)] * 2


def trained_as_divided(rank, world_size, folder, policy):
    """Loss and gradients of a model that transformers has divided by its own plan."""
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").train()
    apply_policy_(model, layers_fqn="model.layers", policy=policy, verify=True)
    torch.manual_seed(3)
    loss = model(input_ids=tokens(0), labels=tokens(0), use_cache=False).loss
    loss.backward()
    gradients = [local_part(each.grad) for each in model.parameters()]
    assert any(isinstance(each, DTensor) for each in model.parameters())
    return [loss.detach(), *gradients]


@pytest.mark.runs(ci=1)
@pytest.mark.parametrize("family", ["Mixtral, router loss", "Llama"])
def test_layers_that_transformers_divides_train_to_the_same_bits(family, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")  # its tp_plan needs it
    FAMILIES[family].build().save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")  # transformers reads it; the group is there

    def check(rank, world_size):
        expected = trained_as_divided(rank, world_size, tmp_path, "*:none")
        for policy in ("*:full@split", "*:ops(matmul,collective)"):
            assert_equal(trained_as_divided(rank, world_size, tmp_path, policy), expected)

    run_ranks(check, 2)
