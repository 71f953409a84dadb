"""Causal 16-bit attention by products: against the formula, torch's kernel and each policy."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.description import attention_products
from megatron_lite.description.attention_products import PartShape, attends_by_products, query_rows
from megatron_lite.description.self_attention import attention_operations
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.model import causal_products
from megatron_lite.model.causal_attention import (
    BY_PRODUCTS,
    causal_attention,
    way_of_causal_attention,
)
from megatron_lite.model.causal_products import attend_by_products, attend_by_products_backward
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.state import ParallelState
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.schedule import plan_stage
from tests.support.limits import HANG_S
from tests.support.models import build_tiny_model, loss_and_grads, tiny_config, tp_state
from tests.support.sixteen_bits import multiplies_16_bits

# The last block is shorter than the others. The scale is no power of two.
S, B, A, D = 128 + 30, 2, 4, 24
SCALE = D**-0.5


def heads(groups: int, *, seq_length: int = S, joined: bool = False) -> list[Tensor]:
    """Returns a query, a key and a value in bf16 that need gradients.

    joined: whether they are views of one tensor, as in a model.
    """
    draw = torch.Generator().manual_seed(5)
    counts = [A, groups, groups]
    whole = torch.randn(seq_length, B, sum(counts), D, generator=draw).to(torch.bfloat16)
    parts = whole.split(counts, dim=2)
    return [(part if joined else part.contiguous()).requires_grad_() for part in parts]


def formula(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns attention and log-sum-exp through the whole matrix of scores, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(A // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("ibhd,jbhd->bhij", query, key) * SCALE
    length = len(query)
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value), scores.logsumexp(-1)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.fixture(params=["in one part", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in parts":  # of one query group each
        monkeypatch.setattr(attention_products, "TILE_ELEMENTS", 1)


@pytest.fixture(autouse=True, params=["16-bit products", "float32 products"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor multiplies 16 bits; else the products are in float32."""
    found = request.param == "16-bit products"
    multiplies_16_bits(monkeypatch, found)
    return found


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(A, 1), (2, 1), (1, 1), (2, 30), (A, 100)])
def test_it_is_as_near_to_the_formula_as_torchs_kernel(
    groups: int, size: int, joined: bool
) -> None:
    """size: of queries and keys. Large ones make weights of almost 0 and 1."""
    query, key, value = (x.detach() for x in heads(groups, joined=joined))
    leaves = [x.requires_grad_() for x in (size * query, size * key, value)]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    output = causal_attention(*leaves, scale=SCALE, way=BY_PRODUCTS)
    exact, _ = formula(*exact_leaves)
    of_torch = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in leaves), is_causal=True, scale=SCALE, enable_gqa=True
    ).permute(2, 0, 1, 3)
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(6)).to(output.dtype)
    own, theirs = (
        (one, *torch.autograd.grad(one, leaves, grad, retain_graph=True))
        for one in (output, of_torch)
    )
    formulas = (exact, *torch.autograd.grad(exact, exact_leaves, grad.double()))
    for name, one, other, right in zip(
        ["output", "dq", "dk", "dv"], own, theirs, formulas, strict=True
    ):
        assert one.dtype == torch.bfloat16
        # Rounding to bf16 alone costs 2e-3.
        assert error(one, right) < max(1.5 * error(other, right), 3e-3), name


def test_the_log_sum_exp_is_the_formulas() -> None:
    leaves = [x.detach() for x in heads(2)]
    _, lse = attend_by_products(*leaves, SCALE)
    _, exact = formula(*leaves)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    query, key, value = (x.detach() * 1000 for x in heads(A))
    output, lse = attend_by_products(query, key, value, SCALE)
    exact, exact_lse = formula(query, key, value)
    grads = attend_by_products_backward(output, query, key, value, output, lse, SCALE)
    assert all(x.isfinite().all() for x in (output, lse, *grads))
    assert error(output, exact) < 1e-2 and error(lse, exact_lse) < 1e-5


def test_float32_products_elsewhere_keep_their_precision() -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    before = x @ x
    leaves = heads(A)
    causal_attention(*leaves, scale=SCALE, way=BY_PRODUCTS).sum().backward()
    with pytest.raises(RuntimeError):
        attend_by_products(leaves[0], leaves[1][:3], leaves[2], SCALE)
    assert torch.equal(x @ x, before)


def test_the_last_of_two_threads_restores_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins while the first is inside, and ends after it."""
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, real = products.fp32_precision, causal_products._parts
    turns = {name: threading.Event() for name in ("first is inside", "second is", "first has left")}

    def parts(query: Tensor, key: Tensor) -> Iterator[causal_products._HeadPart]:
        is_first = threading.current_thread() is not threading.main_thread()
        turns["first is inside" if is_first else "second is"].set()
        assert turns["second is" if is_first else "first has left"].wait(HANG_S)
        assert products.fp32_precision == "bf16"
        return real(query, key)

    def attend() -> None:
        attend_by_products(*leaves, SCALE)
        turns["first has left"].set()

    leaves = [x.detach() for x in heads(A)]
    monkeypatch.setattr(causal_products, "_parts", parts)
    first = threading.Thread(target=attend)
    first.start()
    assert turns["first is inside"].wait(HANG_S)
    attend_by_products(*leaves, SCALE)
    first.join()
    assert products.fp32_precision == before


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(("groups", "seq_length"), [(A, S), (1, S), (2, 128), (2, 260)])
def test_it_takes_exactly_the_predicted_memory(groups: int, seq_length: int, fast: bool) -> None:
    element_bytes = 2 if fast else 4
    query, key, value = (x.detach() for x in heads(groups, seq_length=seq_length))
    shape = PartShape.of(seq_length, A, groups, D)
    with LiveStorages() as live:
        output, lse = attend_by_products(query, key, value, SCALE)
    assert live.peak_bytes == output.nbytes + lse.nbytes + shape.forward_bytes(element_bytes)
    with LiveStorages() as live:
        grads = attend_by_products_backward(output, query, key, value, output, lse, SCALE)
    assert live.peak_bytes == sum(x.nbytes for x in grads) + shape.backward_bytes(element_bytes)


@pytest.mark.parametrize(
    ("seq_length", "element_bytes", "device", "expected"),
    [
        (127, 2, "cpu", False),
        (128, 2, "cpu", True),
        (2048, 2, "cpu", True),
        (2049, 2, "cpu", False),
        (512, 4, "cpu", False),
        (512, 2, "cuda", False),
    ],
)
def test_lengths_that_gain(
    seq_length: int, element_bytes: int, device: str, expected: bool
) -> None:
    assert attends_by_products(seq_length, element_bytes, device) is expected
    blocks = query_rows(seq_length)
    assert [i for block in blocks for i in range(block.start, block.stop)] == [*range(seq_length)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_only_16_bits_are_computed_by_products_and_only_if_the_run_chose_so(
    dtype: torch.dtype,
) -> None:
    query = torch.empty(S, B, A, D, dtype=dtype)
    assert way_of_causal_attention(query, onednn=False) is None
    expected = BY_PRODUCTS if dtype != torch.float64 else None
    assert way_of_causal_attention(query, onednn=True) is expected


CONFIG = tiny_config(
    num_layers=2,
    max_position_embeddings=S,
    attention_backend="flash",
    num_query_groups=2,
    group_query_attention=True,
)


def built(parallel: ParallelState, policy: str, *, onednn: bool) -> GPTModel:
    plan = plan_stage(RecomputeConfig(recompute_policy=policy), CONFIG.num_layers)
    return build_tiny_model(CONFIG, parallel, dtype=torch.bfloat16, plan=plan, onednn=onednn)


def outcomes(onednn: bool, policies: tuple[str, ...]) -> dict[str, list[Tensor]]:
    found = {}
    with tp_state(1) as parallel:
        for policy in policies:
            model = built(parallel, policy, onednn=onednn)
            outcome = loss_and_grads(model, parallel, micro_batches=1, seq_length=S)
            found[policy] = [outcome.loss, *outcome.grads.values()]
    return found


def test_every_policy_gives_the_same_bits() -> None:
    policies = ("*:none", "*:ops(attention)", "*:core_attn", "*:full/1", "*:ops(matmul)")
    found = outcomes(True, policies)
    for policy, tensors in found.items():
        for one, none in zip(tensors, found["*:none"], strict=True):
            assert torch.equal(one, none), policy
    (plain,) = outcomes(False, ("*:none",)).values()
    assert any(not torch.equal(one, none) for one, none in zip(plain, found["*:none"], strict=True))


def test_a_policy_keeps_the_result_of_the_operator() -> None:
    """It counts as the kernel in whose place it runs."""
    runs = []
    real = causal_products._parts

    def parts(query: Tensor, key: Tensor) -> Iterator[causal_products._HeadPart]:
        runs.append(is_recomputing())
        return real(query, key)

    with tp_state(1) as parallel, pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_products, "_parts", parts)
        for policy, replays in (("*:full", 2), ("*:ops(attention)", 0), ("*:ops(matmul)", 2)):
            runs.clear()
            model = built(parallel, policy, onednn=True)
            loss_and_grads(model, parallel, micro_batches=1, seq_length=S)
            # Each layer has a forward and a backward; a backward is no replay.
            assert (len(runs), sum(runs)) == (4 + replays, replays), policy


def test_it_keeps_what_the_description_says() -> None:
    config = tiny_config(num_attention_heads=A, kv_channels=D, attention_backend="flash")
    for onednn in (False, True):
        sizes = Sizes(
            micro_batch_size=B, seq_length=S, padded_vocab_size=64, element_bytes=2, onednn=onednn
        )
        described = [one for part in attention_operations(config, sizes, 0) for one in part.keeps]
        with kept_for_backward() as meter:
            output = causal_attention(*heads(A), scale=SCALE, way=BY_PRODUCTS)
        kept = sum(one.num_bytes for one in meter.storages().values())
        assert kept == sum(tensor.num_bytes for tensor in described)
        assert output.requires_grad  # what is kept lives as long as the output
