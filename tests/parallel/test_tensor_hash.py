"""The hash of a tensor's bits: every change of a bit or a place shows, on any rank."""

import itertools

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch.masked import masked_tensor
from torch.utils._mode_utils import no_dispatch

from megatron_lite.parallel import tensor_hash as module
from megatron_lite.parallel.collectives import odd_ones_out
from megatron_lite.parallel.tensor_hash import quick_hash
from tests.support.models import on_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def test_blocks_count_in_their_order_and_strides_do_not(monkeypatch):
    tensor = torch.randn(33, 7)
    data = torch.cat([torch.zeros(3, dtype=torch.uint8), tensor.view(-1).view(torch.uint8)])
    keys = module.keys_on.__wrapped__
    for _ in range(2):
        found = [quick_hash(one) for one in (tensor, tensor.t().contiguous().t(), data[3:])]
        assert len({*map(int, found)}) == 1  # the last does not begin at a multiple of 8 bytes
        assert int(quick_hash(tensor.flip(0))) != int(found[0])
        monkeypatch.setattr(module, "hashed_at_a_time", lambda device: 5)
        monkeypatch.setattr(module, "keys_on", keys)
    equal, other = torch.arange(20).repeat(2, 1), torch.arange(20, 40)
    blocks = torch.cat([equal, other[None]])  # of 5 words each
    assert len({int(quick_hash(blocks[order])) for order in ([0, 1, 2], [0, 2, 1], [2, 0, 1])}) == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_depends_on_every_bit(dtype):
    tensor = (torch.arange(5) % 2).to(dtype)
    if dtype == torch.bool:
        changed = [tensor ^ (torch.arange(5) == place) for place in range(5)]
    else:
        changed = [flipped(tensor, bit) for bit in range(8 * 5 * tensor.element_size())]
    assert len({int(quick_hash(one)) for one in [tensor, *changed]}) == len(changed) + 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_depends_on_each_sign_of_eight_numbers(dtype):
    signs = itertools.product([1.0, -1.0], repeat=8)
    assert len({int(quick_hash(torch.tensor(one, dtype=dtype))) for one in signs}) == 2**8


def flipped(tensor, bit):
    """A copy with one bit changed."""
    raw = tensor.clone().view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(tensor.dtype)


@pytest.mark.runs(daily=2, ci=3)
@pytest.mark.parametrize(
    "changed, odd",
    [
        ((), [[]] * 4),
        ((2,), [[], [], [1], []]),
        ((1, 3), [[1], [1], [1], [1]]),
        ((0, 1, 2), [[1], [1], [1], [1]]),
    ],
)
def test_ranks_that_differ_know_who_is_alone(changed, odd):
    """A rank is odd where no more than half hold what it does. The third case: 2 against 2; the
    last: all differ."""

    def work(parallel):
        tensors = [torch.arange(9.0), torch.arange(8.0)]
        if parallel.rank in changed:
            tensors[1][3] += 1e-6 * (1.0 if len(changed) == 2 else parallel.rank + 1.0)
        return odd_ones_out(torch.stack([quick_hash(one) for one in tensors]), parallel.tp_group)

    assert on_ranks(work, 4, tp_size=4) == odd


class Noted(torch.Tensor):
    """A tensor with memory of its own and an attribute."""

    def detach(self):
        self.notes = ""
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with no_dispatch():
            return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "make",
    [
        lambda one: torch.tensor([one]).as_subclass(Noted),
        # The dense form of an adjacency matrix may need more memory than there is.
        lambda one: torch.sparse_coo_tensor([[0, one], [1, 0]], torch.ones(2), [10**7] * 2),
        lambda one: masked_tensor(torch.ones(2), torch.eye(2)[one] > 0),
    ],
)
def test_tensors_of_other_kinds_have_the_hash_of_their_parts(make):
    first, same, other = map(quick_hash, map(make, (0, 0, 1)))
    assert first == same != other


def test_a_hash_waits_for_the_collective_of_its_tensor(monkeypatch):
    monkeypatch.setattr(functional, "wait_tensor", torch.exp_)
    assert quick_hash(functional.AsyncCollectiveTensor(torch.zeros(4))) == quick_hash(torch.ones(4))
