"""Products of linear layers by oneDNN: right, on the same path in forward, replay and backward, and
seen by everything that looks at operators.

The tests set the choice and the least size of a product themselves: every x86 processor has oneDNN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

# dispatch modes import it when first entered: 3 s, here once for all forked ranks
import torch._dynamo
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.config import large_products
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.measure.recorder import record_timeline
from megatron_lite.memory.predict.flops import hardware_flops
from megatron_lite.model.gpt import GPTModel
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.parallel import products
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.weight_gradient import accumulate_with_
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.tensor_parallel.column_linear import column_parallel_linear
from megatron_lite.tensor_parallel.row_linear import row_parallel_linear
from tests.memory.test_replay_flops import FORMULAS
from tests.support.models import (
    BATCH,
    SEQ_LENGTH,
    build_tiny_model,
    padded_vocab_size,
    sample_tokens,
    tiny_config,
    tp_state,
)
from tests.support.product_sizes import product_sizes
from tests.support.ranks import run_ranks
from tests.support.sixteen_bits import multiplies_16_bits

NUM_LAYERS = 3
LINEAR = ("own_mm", "own_addmm", "onednn_add_weight_gradient_")
pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


class Seen(TorchDispatchMode):
    """Counts the operators, apart in replays, by their names without namespace and overload."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.replayed: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        (self.replayed if is_recomputing() else self.counts)[func.name().split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def every_product_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    product_sizes(monkeypatch, LEAST_MULTIPLICATIONS=1)


def close(value: Tensor, left: Tensor, right: Tensor, start: Tensor | float = 0.0) -> bool:
    """Whether `value` is start + left right^T up to rounding.

    The bound on the error of a sum of k products holds in any order (Higham, Accuracy and
    Stability, sec. 3.1): k + 2 roundings of 2^-24 each, times the sum of the absolute products.
    """
    left, right = left.double().flatten(0, -2), right.double()
    exact = left @ right.t() + start
    bound = (left.shape[-1] + 2) * 2**-24 * (left.abs() @ right.abs().t() + abs(start))
    return bool(((value.double().flatten(0, -2) - exact).abs() <= bound).all())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(7, 5), (5, 7), (33, 65)])
@torch.no_grad()
def test_each_product_is_the_exact_one_up_to_rounding(
    n: int, k: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_product_is_large(monkeypatch)
    product_sizes(monkeypatch, TOKENS=4, ROWS=2, COLUMNS=3)
    x, dy, weight = torch.randn(3, 2, k), torch.randn(3, 2, n), torch.randn(n, k)
    bias = torch.randn(n) if with_bias else None
    output = products.linear(x, weight, bias, onednn=True)
    assert output.shape == dy.shape
    assert close(output, x, weight, 0.0 if bias is None else bias.double())
    gradient = products.input_gradient(dy, weight, onednn=True)
    assert gradient.shape == x.shape
    assert close(gradient, dy, weight.t())
    rows, grad_rows = x.flatten(0, 1), dy.flatten(0, 1)
    assert close(products.weight_product(rows, grad_rows, onednn=True), grad_rows.t(), rows.t())
    for first in (False, True):
        total = torch.full((n, k), torch.nan) if first else torch.randn(n, k)
        start = 0.0 if first else total.double()
        version = total._version
        products.add_weight_product_(total, rows, grad_rows, first=first, onednn=True)
        assert close(total, grad_rows.t(), rows.t(), start)
        assert total._version > version  # autograd sees the write


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rows", [4, 33, 2**16])
@torch.no_grad()
def test_a_16_bit_product_is_rounded_once_and_added_to_the_float32_sum(
    rows: int, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplies_16_bits(monkeypatch, True)
    monkeypatch.setattr(products, "rows_at_a_time", lambda width, device: rows)
    x, dy = torch.randn(7, 20).bfloat16(), torch.randn(7, 33).bfloat16()
    start = torch.randn(33, 20)
    total = torch.full_like(start, torch.nan) if first else start.clone()
    products.add_weight_product_(total, x, dy, first=first, onednn=True)
    rounded = (dy.t() @ x).float()
    assert torch.equal(total, rounded if first else start + rounded)


@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_a_large_16_bit_product_is_computed_in_parts(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "product_rows", lambda width, device: 10)
    # whole numbers, whose sums are exact in any order
    x, dy = (torch.randint(-3, 4, (7, size)).bfloat16() for size in (20, 33))
    start = torch.randn(33, 20)
    total = torch.full_like(start, torch.nan) if first else start.clone()
    products.add_weight_product_(total, x, dy, first=first, onednn=True)
    whole = (dy.double().t() @ x.double()).float()
    assert torch.equal(total, whole if first else start + whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [False, True])
@torch.no_grad()
def test_rows_are_added_one_after_the_other(
    dtype: torch.dtype, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "rows_at_a_time", lambda width, device: 3)
    ids, rows = torch.tensor([2, 0, 2, 2, 5, 0, 2]), torch.randn(7, 4).to(dtype)
    start = torch.randn(6, 4)
    total = torch.full_like(start, torch.nan) if first else start.clone()
    products.add_rows_(total, ids, rows, first=first)
    expected = torch.zeros_like(start) if first else start.clone()
    for number, row in zip(ids.tolist(), rows.float(), strict=True):
        expected[number] += row
    assert torch.equal(total, expected)


@torch.no_grad()
def test_operands_may_have_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    every_product_is_large(monkeypatch)
    x, weight = torch.randn(9, 24).t()[::2], torch.randn(30, 9)
    for stored in (weight[::3], weight.t().contiguous().t(), weight[:, ::2].repeat(1, 2)[:, :9]):
        assert close(products.linear(x, stored, None, onednn=True), x, stored)
    dy, total = torch.randn(24, 6)[::2, ::2], torch.zeros(3, 9)
    products.add_weight_product_(total, x, dy, first=True, onednn=True)
    assert close(total, dy.t(), x.t())


LAYERS: list[Callable[..., Tensor]] = [column_parallel_linear, row_parallel_linear]


def products_of(layer: Callable[..., Tensor], tokens: int, x_of: Callable[..., Tensor]) -> Seen:
    """Runs a layer of 4 inputs and 6 outputs forward and backward, with and without its own sum.

    A column-parallel layer without its own sum is F.linear, which is left out.
    """
    weight = torch.nn.Parameter(torch.randn(6, 4))
    total = torch.zeros(6, 4)
    seen = Seen()
    with seen:
        for own in (False, True) if layer is row_parallel_linear else (True,):
            if own:
                accumulate_with_(None, [(weight, total)])
            x = x_of(tokens, 1, 4).requires_grad_()
            output = layer(x, weight, None, tp_group=None, sequence_parallel=False, onednn=True)
            output.sum().backward()
    return seen


@pytest.mark.parametrize("layer", LAYERS)
def test_the_three_products_of_a_layer_take_the_same_path(
    layer: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    product_sizes(monkeypatch, LEAST_MULTIPLICATIONS=5 * 6 * 4)
    large = products_of(layer, 5, torch.randn)
    runs = 2 if layer is row_parallel_linear else 1
    assert {name: large.counts[name] for name in LINEAR} == {
        "own_mm": 2 * runs,
        "own_addmm": 0,
        "onednn_add_weight_gradient_": runs,
    }
    assert not large.counts["mm"] + large.counts["addmm"] + large.counts["addmm.out"]
    small = products_of(layer, 4, torch.randn)
    assert not any(small.counts[name] for name in LINEAR)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_formats_stay_with_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values: not every processor has oneDNN's products in these formats."""
    every_product_is_large(monkeypatch)
    multiplies_16_bits(monkeypatch, True)
    with FakeTensorMode(), Seen() as seen, torch.no_grad():
        x, weight = torch.randn(5, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype)
        products.linear(x, weight, None, onednn=True)
    assert seen.counts["mm"] == 1
    assert not any(seen.counts[name] for name in LINEAR)


def test_a_recorded_backward_runs_torchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's operators have no derivative, so create_graph must not meet them."""
    every_product_is_large(monkeypatch)
    weight = torch.nn.Parameter(torch.randn(6, 4))
    x = torch.randn(5, 1, 4, requires_grad=True)
    output = row_parallel_linear(
        x, weight, None, tp_group=None, sequence_parallel=False, onednn=True
    )
    (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), weight)
    expected = (x @ weight.t()).square().sum()
    (first,) = torch.autograd.grad(expected, x, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), weight)
    # the rounding of sums of at most 30 terms of order 10
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-4)


def outcome(
    parallel: ParallelState,
    policy: str,
    *,
    own_sum: bool,
    sequence_parallel: bool = False,
    onednn: bool = True,
    tail_skip: bool = True,
    dtype: torch.dtype = torch.float32,
    **model: object,
) -> dict[str, Tensor]:
    """Returns the losses and this rank's gradients of two micro-batches."""
    fresh = replace(parallel, rng=RngStreams(parallel.device, seed=7, tp_rank=parallel.tp_rank))
    built = build(
        fresh,
        policy,
        sequence_parallel=sequence_parallel,
        onednn=onednn,
        tail_skip=tail_skip,
        dtype=dtype,
        **model,
    )
    buffer = buffer_of(built, fresh, own_sum=own_sum)
    losses = []
    for number in range(2):
        loss = built.loss(*sample_tokens(number)).mean()
        loss.backward()
        losses.append(loss.detach())
    buffer.reduce_()
    return {"losses": torch.stack(losses), **buffer.grads}


def buffer_of(model: GPTModel, parallel: ParallelState, *, own_sum: bool) -> GradBuffer:
    """Returns the buffer of the gradients. own_sum: whether the products add to it."""
    parameters = dict(model.named_parameters())
    buffer = GradBuffer(parameters, parallel)
    if own_sum:
        linear = [name for name in parameters if name.endswith("weight") and "linear" in name]
        accumulate_with_(None, [(parameters[name], buffer.grads[name]) for name in linear])
    return buffer


def build(
    parallel: ParallelState,
    policy: str,
    *,
    sequence_parallel: bool = False,
    onednn: bool = True,
    tail_skip: bool = True,
    dtype: torch.dtype = torch.float32,
    **model: object,
) -> GPTModel:
    return build_tiny_model(
        tiny_config(**{"num_layers": NUM_LAYERS, **model}),
        parallel,
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        plan=plan_stage(
            RecomputeConfig(recompute_policy=policy, recompute_tail_skip=tail_skip), NUM_LAYERS
        ),
        onednn=onednn,
    )


POLICIES = (
    "*:full",
    "*:full/2",
    "*:pointwise",
    "*:core_attn+mlp",
    "*:ops(matmul)",
    "*:ops(matmul/2,attention)",
    "*:ops(aten.mm.default,aten.addmm.default/2)@host",
    "0:full@host;1:none;*:ops(attention)",
)
MODELS = (
    dict(hidden_dropout=0.1),
    dict(swiglu=True, add_bias_linear=False, untie_embeddings_and_output_weights=True),
)


def changed_bits(
    rank: int, world_size: int, sequence_parallel: bool, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Returns each case whose losses or gradients are not those without recomputation."""
    found = []
    with tp_state(world_size) as parallel:
        for own_sum, model in zip((True, False), MODELS, strict=True):
            options: dict[str, Any] = dict(
                own_sum=own_sum, sequence_parallel=sequence_parallel, dtype=dtype, **model
            )
            expected = outcome(parallel, "*:none", **options)
            for number, policy in enumerate(POLICIES[::world_size]):
                got = outcome(parallel, policy, tail_skip=number % 2 == 0, **options)
                found += [
                    (policy, name) for name in got if not torch.equal(got[name], expected[name])
                ]
    return found


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, True)])
def test_no_policy_changes_a_bit(
    tp_size: int, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_product_is_large(monkeypatch)
    assert run_ranks(changed_bits, tp_size, sequence_parallel, detail=False) == [[]] * tp_size


def test_a_model_has_the_losses_and_gradients_of_torchs_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every_product_is_large(monkeypatch)
    with tp_state(1) as parallel:
        expected = outcome(parallel, "*:none", own_sum=True, onednn=False)
        got = outcome(parallel, "*:none", own_sum=True)
    for name, value in got.items():
        # a few hundred float32 roundings of 6e-8 each, relative to the whole tensor
        assert (value - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


@pytest.mark.parametrize(
    ("policy", "replayed"),
    [
        ("*:full", 3),
        ("*:ops(matmul,attention)", 0),
        ("*:ops(attention)", 3),
        ("*:ops(matmul/2,attention)", 1),  # qkv and fc1 are kept, proj is not
        ("*:ops(aten.mm.default)", 3),  # a linear with bias is no mm
        ("*:ops(aten.addmm.default/2)", 1),
    ],
)
def test_a_policy_takes_the_operator_for_the_one_in_whose_place_it_runs(
    policy: str, replayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_product_is_large(monkeypatch)
    with tp_state(1) as parallel:
        model = build(parallel, policy)
        buffer_of(model, parallel, own_sum=True)
        loss = model.loss(*sample_tokens()).mean()
    with Seen() as seen:
        loss.backward()
    assert seen.replayed["own_addmm"] == NUM_LAYERS * replayed
    assert not seen.replayed["addmm"]


@pytest.mark.parametrize("policy", ["*:none", "*:full"])
def test_a_timeline_names_the_usual_operators(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of the same run is the same on every processor."""
    every_product_is_large(monkeypatch)
    names = []
    with tp_state(1) as parallel:
        for onednn in (False, True):
            model = build(parallel, policy, onednn=onednn)
            buffer_of(model, parallel, own_sum=True)
            sample = sample_tokens()
            recorded = record_timeline(
                model, lambda model=model, sample=sample: model.loss(*sample).mean(), name=""
            )
            names.append({event.operator for event in recorded.events})
    assert names[1] <= names[0]
    assert not any("onednn" in name for name in names[1])


def test_flops_and_kept_bytes_and_live_bytes_are_those_of_torchs_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every_product_is_large(monkeypatch)
    with tp_state(1) as parallel:
        for policy in ("*:none", "*:full", "*:ops(matmul/2)"):
            figures = []
            for onednn in (False, True):
                model = build(parallel, policy, onednn=onednn, attention_backend="unfused")
                buffer = buffer_of(model, parallel, own_sum=True)
                model.loss(*sample_tokens()).mean().backward()  # the gradients exist from here on
                with (
                    FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter,
                    kept_for_backward(exclude=model.parameters()) as meter,
                ):
                    loss = model.loss(*sample_tokens()).mean()
                    kept = meter.total_bytes()
                    loss.backward()
                del loss
                with LiveStorages() as live:  # alone: other modes and hooks hold tensors
                    model.loss(*sample_tokens()).mean().backward()
                assert buffer.grads
                figures.append((counter.get_total_flops(), kept, live.peak_bytes))
            assert figures[0] == figures[1], policy
            assert figures[0][0] == hardware_flops(
                model.config,
                plan_stage(RecomputeConfig(recompute_policy=policy), NUM_LAYERS),
                batch=BATCH,
                seq_length=SEQ_LENGTH,
                padded_vocab_size=padded_vocab_size(1),
                device="cpu",
            )


@torch.no_grad()
@pytest.mark.parametrize(("n", "k"), [(90, 33), (33, 90), (20, 20), (8, 24)])
@pytest.mark.parametrize("m", [130, 40, 7])
def test_a_weight_gradient_allocates_exactly_the_predicted_parts(
    n: int, k: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    product_sizes(monkeypatch, TOKENS=40, ROWS=16, COLUMNS=24)
    total, rows, grad_rows = torch.zeros(n, k), torch.randn(m, k), torch.randn(m, n)
    with LiveStorages() as live:
        products._add_weight_gradient_(total, rows, grad_rows, False)
    assert live.peak_bytes == sum(large_products.gradient_parts(m, n, k))
