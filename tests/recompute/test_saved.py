"""Saved-tensor hooks that put something else in place of a tensor: what they exchange, what they
let pass, what they hold."""

import gc

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lite.recompute.saved import bytes_of, exchanging, moving
from tests.support.storages import addresses


class Copied:
    """A copy that is not the original."""

    def __init__(self, tensor):
        self._bytes = bytes_of(tensor).clone()

    def __call__(self):
        return self._bytes


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def moved_grad(function, leaf):
    """The gradient of a leaf where everything that the function saves is moved, and how many
    storages were."""
    copies = []

    def move(tensor):
        copies.append(1)
        return Copied(tensor)

    with moving(move, kind="cpu", stay=()):
        output = function(leaf)
    return grad_of(output, leaf), len(copies)


def grad_of(output, leaf):
    return torch.autograd.grad(output.abs().sum() if output.is_complex() else output.sum(), leaf)[0]


VIEWS = {
    "whole": lambda x: (x * 2).square(),
    "transposed": lambda x: (x * 2).t().exp() * (x * 3).t(),
    "part": lambda x: (x * 2)[1:3, 2:].square(),
    "every second": lambda x: (x * 2)[::2, 1::2].square(),
    "expanded": lambda x: (x * 2)[:1].expand(4, 6).square(),
    "a scalar of it": lambda x: (x * 2)[2, 3].square(),
    "bits of another type": lambda x: (
        x * (x.detach() * 2).view(torch.int32)[1:, :].view(torch.float32).sum()
    ),
    "half": lambda x: (x.bfloat16() * 2).t()[1:].square().float(),
    "a tangent of zeros": lambda x: torch.func.jvp(lambda y: y.T @ x, (x * 1,), (x * 1,))[1],
    "integers": lambda x: x[torch.tensor([3, 1, 1])],
    "bools": lambda x: torch.where(x > 0, x * 2, x * 3),
    "conjugated, by bits in flags": lambda x: (x * 2j).conj().view(6, 4) @ x,
    "negated, by bits in flags": lambda x: (x * 2).conj().imag * x.real,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_what_was_moved_is_what_it_was(name):
    dtype = torch.complex64 if "bits in flags" in name else torch.float32
    leaf = numbers(4, 6, dtype=dtype).requires_grad_()
    grad, count = moved_grad(VIEWS[name], leaf)
    assert torch.equal(grad, grad_of(VIEWS[name](leaf), leaf)) and count >= 1


class Labelled(Tensor):
    pass


def test_tensors_of_other_classes_stay():
    leaf = numbers(4, 6).requires_grad_()
    assert moved_grad(lambda x: x * numbers(4, 6).as_subclass(Labelled), leaf)[1] == 0


def test_an_address_that_is_used_again_is_another_storage():
    """With many temporaries of one size, freed as soon as they are copied."""
    leaf, seen = numbers(4, 6).requires_grad_(), []

    def move(tensor):
        seen.extend(addresses([tensor]))
        return Copied(tensor)

    def total(x):
        total = x.new_zeros(())
        for number in range(1000):
            total = total + (x * number).square().sum()
        return total

    with moving(move, kind="cpu", stay=()):
        output = total(leaf)
    assert len(seen) == 1000  # at far fewer addresses, as the allocator likes
    assert torch.equal(grad_of(output, leaf), grad_of(total(leaf), leaf))


def test_an_output_that_stays_is_freed_with_its_graph_at_once():
    """Held as it is, it would hold the graph that holds it."""
    gc.disable()
    try:
        with exchanging(lambda tensor: None):
            output = numbers(3).requires_grad_().exp()
        memory = StorageWeakRef(output.untyped_storage())
        del output
        assert memory.expired()
    finally:
        gc.enable()
