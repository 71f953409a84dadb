"""The loss over a sharded vocabulary, with its logits given and with the output projection in
chunks: against torch over the whole vocabulary in float64."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.tensor_parallel.cross_entropy import Columns, vocab_parallel_cross_entropy
from megatron_lite.tensor_parallel.layers import parallel_linear
from megatron_lite.tensor_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from tests.support.changes import with_fields
from tests.support.models import on_ranks
from tests.support.torch_features import NEEDS_GRAD_DTYPE
from tests.support.uncompiled import uncompiled_kernels

S, B, H, V = 8, 3, 5, 11
# per rank: V ends within rank 1 at t=2 and t=4, where two ranks hold nothing but padding
COLUMNS = {1: 12, 2: 6, 4: 6}
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]  # TP size, sequence parallel
# of 24 tokens: all logits kept; chunks within, across and of several positions; ragged; one
CHUNK_SIZES = [None, 1, 5, 9, 23, 24, 1000]


class Case(NamedTuple):
    """hidden: [s, b, h]. weight: [V, h]. labels, grad_losses (a gradient per token): [s, b]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    grad_losses: torch.Tensor


class Outcome(NamedTuple):
    losses: torch.Tensor
    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor


def sample(dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).mul_(scale).to(dtype)
        for size in ((S, B, H), (V, H))
    )
    grad_losses = torch.rand(S, B, generator=generator, dtype=torch.float64).to(
        torch.promote_types(dtype, torch.float32)
    )
    return Case(hidden, weight, torch.arange(S * B).remainder(V).view(S, B), grad_losses)


def leaves_of(case):
    return [tensor.clone().requires_grad_() for tensor in (case.hidden, case.weight)]


def outcome_of(losses, leaves, case):
    return Outcome(losses.detach(), *torch.autograd.grad(losses, leaves, case.grad_losses))


def reference(case, cap=None):
    """By torch in float64, from the same numbers."""
    case = Case(case.hidden.double(), case.weight.double(), case.labels, case.grad_losses.double())
    hidden, weight = leaves_of(case)
    logits = F.linear(hidden, weight).flatten(0, 1)
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    losses = F.cross_entropy(logits, case.labels.flatten(), reduction="none").view(
        case.labels.shape
    )
    return outcome_of(losses, (hidden, weight), case)


def losses_of(hidden, weight, labels, chunk_size, columns, *, sequence_parallel=False):
    """chunk_size None: with all logits kept."""
    if chunk_size is None:
        logits = parallel_linear(
            hidden, weight, None, tp_group=columns.tp_group, sequence_parallel=sequence_parallel
        )
        return vocab_parallel_cross_entropy(logits, labels, columns)
    return vocab_parallel_linear_cross_entropy(
        hidden,
        weight,
        labels,
        columns,
        loss_chunk_size=chunk_size,
        sequence_parallel=sequence_parallel,
    )


def columns_of(parallel):
    length = COLUMNS[parallel.tp_size]
    start = parallel.tp_rank * length
    return Columns(parallel.tp_group, start, max(0, min(length, V - start)))


def on_one_rank(case, chunk_size):
    """Without padding and group."""
    leaves = leaves_of(case)
    columns = Columns(None, 0, len(case.weight))
    return outcome_of(losses_of(*leaves, case.labels, chunk_size, columns), leaves, case)


def sharded(case, tp_size, sequence_parallel, chunk_sizes):
    """Returns the outcome of each chunk size, joined from the ranks.

    What all ranks hold must be the same bits. The weight is padded with large numbers that must not
    matter.
    """

    def work(parallel):
        length, rank = COLUMNS[tp_size] * tp_size, parallel.tp_rank
        padded = torch.cat((case.weight, case.weight.new_full((length - V, H), 50.0)))
        outcomes = []
        for chunk_size in chunk_sizes:
            hidden = case.hidden.chunk(tp_size)[rank] if sequence_parallel else case.hidden
            hidden = hidden.clone().requires_grad_()
            weight = padded.chunk(tp_size)[rank].clone().requires_grad_()
            losses = losses_of(
                hidden,
                weight,
                case.labels,
                chunk_size,
                columns_of(parallel),
                sequence_parallel=sequence_parallel,
            )
            outcomes.append(outcome_of(losses, (hidden, weight), case))
        return outcomes

    joined = []
    for of_ranks in zip(*on_ranks(work, tp_size, tp_size=tp_size), strict=True):
        losses, hidden, weight = zip(*of_ranks, strict=True)
        assert all(torch.equal(each, losses[0]) for each in losses)
        assert sequence_parallel or all(torch.equal(each, hidden[0]) for each in hidden)
        grad_weight = torch.cat(weight)
        assert not grad_weight[V:].any()  # padding gets exactly nothing
        grad_hidden = torch.cat(hidden) if sequence_parallel else hidden[0]
        joined.append(Outcome(losses[0], grad_hidden, grad_weight[:V]))
    return joined


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("tp_size, sequence_parallel", LAYOUTS)
def test_losses_and_gradients_are_torchs_at_every_chunk_size(tp_size, sequence_parallel):
    case = sample()
    expected = reference(case)
    for outcome in sharded(case, tp_size, sequence_parallel, CHUNK_SIZES):
        torch.testing.assert_close(outcome, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.runs(daily=4, ci=8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp_size, sequence_parallel", LAYOUTS[:3])
def test_one_chunk_gives_the_bits_of_logits_that_are_kept(tp_size, sequence_parallel, dtype):
    kept, one_chunk = sharded(sample(dtype), tp_size, sequence_parallel, (None, S * B))
    assert all(map(torch.equal, kept, one_chunk))


def test_large_logits_neither_overflow_nor_underflow():
    case = sample(torch.float32, 1e18)
    case = with_fields(case, labels=F.linear(case.hidden, case.weight).argmax(-1))
    expected = reference(case)
    for outcome in sharded(case, 2, False, (None, 5)):
        for theirs, ours in zip(expected, outcome, strict=True):
            assert ours.isfinite().all()
            # the logits themselves are rounded to 24 bits
            torch.testing.assert_close(
                ours.double(), theirs, rtol=1e-4, atol=2**-20 * float(theirs.abs().max() + 1)
            )


def test_a_nan_on_one_rank_reaches_the_loss_of_every_rank():
    case = sample()
    case.weight[7] = float("nan")  # of rank 1; `sharded` compares bits, which NaNs have not
    logits = F.linear(case.hidden, F.pad(case.weight, (0, 0, 0, 1)))

    def work(parallel):
        own = logits.chunk(2, -1)[parallel.tp_rank]
        return vocab_parallel_cross_entropy(own, case.labels, columns_of(parallel))

    assert all(losses.isnan().all() for losses in on_ranks(work, 2, tp_size=2))


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_16_bit_logits_give_float32_losses_as_exact_as_the_logits(dtype, rounding):
    """Several parts of rows, against the same logits in float64. Only the gradient is rounded, to
    8 or 11 bits."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(7, 1, 70_000, generator=generator).mul_(3).to(dtype).requires_grad_()
    labels = torch.tensor([0, 69_999, 5, 40_000, 1, 2, 3]).view(7, 1)
    grad_losses = torch.rand(7, 1, generator=generator)
    whole = logits.detach().double().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, labels, Columns(None, 0, 70_000))
    losses.backward(grad_losses)
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(7, 1)
    expected.backward(grad_losses.double())
    assert losses.dtype == torch.float32 and logits.grad.dtype == dtype
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), whole.grad, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize(
    "cap, is_compiled", [(None, False), (0.8, False), (None, True), (0.8, True)]
)
def test_two_backwards_give_the_gradients_of_torch_with_and_without_a_cap(
    chunk, cap, is_compiled, monkeypatch
):
    """Many logits lie above the cap. The operands are left alone."""
    uncompiled_kernels(monkeypatch)
    case = sample()
    losses, *grads = reference(case, cap)
    hidden = case.hidden.clone().requires_grad_()
    columns = Columns(None, 0, V, CompiledKernels() if is_compiled else None, cap)
    padded = F.pad(case.weight, (0, 0, 0, 1)).requires_grad_()
    if chunk is None:
        kept = F.linear(hidden, padded)
        ours = vocab_parallel_cross_entropy(kept, case.labels, columns)
    else:
        ours = losses_of(hidden, padded, case.labels, chunk, columns)
    torch.testing.assert_close(ours, losses, rtol=1e-12, atol=1e-12)
    for keeps in (True, False):
        found = torch.autograd.grad(ours, (hidden, padded), case.grad_losses, retain_graph=keeps)
        for mine, theirs in zip(found, grads, strict=True):
            torch.testing.assert_close(mine[: len(theirs)], theirs, rtol=1e-10, atol=1e-12)
            assert not mine[len(theirs) :].any()
    assert torch.equal(hidden, case.hidden) and torch.equal(padded[:V], case.weight)


@NEEDS_GRAD_DTYPE
def test_a_bf16_weight_that_collects_float32_gradients_gets_the_sum_unrounded():
    case = sample(torch.bfloat16)
    weight = case.weight.clone().requires_grad_()
    weight.grad_dtype = torch.float32
    losses = losses_of(case.hidden, weight, case.labels, 7, Columns(None, 0, len(weight)))
    losses.backward(case.grad_losses)
    assert weight.grad.dtype == torch.float32 and not torch.equal(
        weight.grad, weight.grad.bfloat16().float()
    )
    assert torch.equal(weight.grad.bfloat16(), on_one_rank(case, 7).grad_weight)


@pytest.mark.parametrize("seq_length, vocab_size, spread", [(64, 512, 0.05), (33, 1000, 0.5)])
def test_bf16_chunks_add_less_than_one_rounding_to_the_error_of_the_weights_gradient(
    seq_length, vocab_size, spread
):
    """The yardstick is the error with all logits at once, against float64.

    Without chunks the weight's gradient is rounded once. In chunks each product is rounded, and
    their sum once more: independent errors of the same size, together 2^0.5 of one (seen 1.40).
    The rest is not rounded again. A kernel for fewer rows may only sum in another order.
    """
    generator = torch.Generator().manual_seed(seq_length)
    hidden = torch.randn(seq_length, 2, 48, generator=generator).bfloat16()
    weight = (spread * torch.randn(vocab_size, 48, generator=generator)).bfloat16()
    labels = torch.randint(0, vocab_size, (seq_length, 2), generator=generator)
    case = Case(hidden, weight, labels, torch.full((seq_length, 2), 0.5 / seq_length))
    exact, whole = reference(case), on_one_rank(case, None)
    for chunk_size in (1, 7, 32):
        chunked = on_one_rank(case, chunk_size)
        for bound, ours, theirs, right in zip((1.1, 1.1, 1.5), chunked, whole, exact, strict=True):
            assert (ours - right).norm() <= bound * (theirs - right).norm()
        # the roundings do not shrink or stretch the gradient as a whole
        ratio = chunked.grad_weight.double().norm() / exact.grad_weight.norm()
        assert abs(ratio - 1.0) <= 2**-9


def test_under_autocast_one_chunk_has_the_bits_of_logits_that_are_kept():
    case, results = sample(torch.float32), []
    for chunk_size in (None, S * B, 7):
        leaves = leaves_of(case)
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of(*leaves, case.labels, chunk_size, Columns(None, 0, V))
        results.append(outcome_of(losses, leaves, case))
    kept, one_chunk, several = results
    assert all(map(torch.equal, kept, one_chunk))
    assert (kept[0] - several[0]).abs().max() <= 2**-6 and several.losses.dtype == torch.float32


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_costs_no_matmul(frozen):
    case = sample()
    expected = getattr(reference(case), f"grad_{'weight' if frozen == 'hidden' else 'hidden'}")
    hidden, weight = case.hidden.clone(), case.weight.clone()
    trained = weight if frozen == "hidden" else hidden
    trained.requires_grad_()
    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.set_multithreading_enabled(False),
    ):
        losses_of(hidden, weight, case.labels, 5, Columns(None, 0, V)).backward(case.grad_losses)
    assert counter.get_total_flops() == 3 * 2 * S * B * H * V  # logits twice, and one gradient
    torch.testing.assert_close(trained.grad, expected, rtol=1e-12, atol=1e-12)


def test_a_gradient_with_a_graph_of_its_own_is_an_error_in_chunks():
    """Rather than second derivatives that leave this one out."""
    case = sample()
    hidden = case.hidden.clone().requires_grad_()
    losses = losses_of(hidden, case.weight, case.labels, 5, Columns(None, 0, V))
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.autograd.grad(losses.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("how", ["", "retain_graph", "create_graph"])
def test_logits_are_overwritten_unless_the_backward_keeps_the_graph(how):
    case = sample()
    leaf = F.linear(case.hidden, case.weight).requires_grad_()
    logits = leaf * 1.0  # the output of an operation, like the projection's
    losses = vocab_parallel_cross_entropy(logits, case.labels, Columns(None, 0, V))
    (gradient,) = torch.autograd.grad(
        losses, leaf, case.grad_losses, **({how: True} if how else {})
    )
    assert torch.equal(logits, leaf) == bool(how)
    assert gradient.requires_grad == (how == "create_graph")
