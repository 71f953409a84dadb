"""16-bit products in float32: right, exact in memory, and the same bits under every policy.

They run on any processor, since the tests say themselves whether it multiplies 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

# dispatch modes import it when first entered: 3 s, here once for all forked ranks
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.memory import TP, Case, rows
from megatron_lite.config import wide_blocks as sizes
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.optim.newton_schulz import STEPS, orthogonalize
from megatron_lite.parallel import products
from megatron_lite.parallel.cpu_facts import has_avx2_alone
from megatron_lite.parallel.wide_products import wide_product, widens
from megatron_lite.tensor_parallel.column_linear import column_parallel_linear
from megatron_lite.tensor_parallel.row_linear import row_parallel_linear
from tests.parallel.test_products import Seen, buffer_of, build, changed_bits, outcome
from tests.support.models import sample_tokens, tp_state
from tests.support.ranks import run_ranks
from tests.support.sixteen_bits import multiplies_16_bits

DTYPES = (torch.bfloat16, torch.float16)
# m, n and k of a product. One block has 8 rows and columns, and 4 if k is 30 or more.
SHAPES = [(8, 8, 8), (19, 9, 5), (9, 19, 40), (1, 1, 1), (3, 30, 29)]


@pytest.fixture(autouse=True)
def slow_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplies_16_bits(monkeypatch, False)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ELEMENTS", 120), ("FEWEST", 4), ("MOST", 8)):
        monkeypatch.setattr(sizes, name, value)


def whole_numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns numbers whose products and sums float32 holds, and 16 bits do not."""
    return torch.randint(-60, 61, shape).to(dtype)


def layouts(x: Tensor) -> Iterator[Tensor]:
    """Yields x [a, b] in every order that its elements can have in memory."""
    a, b = x.shape
    yield x
    yield x.t().contiguous().t()
    for part in ((slice(0, 2 * a, 2), slice(b)), (slice(a), slice(0, 3 * b, 3))):
        yield x.new_zeros(2 * a, 3 * b)[part].copy_(x)
    yield x.new_zeros(2 * b, 3 * a).t()[:a, :b].copy_(x)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_product_is_the_exact_one_rounded_once(
    m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    left, right = whole_numbers(m, k, dtype=dtype), whole_numbers(k, n, dtype=dtype)
    one, many = whole_numbers(n, dtype=dtype), whole_numbers(m, n, dtype=dtype)
    exact = left.double() @ right.double()
    for x, y in product(layouts(left), layouts(right)):
        assert torch.equal(wide_product(x, y), exact.to(dtype))
    for added in (one, many):
        got = wide_product(left, right, added, alpha=2.0, beta=-3.0)
        assert torch.equal(got, (2.0 * exact - 3.0 * added.double()).to(dtype))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_the_three_products_of_a_layer_are_exact(dtype: torch.dtype) -> None:
    x, dy = whole_numbers(3, 5, 20, dtype=dtype), whole_numbers(3, 5, 30, dtype=dtype)
    weight, bias = whole_numbers(30, 20, dtype=dtype), whole_numbers(30, dtype=dtype)
    wide_x, wide_dy, wide_weight = x.double(), dy.double(), weight.double()
    output = wide_x @ wide_weight.t()
    assert torch.equal(products.linear(x, weight, None, onednn=True), output.to(dtype))
    with_bias = (output + bias.double()).to(dtype)
    assert torch.equal(products.linear(x, weight, bias, onednn=True), with_bias)
    gradient = (wide_dy @ wide_weight).to(dtype)
    assert torch.equal(products.input_gradient(dy, weight, onednn=True), gradient)
    exact = (wide_dy.flatten(0, 1).t() @ wide_x.flatten(0, 1)).to(dtype)
    flat = x.flatten(0, 1), dy.flatten(0, 1)
    assert torch.equal(products.weight_product(*flat, onednn=True), exact)
    for first in (True, False):
        total = torch.full((30, 20), torch.nan if first else 5.0)
        products.add_weight_product_(total, *flat, first=first, onednn=True)
        assert torch.equal(total, exact.float() + (0.0 if first else 5.0))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_product_allocates_exactly_the_predicted_bytes(
    m: int, n: int, k: int, with_bias: bool
) -> None:
    left, right = torch.zeros(m, k).bfloat16(), torch.zeros(k, n).bfloat16()
    bias = torch.zeros(n).bfloat16() if with_bias else None
    with LiveStorages() as live:
        result = wide_product(left, right, bias)
    assert live.peak_bytes == result.nbytes + sum(sizes.wide_bytes(m, n, k, bias=with_bias))


def test_blocks_of_long_rows_stay_small() -> None:
    assert sizes.block(1) == sizes.block(1024) == 512
    assert sizes.block(4096) == 128
    assert sizes.block(2**20) == 64


@pytest.mark.parametrize("layer", [column_parallel_linear, row_parallel_linear])
@pytest.mark.parametrize("onednn", [False, True])
def test_all_products_of_a_layer_go_the_same_way(layer, onednn: bool) -> None:
    x = torch.randn(5, 1, 4).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(torch.randn(6, 4).bfloat16())
    with Seen() as seen:
        layer(
            x, weight, None, tp_group=None, sequence_parallel=False, onednn=onednn
        ).sum().backward()
    assert (seen.counts["own_mm"], seen.counts["mm"]) == ((3, 0) if onednn else (0, 3))


def test_other_formats_devices_and_runs_keep_torchs_products() -> None:
    assert all(widens(torch.empty(2, dtype=dtype), True) for dtype in DTYPES)
    assert not any(widens(torch.empty(2, dtype=dtype), False) for dtype in DTYPES)
    assert not widens(torch.empty(2), True)
    assert not widens(torch.empty(2, dtype=torch.bfloat16, device="meta"), True)
    with FakeTensorMode():
        assert not widens(torch.empty(2, dtype=torch.bfloat16), True)


@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel", "dtype"),
    [(1, False, torch.bfloat16), (1, False, torch.float16), (2, True, torch.bfloat16)],
)
def test_no_policy_changes_a_bit(tp_size: int, sequence_parallel: bool, dtype: torch.dtype) -> None:
    found = run_ranks(changed_bits, tp_size, sequence_parallel, dtype, detail=False)
    assert found == [[]] * tp_size


@pytest.mark.parametrize(("policy", "replayed"), [("*:full", 9), ("*:ops(matmul)", 0)])
def test_a_replay_goes_the_way_of_the_forward(policy: str, replayed: int) -> None:
    """The other way would have the same bits most of the time, since both round to 16."""
    with tp_state(1) as parallel:
        model = build(parallel, policy, dtype=torch.bfloat16)
        buffer_of(model, parallel, own_sum=True)
        loss = model.loss(*sample_tokens()).mean()
    with Seen() as seen:
        loss.backward()
    assert (seen.replayed["own_addmm"], seen.replayed["addmm"]) == (replayed, 0)


def test_a_model_has_the_losses_and_gradients_of_torchs_products() -> None:
    with tp_state(1) as parallel:
        exact = outcome(parallel, "*:none", own_sum=True, onednn=False)
        theirs, ours = (
            outcome(parallel, "*:none", own_sum=True, onednn=onednn, dtype=torch.bfloat16)
            for onednn in (False, True)
        )
    for name, value in ours.items():
        # both differ from float32 by the rounding of weights and activations
        bound = 1.2 * (theirs[name] - exact[name]).norm() + 1e-3 * exact[name].norm()
        assert (value - exact[name]).norm() <= bound, name


@pytest.mark.parametrize("flags", ["--bf16", "--fp16", "--bf16 --no-gradient-accumulation-fusion"])
@pytest.mark.parametrize("chunks", ["", "--loss-chunk-size 48"])
def test_the_peak_of_a_real_step_is_the_predicted_one(flags: str, chunks: str) -> None:
    (row,) = rows(Case(flags, f"{flags} {chunks}", 1, 1))
    assert abs(row.ratio - 1.0) < 1e-3, row


def test_a_shorter_last_chunk_of_the_loss_holds_less() -> None:
    """With the sequence split, the last chunk of 58 tokens would be the fullest moment, if its
    logits took as much as those of 66."""
    split = f"{TP} --sequence-parallel"
    differences = set()
    for one in (66, 256):  # the second is a single chunk
        flags = f"--bf16 {split} --loss-chunk-size {one} --vocab-size 16383"
        differences |= {
            row.measured_bytes - row.predicted_bytes for row in rows(Case("chunks", flags, 2, 1))
        }
    assert len(differences) == 1, differences


@pytest.mark.skipif(not has_avx2_alone(), reason="MKL sums in another order on this processor")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 65, 514])
def test_the_bits_of_a_row_do_not_depend_on_the_others(num_rows: int) -> None:
    for k in (64, 768, 3072, 8192):
        rows, weight = torch.randn(600, k).bfloat16(), torch.randn(200, k).bfloat16()
        whole = wide_product(rows, weight.t())
        for start in range(0, 600, 200):
            part = slice(start, start + num_rows)
            assert torch.equal(wide_product(rows[part], weight.t()), whole[part]), (k, start)


@pytest.mark.parametrize("shape", [(48, 48), (30, 70), (70, 30)])
def test_muon_orthogonalizes_as_well_as_by_torchs_products(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, steps = torch.randn(shape), STEPS["quintic"](5)
    exact = orthogonalize(matrix.double(), steps)
    ours = orthogonalize(matrix.bfloat16(), steps)
    multiplies_16_bits(monkeypatch, True)
    theirs = orthogonalize(matrix.bfloat16(), steps)
    multiplies_16_bits(monkeypatch, False)
    assert torch.equal(orthogonalize(matrix.bfloat16(), steps, onednn=False), theirs)
    assert ours.dtype == torch.bfloat16
    wrong, usual = ((one.double() - exact).norm() for one in (ours, theirs))
    assert wrong <= 1.2 * usual < 0.05 * exact.norm()
