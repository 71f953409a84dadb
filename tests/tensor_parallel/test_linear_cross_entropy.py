"""The projection and loss in chunks: against torch over the whole vocabulary, and against the same
with all logits kept."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.tensor_parallel.column_linear import column_parallel_linear
from megatron_lite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_lite.tensor_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from tests.support.changes import with_fields
from tests.support.collectives import recorded_collectives
from tests.support.mappings import copy_to_tensor_parallel_region
from tests.support.models import tp_state
from tests.support.ranks import run_ranks
from tests.support.torch_features import NEEDS_GRAD_DTYPE

S, B, H, V = 8, 3, 5, 11
# per rank: V ends within rank 1 at t=2 and t=4, where two ranks hold nothing but padding
COLUMNS = {1: 12, 2: 6, 4: 6}
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]  # TP size, sequence parallel
# of 24 tokens: chunks within, across and of several positions; ragged; one
CHUNK_SIZES = [1, 5, 9, 23, 24, 1000]


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


def sample(dtype=torch.float64) -> Case:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((S, B, H), (V, H))
    )
    grad_losses = torch.rand(S, B, generator=generator, dtype=torch.float64).to(
        torch.promote_types(dtype, torch.float32)
    )
    return Case(hidden, weight, torch.arange(S * B).remainder(V).view(S, B), grad_losses)


def reference(case) -> Outcome:
    """By torch in float64, from the same numbers."""
    hidden, weight = (
        tensor.double().clone().requires_grad_() for tensor in (case.hidden, case.weight)
    )
    logits = F.linear(hidden, weight).flatten(0, 1)
    losses = F.cross_entropy(logits, case.labels.flatten(), reduction="none").view(
        case.labels.shape
    )
    return Outcome(
        losses.detach(), *torch.autograd.grad(losses, (hidden, weight), case.grad_losses.double())
    )


def losses_of(hidden, weight, labels, chunk_size, **facts):
    """chunk_size None: with all logits kept."""
    if chunk_size is not None:
        return vocab_parallel_linear_cross_entropy(
            hidden, weight, labels, loss_chunk_size=chunk_size, **facts
        )
    linear = {name: facts.pop(name) for name in ("tp_group", "sequence_parallel")}
    return vocab_parallel_cross_entropy(
        column_parallel_linear(hidden, weight, None, **linear),
        labels,
        tp_group=linear["tp_group"],
        **facts,
    )


def on_one_rank(case, chunk_size) -> Outcome:
    """Without padding and group."""
    hidden, weight = (
        tensor.detach().clone().requires_grad_() for tensor in (case.hidden, case.weight)
    )
    losses = losses_of(
        hidden,
        weight,
        case.labels,
        chunk_size,
        tp_group=None,
        sequence_parallel=False,
        first_id=0,
        num_ids=len(weight),
    )
    return Outcome(
        losses.detach(), *torch.autograd.grad(losses, (hidden, weight), case.grad_losses)
    )


def sharded(case, tp_size, sequence_parallel, chunk_sizes) -> list[list[Outcome]]:
    """[chunk size][rank], each rank's own. The weight is padded with large numbers that must not
    matter."""
    columns = COLUMNS[tp_size]

    def work(rank, world_size):
        padded = torch.cat((case.weight, case.weight.new_full((columns * world_size - V, H), 50.0)))
        outcomes = []
        with tp_state(world_size) as parallel:
            for chunk_size in chunk_sizes:
                hidden = case.hidden.chunk(world_size)[rank] if sequence_parallel else case.hidden
                hidden, weight = (
                    hidden.clone().requires_grad_(),
                    padded.chunk(world_size)[rank].clone().requires_grad_(),
                )
                losses = losses_of(
                    hidden,
                    weight,
                    case.labels,
                    chunk_size,
                    tp_group=parallel.tp_group,
                    sequence_parallel=sequence_parallel,
                    first_id=rank * columns,
                    num_ids=max(0, min(columns, V - rank * columns)),
                )
                outcomes.append(
                    Outcome(
                        losses.detach(),
                        *torch.autograd.grad(losses, (hidden, weight), case.grad_losses),
                    )
                )
        return outcomes

    return list(zip(*(run_ranks(work, tp_size) if tp_size > 1 else [work(0, 1)]), strict=True))


def whole(of_ranks, sequence_parallel) -> Outcome:
    """Joins what the ranks hold; what they all hold must be the same bits."""
    losses, hidden, weight = zip(*of_ranks, strict=True)
    assert all(torch.equal(each, losses[0]) for each in losses)
    assert sequence_parallel or all(torch.equal(each, hidden[0]) for each in hidden)
    grad_weight = torch.cat(weight)
    assert not grad_weight[V:].any()  # padding gets exactly nothing
    return Outcome(
        losses[0], torch.cat(hidden) if sequence_parallel else hidden[0], grad_weight[:V]
    )


@pytest.mark.parametrize(("tp_size", "sequence_parallel"), LAYOUTS)
def test_losses_and_gradients_are_torchs_at_every_chunk_size(tp_size, sequence_parallel):
    case = sample()
    expected = reference(case)
    for of_ranks in sharded(case, tp_size, sequence_parallel, CHUNK_SIZES):
        for theirs, ours in zip(expected, whole(of_ranks, sequence_parallel), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tp_size", "sequence_parallel"), LAYOUTS)
def test_one_chunk_gives_the_bits_of_logits_that_are_kept(tp_size, sequence_parallel, dtype):
    kept, one_chunk = sharded(sample(dtype), tp_size, sequence_parallel, (None, S * B))
    for theirs, ours in zip(kept, one_chunk, strict=True):
        assert all(map(torch.equal, theirs, ours))


def wide(dtype, *, tokens=60, h=32, vocabulary=300) -> Case:
    """Of one sequence, large enough for blocked matmuls."""
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(tokens, 1, h, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, h, generator=generator).mul_(0.3).to(dtype)
    labels = torch.randint(vocabulary, (tokens, 1), generator=generator)
    return Case(
        hidden,
        weight,
        labels,
        torch.rand(tokens, 1, generator=generator).to(torch.promote_types(dtype, torch.float32)),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_token_knows_nothing_of_its_chunk_but_its_own_row_of_the_matmul(dtype):
    """To the bit, whether or not the matmul's kernel gives a row the same bits among fewer rows."""
    case = wide(dtype)
    logits = torch.cat(
        [F.linear(part, case.weight) for part in case.hidden.split(17)]
    ).requires_grad_()
    losses = vocab_parallel_cross_entropy(
        logits, case.labels, tp_group=None, first_id=0, num_ids=len(case.weight)
    )
    (grad_logits,) = torch.autograd.grad(losses, logits, case.grad_losses)
    ours = on_one_rank(case, 17)
    assert torch.equal(ours.losses, losses)
    assert torch.equal(
        ours.grad_hidden, torch.cat([part.matmul(case.weight) for part in grad_logits.split(17)])
    )


def test_float32_chunks_are_as_exact_as_float32():
    """Relative to the largest value. Sums over 32, 300 and 60 products have errors of 2 to 7 units
    of 2^-24, in chunks or not."""
    case = wide(torch.float32)
    for theirs, ours in zip(reference(case), on_one_rank(case, 7), strict=True):
        assert (theirs - ours).abs().max() <= 2**-20 * theirs.abs().max()


def test_the_weights_gradient_of_bf16_does_not_decay_with_the_number_of_chunks():
    """600 tokens of one label push its row the same way. One at a time added in bf16, they would
    stop counting at 256."""
    case = wide(torch.bfloat16, tokens=600)
    case = with_fields(
        case,
        hidden=case.hidden[:1].expand(600, 1, -1).contiguous(),
        labels=torch.zeros_like(case.labels),
        grad_losses=torch.ones_like(case.grad_losses),
    )
    expected = reference(case).grad_weight
    for chunk_size in (600, 1):
        error = (on_one_rank(case, chunk_size).grad_weight.double() - expected).abs().max()
        # the logits' gradient and the result are each rounded to 8 bits
        assert error <= 2**-7 * expected.abs().max()


def test_a_bf16_weight_of_several_blocks_gets_the_gradient_that_it_gets_with_all_logits():
    """Its gradient in float32 is 1.2 MB, and products are added 1 MiB at a time."""
    case = wide(torch.bfloat16, h=1024)
    expected = on_one_rank(case, None).grad_weight.float()
    for chunk_size in (60, 7):
        difference = (on_one_rank(case, chunk_size).grad_weight - expected).abs().max()
        assert difference <= 2**-7 * expected.abs().max()  # each is rounded to 8 bits


@NEEDS_GRAD_DTYPE
def test_a_bf16_weight_that_collects_float32_gradients_gets_the_sum_unrounded():
    case = wide(torch.bfloat16)
    weight = case.weight.clone().requires_grad_()
    weight.grad_dtype = torch.float32
    losses = losses_of(
        case.hidden,
        weight,
        case.labels,
        7,
        tp_group=None,
        sequence_parallel=False,
        first_id=0,
        num_ids=len(weight),
    )
    losses.backward(case.grad_losses)
    assert weight.grad.dtype == torch.float32 and not torch.equal(
        weight.grad, weight.grad.bfloat16().float()
    )
    assert torch.equal(weight.grad.bfloat16(), on_one_rank(case, 7).grad_weight)


def test_labels_out_of_range_give_what_they_give_with_all_logits():
    case = sample()
    case.labels[0], case.labels[3] = -100, V
    assert all(map(torch.equal, on_one_rank(case, None), on_one_rank(case, S * B)))
    torch.testing.assert_close(
        on_one_rank(case, 5), on_one_rank(case, None), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, True)])
def test_what_is_frozen_gets_no_gradient_and_costs_no_matmul(frozen, tp_size, sequence_parallel):
    case = sample()
    expected = getattr(reference(case), f"grad_{'weight' if frozen == 'hidden' else 'hidden'}")

    def work(rank, world_size):
        with tp_state(world_size) as parallel:
            hidden = (
                case.hidden.chunk(world_size)[rank] if sequence_parallel else case.hidden
            ).clone()
            weight = F.pad(case.weight, (0, 0, 0, 1)).chunk(world_size)[rank].clone()
            (weight if frozen == "hidden" else hidden).requires_grad_()
            first = rank * len(weight)
            with (
                FlopCounterMode(display=False) as counter,
                torch.autograd.set_multithreading_enabled(False),
            ):
                losses_of(
                    hidden,
                    weight,
                    case.labels,
                    5,
                    tp_group=parallel.tp_group,
                    sequence_parallel=sequence_parallel,
                    first_id=first,
                    num_ids=min(len(weight), V - first),
                ).backward(case.grad_losses)
            return counter.get_total_flops(), hidden.grad, weight.grad

    flops, hidden, weight = zip(
        *(run_ranks(work, tp_size) if tp_size > 1 else [work(0, 1)]), strict=True
    )
    assert sum(flops) == 3 * 2 * S * B * H * 12  # logits twice, and one gradient
    assert {None} == set(hidden if frozen == "hidden" else weight)
    grad = torch.cat(weight)[:V] if frozen == "hidden" else torch.cat(hidden)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_gradcheck_in_float64(tp_size):
    """Hidden states and the whole weight are the input on every rank, so that all ranks perturb the
    same element."""

    def work(rank, world_size):
        with tp_state(world_size) as parallel:
            generator = torch.Generator().manual_seed(2)
            hidden, weight = (
                torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
                for size in ((2, 2, 3), (6, 3))
            )

            def loss(hidden, weight):
                local = copy_to_tensor_parallel_region(weight, parallel.tp_group).chunk(world_size)[
                    rank
                ]
                return losses_of(
                    hidden,
                    local,
                    torch.tensor([[4, 0], [1, 3]]),
                    3,
                    tp_group=parallel.tp_group,
                    sequence_parallel=False,
                    first_id=rank * len(local),
                    num_ids=len(local) - rank,
                )

            return torch.autograd.gradcheck(loss, (hidden, weight))

    assert all(run_ranks(work, tp_size) if tp_size > 1 else [work(0, 1)])


def test_a_second_backward_gives_the_same_gradients_and_leaves_the_operands_alone():
    case = sample()
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss = losses_of(
        hidden,
        weight,
        case.labels,
        5,
        tp_group=None,
        sequence_parallel=False,
        first_id=0,
        num_ids=V,
    ).mean()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(map(torch.equal, first, second))
    assert torch.equal(hidden, case.hidden) and torch.equal(weight, case.weight)


def test_a_gradient_with_a_graph_of_its_own_is_an_error():
    """Rather than second derivatives that leave this one out."""
    case = sample()
    hidden = case.hidden.clone().requires_grad_()
    losses = losses_of(
        hidden,
        case.weight,
        case.labels,
        5,
        tp_group=None,
        sequence_parallel=False,
        first_id=0,
        num_ids=V,
    )
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.autograd.grad(losses.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_are_those_of_one_linear_layer_and_one_loss_at_every_chunk_size(
    sequence_parallel,
):
    case = sample()

    def work(rank, world_size):
        found = []
        with tp_state(world_size) as parallel:
            hidden = case.hidden.chunk(2)[rank] if sequence_parallel else case.hidden
            hidden, weight = (
                hidden.clone().requires_grad_(),
                case.weight[:6].clone().requires_grad_(),
            )
            for chunk_size in (None, 1, 5, 24):
                with recorded_collectives() as sent:
                    losses_of(
                        hidden,
                        weight,
                        case.labels,
                        chunk_size,
                        tp_group=parallel.tp_group,
                        num_ids=6 - rank,
                        sequence_parallel=sequence_parallel,
                        first_id=6 * rank,
                    ).backward(case.grad_losses)
                found.append(sent)
        return found

    for kept, *in_chunks in run_ranks(work, 2):
        assert len(kept) == (5 if sequence_parallel else 3) and in_chunks == [kept] * 3


PEAK = dict(tokens=96, h=8, vocabulary=2048)  # V >> h
ALL_LOGITS = 4 * 96 * 2048


def peak_bytes(chunk_size, *, training=True) -> int:
    """The most alive at once besides the operands."""
    case = wide(torch.float32, **PEAK)
    weight, hidden = case.weight.requires_grad_(), case.hidden.requires_grad_()
    with torch.set_grad_enabled(training), LiveStorages() as live:
        losses = losses_of(
            hidden,
            weight,
            case.labels,
            chunk_size,
            tp_group=None,
            sequence_parallel=False,
            first_id=0,
            num_ids=len(weight),
        )
        if training:
            losses.backward(case.grad_losses)
        else:
            assert not losses.requires_grad
    return live.peak_bytes


@pytest.mark.parametrize("training", [True, False])
def test_all_logits_never_exist_neither_forward_nor_backward(training):
    assert peak_bytes(None, training=training) > ALL_LOGITS
    chunk, grad_weight, of_tokens = ALL_LOGITS // 12, 4 * 2048 * 8, 96 * (8 + 16) * 4
    # logits and their softmax
    assert peak_bytes(8, training=training) < 2 * chunk + grad_weight * training + of_tokens


def test_nothing_of_the_size_of_the_vocabulary_is_kept():
    case = wide(torch.float32, **PEAK)
    weight, hidden = case.weight.requires_grad_(), case.hidden.requires_grad_()
    with LiveStorages() as live:
        losses = losses_of(
            hidden,
            weight,
            case.labels,
            8,
            tp_group=None,
            sequence_parallel=False,
            first_id=0,
            num_ids=2048,
        )
    assert losses.requires_grad
    # columns, whether they are here, shares, losses
    assert live.total_bytes() == 96 * (8 + 1 + 4 + 4)


BF16_GRID = [
    (seed, seq_length, vocab_size, spread)
    for seed, (seq_length, vocab_size) in enumerate(((64, 512), (33, 1000)))
    for spread in (0.05, 0.5)
]


@pytest.mark.parametrize(("seed", "seq_length", "vocab_size", "spread"), BF16_GRID)
def test_bf16_chunks_add_less_than_one_rounding_to_the_error_of_the_weights_gradient(
    seed: int, seq_length: int, vocab_size: int, spread: float
) -> None:
    """The yardstick is the error with all logits at once, against float64.

    Without chunks the weight's gradient is rounded once. In chunks each product is rounded, and
    their sum once more: independent errors of the same size, together 2^0.5 of one (seen 1.40).
    The rest is not rounded again. A kernel for fewer rows may only sum in another order.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(seq_length, 2, 48, generator=generator).bfloat16()
    weight = (spread * torch.randn(vocab_size, 48, generator=generator)).bfloat16()
    labels = torch.randint(0, vocab_size, (seq_length, 2), generator=generator)
    case = Case(hidden, weight, labels, torch.full((seq_length, 2), 0.5 / seq_length))
    exact, whole = reference(case), on_one_rank(case, None)
    for chunk_size in (1, 7, 32, 2 * seq_length):
        chunked = on_one_rank(case, chunk_size)
        for bound, ours, theirs, right in zip((1.1, 1.1, 1.5), chunked, whole, exact, strict=True):
            assert (ours - right).norm() <= bound * (theirs - right).norm()
        # the roundings do not shrink or stretch the gradient as a whole
        ratio = chunked.grad_weight.double().norm() / exact.grad_weight.norm()
        assert abs(ratio - 1.0) <= 2**-9
    assert torch.equal(chunked.grad_weight, whole.grad_weight)  # one chunk
