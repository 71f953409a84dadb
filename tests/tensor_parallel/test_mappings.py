"""The gradient of gathered columns, which no training asks for.

Values and gradients of whole models on several ranks are those of one rank:
tests/parallel/test_equality.py.
"""

import torch

from megatron_lite.tensor_parallel.mappings import gather_from_tensor_parallel_region
from tests.support.models import on_ranks


def test_a_rank_has_the_gradient_of_its_own_columns():
    def work(parallel):
        own, weights = torch.zeros(2, 3, requires_grad=True), torch.arange(12.0).view(2, 6)
        (gather_from_tensor_parallel_region(own, parallel.tp_group) * weights).sum().backward()
        assert torch.equal(own.grad, weights.chunk(2, -1)[parallel.rank])

    on_ranks(work, 2, tp_size=2)
