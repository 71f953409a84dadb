"""The hash of a tensor's bits: every change of a bit or a place shows, on any rank."""

from __future__ import annotations

import hashlib
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_lite.parallel import tensor_hash as module
from megatron_lite.parallel.tensor_hash import are_equal, odd_ones_out, tensor_hash, tensor_hashes
from megatron_lite.parallel.texts import by_rank, gather_texts
from tests.support.models import tp_state
from tests.support.ranks import run_ranks

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def in_python(tensor: Tensor) -> int:
    """The formula in whole numbers."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 8)
    total = tensor.numel()
    for place in range(len(data) // 8):
        word = (
            int.from_bytes(data[8 * place : 8 * place + 8], "little") + place * GOLDEN & 2**64 - 1
        )
        word = (word ^ word >> 30) * FIRST & 2**64 - 1
        word = (word ^ word >> 27) * SECOND & 2**64 - 1
        total += word ^ word >> 31
    return total & 2**64 - 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (5, 64), (0,)])
def test_it_is_the_formula_in_whole_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert int(tensor_hash(tensor)) % 2**64 == in_python(tensor)


def test_pieces_transposes_and_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(33, 7)
    whole = in_python(tensor)
    monkeypatch.setattr(module, "hashed_at_a_time", lambda device: 5)
    assert int(tensor_hash(tensor)) % 2**64 == whole
    assert int(tensor_hash(tensor.t().contiguous().t())) % 2**64 == whole
    flat = torch.cat([torch.zeros(3), tensor.view(-1)])  # not at a multiple of 8 bytes
    assert int(tensor_hash(flat[3:].view(33, 7))) % 2**64 == whole


def ulp(tensor: Tensor) -> None:
    tensor.view(-1)[11] = torch.nextafter(tensor.view(-1)[11], torch.tensor(9.0))


def swapped(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[4], flat[9] = flat[9].clone(), flat[4].clone()


def swapped_rows(tensor: Tensor) -> None:
    tensor[[1, 2]] = tensor[[2, 1]]


def sign_of_zero(tensor: Tensor) -> None:
    tensor.view(-1)[0] = -0.0


def second_difference(tensor: Tensor) -> None:
    """Neither the sum of the bits changes nor that of bits times places."""
    bits = tensor.view(-1).view(torch.int32)
    bits[20:23] += torch.tensor([1, -2, 1], dtype=torch.int32)


@pytest.mark.parametrize("change", [ulp, swapped, swapped_rows, sign_of_zero, second_difference])
def test_a_small_change_shows(change) -> None:
    tensor = torch.randn(6, 5)
    tensor.view(-1)[0] = 0.0
    before = int(tensor_hash(tensor))
    change(tensor)
    assert int(tensor_hash(tensor)) != before


def test_every_single_bit_changes_about_half_of_the_hash() -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(3))
    before, changed = int(tensor_hash(tensor)) % 2**64, []
    bits = tensor.view(torch.int32)
    for place in range(0, 64, 5):
        for bit in range(31):
            bits[place] ^= 1 << bit
            changed.append(bin(int(tensor_hash(tensor)) % 2**64 ^ before).count("1"))
            bits[place] ^= 1 << bit
    assert min(changed) > 8 and 30.0 < sum(changed) / len(changed) < 34.0


def test_many_near_tensors_have_different_hashes() -> None:
    """What a plain or a linear sum would confuse: a few ones among zeros, moved about."""
    draws, seen = random.Random(5), {}
    for _ in range(4000):
        tensor = torch.zeros(24)
        for place in draws.sample(range(24), 3):
            tensor[place] = float(draws.randrange(1, 4))
        seen.setdefault(int(tensor_hash(tensor)), hashlib.sha256(tensor.numpy().tobytes()).digest())
        assert seen[int(tensor_hash(tensor))] == hashlib.sha256(tensor.numpy().tobytes()).digest()
    assert len(seen) > 3000


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8, torch.bool])
def test_it_depends_on_every_bit(dtype: torch.dtype) -> None:
    tensor = (torch.arange(5) % 2).to(dtype)
    if dtype == torch.bool:
        changed = [tensor ^ (torch.arange(5) == place) for place in range(5)]
    else:
        changed = [flipped(tensor, bit) for bit in range(8 * 5 * tensor.element_size())]
    assert len({int(tensor_hash(one)) for one in [tensor, *changed]}) == len(changed) + 1


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy with one bit changed."""
    raw = tensor.clone().view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(tensor.dtype)


@settings(deadline=None, max_examples=50)
@given(
    values=st.lists(
        st.floats(width=32), min_size=2, max_size=7, unique_by=lambda x: (x, math.copysign(1, x))
    ),
    data=st.data(),
)
def test_it_depends_on_places_but_not_on_strides(values: list[float], data: st.DataObject) -> None:
    tensor = torch.tensor(values)
    moved = tensor[list(data.draw(st.permutations(range(len(values)))))]
    assert (int(tensor_hash(moved)) == int(tensor_hash(tensor))) == torch.equal(
        moved.view(torch.int32), tensor.view(torch.int32)
    )
    assert int(tensor_hash(torch.stack([tensor, moved], 1)[:, 0])) == int(tensor_hash(tensor))


def test_it_tells_lengths_signs_and_orders_apart() -> None:
    counting = torch.arange(3.0)
    tensors = [
        *map(torch.zeros, range(5)),
        -torch.zeros(3),
        torch.full((3,), torch.nan),
        counting,
        -counting,
        counting.flip(0),
    ]
    assert len({int(tensor_hash(tensor)) for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize(
    ("changed", "odd"),
    [
        ((), []),
        ((2,), [[], [], [1], []]),
        ((1, 3), [[1], [1], [1], [1]]),
        ((0, 1, 2), [[1], [1], [1], [1]]),
    ],
)
def test_ranks_that_differ_know_who_is_alone(
    changed: tuple[int, ...], odd: list[list[int]]
) -> None:
    """A rank is odd where no more than half hold what it does. The third case: 2 against 2; the
    last: all differ."""

    def work(rank, world_size):
        with tp_state(4) as parallel:
            tensors = [torch.arange(9.0), torch.arange(8.0)]
            if rank in changed:
                tensors[1][3] += 1e-6 * (1.0 if len(changed) == 2 else rank + 1.0)
            hashes = tensor_hashes(tensors, parallel.device)
            return bool(are_equal(hashes, parallel.tp_group)), odd_ones_out(
                hashes, parallel.tp_group
            )

    expected = odd or [[]] * 4
    assert run_ranks(work, 4) == [(not changed, expected[rank]) for rank in range(4)]


def test_texts_of_all_ranks_arrive_in_order() -> None:
    def work(rank, world_size):
        with tp_state(1) as parallel:
            return gather_texts(["", "é" * 300, "node2"][rank], parallel)

    texts = run_ranks(work, 3)[1]
    assert texts == ["", "é" * 300, "node2"]
    assert by_rank(["", "a", "b"]) == "rank 1: a; rank 2: b" and by_rank(
        ["x"] * 9, at_most=2
    ).endswith("; and 7 more ranks")
