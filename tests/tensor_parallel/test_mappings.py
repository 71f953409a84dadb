"""The conjugate mappings: what each does to values and to gradients, on unequal small shapes and a
real group."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from tests.support.models import tp_state
from tests.support.ranks import run_ranks

S, B, H = 6, 2, 5
T = 3


def whole_numbers(*shape, seed):
    """Sums of these are exact, so that results can be compared with ==."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def apply_on_ranks(mapping, input_shape, output_shape):
    """Per rank: input, output, grad_output, grad_input, each with values of its own."""

    def work(rank, world_size):
        with tp_state(world_size) as parallel:
            x = whole_numbers(*input_shape, seed=rank).requires_grad_()
            output = mapping(x, parallel.tp_group)
            grad_output = whole_numbers(*output_shape, seed=100 + rank)
            output.backward(grad_output)
            return x.detach(), output.detach(), grad_output, x.grad

    return zip(*run_ranks(work, T), strict=True)


def columns(rank, tensor):
    return tensor.chunk(T, dim=-1)[rank]


# By mapping: the shapes of input and output; the output of a rank from all inputs, and the input's
# gradient from all gradients of outputs.
EXPECTED = {
    reduce_from_tensor_parallel_region: (
        ((S, B, H), (S, B, H)),
        lambda rank, inputs: sum(inputs),
        lambda rank, grads: grads[rank],
    ),
    gather_from_sequence_parallel_region: (
        ((S // T, B, H), (S, B, H)),
        lambda rank, inputs: torch.cat(inputs),
        lambda rank, grads: sum(grads).chunk(T)[rank],
    ),
    reduce_scatter_to_sequence_parallel_region: (
        ((S, B, H), (S // T, B, H)),
        lambda rank, inputs: sum(inputs).chunk(T)[rank],
        lambda rank, grads: torch.cat(grads),
    ),
    gather_from_tensor_parallel_region: (
        ((S, B, H), (S, B, T * H)),
        lambda rank, inputs: torch.cat(inputs, dim=-1),
        lambda rank, grads: columns(rank, grads[rank]),
    ),
}


@pytest.mark.parametrize("mapping", EXPECTED, ids=lambda mapping: mapping.__name__)
def test_values_and_gradients_are_those_of_the_table(mapping):
    shapes, forward, backward = EXPECTED[mapping]
    inputs, outputs, grad_outputs, grads = apply_on_ranks(mapping, *shapes)
    for rank in range(T):
        assert torch.equal(outputs[rank], forward(rank, inputs))
        assert torch.equal(grads[rank], backward(rank, grad_outputs))


def test_inputs_may_be_views_and_are_never_written():
    def work(rank, world_size):
        with tp_state(2) as parallel:
            for mapping in EXPECTED:
                base = whole_numbers(H, B, 4, seed=rank).requires_grad_()
                x = base.transpose(0, 2)  # [4, b, h], not contiguous
                output = mapping(x, parallel.tp_group)
                grad_output = (
                    whole_numbers(*output.shape, seed=9)
                    .transpose(0, 1)
                    .contiguous()
                    .transpose(0, 1)
                )
                kept = base.detach().clone(), grad_output.clone()
                output.backward(grad_output)
                dense = base.detach().transpose(0, 2).contiguous().requires_grad_()
                mapping(dense, parallel.tp_group).backward(grad_output.contiguous())
                assert torch.equal(base.grad, dense.grad.transpose(0, 2)), mapping.__name__
                assert torch.equal(base.detach(), kept[0]) and torch.equal(grad_output, kept[1])

    run_ranks(work, 2)
