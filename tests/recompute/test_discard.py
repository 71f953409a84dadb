"""Example tensors: gone between forward and backward, rebuilt once a backward, and the same
gradients to the bit."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lite.recompute.checkpoint import checkpoint
from megatron_lite.recompute.region_runner import discarding
from tests.support.odd_layers import assert_equal


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Example:
    """z = sum of what the consumers make of y, y = tanh(x w), where y is discarded."""

    calls: list[str] = field(default_factory=list)
    leaf: Tensor = field(default_factory=lambda: numbers(4, 6, seed=1).requires_grad_())
    weight: Tensor = field(default_factory=lambda: numbers(6, 6, seed=2).requires_grad_())
    after: Tensor = field(default_factory=lambda: numbers(6, 5, seed=3).requires_grad_())

    def norm(self, hidden, weight):
        self.calls.append("norm")
        return torch.tanh(hidden @ weight)

    def linear(self, normed):
        return normed @ self.after

    def square(self, normed):
        return normed.square()

    def forward(self, *consumers, discard=True):
        """(z, the memory of y)"""
        hidden = self.leaf * 1
        with discarding() as discard_output:
            y = (
                checkpoint(self.norm, hidden, self.weight, rng=None)
                if discard
                else self.norm(hidden, self.weight)
            )
            if discard:
                discard_output(y)
            z = torch.stack([consumer(y).sum() for consumer in consumers]).sum()
        return z, StorageWeakRef(y.untyped_storage())

    def grads(self):
        return [self.leaf.grad, self.weight.grad, self.after.grad]


def kept_grads(example, *consumers):
    """Those of the same consumers where nothing is discarded."""
    kept = Example(after=example.after.detach().requires_grad_())
    kept.forward(*(getattr(kept, name) for name in consumers), discard=False)[0].backward()
    return kept.grads()


@pytest.mark.parametrize("names", [("linear",), ("linear", "square")])
def test_in_each_backward_all_consumers_share_one_rebuild_of_a_tensor_that_was_freed(names):
    example = Example()
    kept = Example(after=example.after.detach().clone().requires_grad_())
    output, memory = example.forward(*(getattr(example, name) for name in names))
    expected, _ = kept.forward(*(getattr(kept, name) for name in names), discard=False)
    assert memory.expired() and example.calls == ["norm"]
    for backwards in (1, 2, 3):
        output.backward(retain_graph=True)
        expected.backward(retain_graph=True)
        assert memory.expired() and example.calls == ["norm"] * (1 + backwards)
        assert_equal(example.grads(), kept.grads())


def test_backward_reads_nothing_that_the_forward_left_behind():
    """Not even where the caller keeps the discarded tensor, and spoils it."""
    example = Example()
    with discarding() as discard_output:
        y = checkpoint(example.norm, example.leaf * 1, example.weight, rng=None)
        discard_output(y)
        output = example.linear(y).sum()
    y.detach().fill_(torch.nan)
    output.backward()
    assert_equal(example.grads(), kept_grads(example, "linear"))


def test_a_gradient_that_misses_the_discarded_tensor_rebuilds_it_for_a_later_backward():
    example = Example()
    output, _ = example.forward(example.linear)
    (alone,) = torch.autograd.grad(output, [example.after], retain_graph=True)
    assert (
        example.calls == ["norm"] * 2 and example.leaf.grad is None and example.weight.grad is None
    )
    output.backward()
    expected = kept_grads(example, "linear")
    assert example.calls == ["norm"] * 2
    assert_equal([*example.grads(), alone], [*expected, expected[2]])


def test_after_the_layer_nothing_is_held_for_discarding():
    """An address that was discarded may be another tensor's by then."""
    y = numbers(4, 6, seed=1).requires_grad_() * 1
    memory = StorageWeakRef(y.untyped_storage())
    with discarding() as discard_output:
        discard_output(y)
        del y
        assert not memory.expired()
    assert memory.expired()
