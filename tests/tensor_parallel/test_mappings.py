"""The conjugate mappings on views. Values and gradients of whole models on several ranks are those
of one rank: tests/parallel/test_equality.py."""

import torch

from megatron_lite.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from tests.support.models import on_ranks

MAPPINGS = (
    reduce_from_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    gather_from_tensor_parallel_region,
)


def whole_numbers(*shape, seed):
    """Sums of these are exact, so that results can be compared with ==."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def test_inputs_may_be_views_and_are_never_written():
    def work(parallel):
        for mapping in MAPPINGS:
            base = whole_numbers(5, 2, 4, seed=parallel.rank).requires_grad_()
            x = base.transpose(0, 2)  # [4, b, h], not contiguous
            output = mapping(x, parallel.tp_group)
            grad_output = (
                whole_numbers(*output.shape, seed=9).transpose(0, 1).contiguous().transpose(0, 1)
            )
            kept = base.detach().clone(), grad_output.clone()
            output.backward(grad_output)
            dense = base.detach().transpose(0, 2).contiguous().requires_grad_()
            mapping(dense, parallel.tp_group).backward(grad_output.contiguous())
            assert torch.equal(base.grad, dense.grad.transpose(0, 2)), mapping.__name__
            assert torch.equal(base.detach(), kept[0]) and torch.equal(grad_output, kept[1])
            if mapping is gather_from_tensor_parallel_region:  # no training runs its backward
                assert torch.equal(dense.grad, grad_output.chunk(2, -1)[parallel.rank])

    on_ranks(work, 2, tp_size=2)
