"""The vocab-parallel loss against torch.nn.functional.cross_entropy over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.parallel.compiled import CompiledKernels
from megatron_lite.tensor_parallel.cross_entropy import (
    gradient_factors,
    local_labels,
    row_statistics,
    vocab_parallel_cross_entropy,
    write_gradient_,
)
from megatron_lite.tensor_parallel.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from tests.support.collectives import Sent, recorded_collectives
from tests.support.mappings import copy_to_tensor_parallel_region
from tests.support.models import tp_state
from tests.support.ranks import run_ranks

S, B, V = 5, 3, 11
# per rank: V ends within rank 1 at t=2, rank 2 at t=3, and rank 1 at t=4 (two hold none)
COLUMNS = {1: 12, 2: 6, 3: 4, 4: 6}


def sample(dtype=torch.float64, scale=3.0):
    """Whole logits [s, b, V], labels [s, b] that use every id, and a gradient per token."""
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(S, B, V, generator=generator, dtype=torch.float64) * scale).to(dtype)
    labels = torch.arange(S * B).remainder(V).view(S, B)
    return logits, labels, torch.rand(S, B, generator=generator, dtype=torch.float64)


def reference(logits, labels, grad_losses):
    """Losses [s, b] and the gradient of the logits, by torch, in float64."""
    whole = logits.double().clone().requires_grad_()
    losses = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    losses.backward(grad_losses)
    return losses.detach(), whole.grad


def shard(logits, rank, columns):
    """A rank's columns, the padding filled with large numbers that must not matter."""
    padding = logits.new_full((S, B, columns * 4), 50.0)
    return torch.cat((logits, padding), dim=-1)[..., rank * columns :][..., :columns].contiguous()


def num_ids(rank, columns):
    return max(0, min(columns, V - rank * columns))


def sharded(world_size, logits, labels, grad_losses):
    """Losses of every rank, and the gradient of the whole padded logits."""
    columns = COLUMNS[world_size]

    def work(rank, world_size):
        with tp_state(world_size) as parallel:
            local = shard(logits, rank, columns).detach().requires_grad_()
            losses = vocab_parallel_cross_entropy(
                local,
                labels,
                tp_group=parallel.tp_group,
                first_id=rank * columns,
                num_ids=num_ids(rank, columns),
            )
            losses.backward(grad_losses.to(losses.dtype))
            return losses.detach(), local.grad

    losses, grads = zip(
        *(run_ranks(work, world_size) if world_size > 1 else [work(0, 1)]), strict=True
    )
    return losses, torch.cat(grads, dim=-1)


@pytest.mark.parametrize("world_size", COLUMNS)
def test_losses_and_gradients_equal_torchs(world_size):
    logits, labels, grad_losses = sample()
    expected, expected_grad = reference(logits, labels, grad_losses)
    losses, grad = sharded(world_size, logits, labels, grad_losses)
    for of_rank in losses:
        torch.testing.assert_close(of_rank, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(of_rank, losses[0])
    torch.testing.assert_close(grad[..., :V], expected_grad, rtol=1e-14, atol=1e-14)
    assert not grad[..., V:].any()  # padding gets exactly nothing


def test_a_vocabulary_of_many_parts_of_rows():
    """70,000 float32 logits: three rows fill a part, and the seventh is alone in the last one."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(7, 1, 70_000, generator=generator).requires_grad_()
    labels = torch.tensor([0, 69_999, 5, 40_000, 1, 2, 3]).view(7, 1)
    grad_losses = torch.rand(7, 1, generator=generator)
    losses = vocab_parallel_cross_entropy(logits, labels, tp_group=None, first_id=0, num_ids=70_000)
    losses.backward(grad_losses)
    whole = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none").view(7, 1)
    expected.backward(grad_losses.double())
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), whole.grad, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_16_bit_logits_give_float32_losses_as_exact_as_the_logits(dtype, rounding):
    """The oracle takes the same logits in float64; only the gradient is rounded, to 8 or 11
    bits."""
    logits, labels, grad_losses = sample(dtype)
    expected, expected_grad = reference(logits, labels, grad_losses.float().double())
    losses, grad = sharded(2, logits, labels, grad_losses.float())
    assert losses[0].dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(losses[0].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad[..., :V].double(), expected_grad, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_steps_are_as_exact_as_those_of_torch(dtype):
    """Against float64, on the shards of two ranks; the second one has padding. CUDA runs them."""
    kernels = CompiledKernels(torch.device("cpu"))
    exact = sample()[0]
    errors = {None: [], kernels: []}
    for rank in range(2):
        columns, ids = COLUMNS[2], num_ids(rank, COLUMNS[2])
        labels = local_labels(sample()[1], rank * columns, ids)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        grad_losses, share = sample()[2].flatten().to(wide), torch.rand(S * B).to(wide)
        factors = gradient_factors(grad_losses, share, labels)
        for way, found in errors.items():
            logits = shard(exact, rank, columns).to(dtype).flatten(0, 1)
            rows = logits[:, :ids].double().clone()
            with torch.no_grad():
                statistics = row_statistics(logits, labels.column, ids, way)
                write_gradient_(logits, factors, num_ids=ids, kernels=way)
            assert [one.dtype for one in statistics] == [wide] * 3 and logits.dtype == dtype
            assert torch.equal(statistics.maximum.double(), rows.amax(-1))
            at_label = rows.gather(-1, labels.column.unsqueeze(-1)).squeeze(-1)
            assert torch.equal(statistics.at_label.double(), at_label)
            total = (rows - rows.amax(-1, keepdim=True)).exp().sum(-1)
            gradient = rows.softmax(-1) * factors.softmax.double()
            gradient.scatter_add_(-1, labels.column.unsqueeze(-1), factors.at_label.double())
            assert not logits[:, ids:].any()
            error = (logits[:, :ids].double() - gradient).abs().amax() / gradient.abs().amax()
            found.append(error.item() / torch.finfo(dtype).eps)
            error = ((statistics.total.double() - total) / total).abs().amax()
            found.append(error.item() / torch.finfo(wide).eps)
    for eager, compiled in zip(errors[None], errors[kernels], strict=True):
        assert compiled <= max(eager, 4.0)  # units in the last place
    assert kernels.num_graphs == 4  # two steps, on two numbers of ids


@pytest.mark.parametrize("chunk", [None, 7])
def test_the_compiled_loss_keeps_overwrites_and_returns_what_torchs_does(chunk):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(S, B, 8, generator=generator)
    weight = torch.randn(12, 8, generator=generator)
    _, labels, grad_losses = sample()
    results, kept = [], []
    for kernels in (None, CompiledKernels(torch.device("cpu"))):
        facts = dict(tp_group=None, first_id=0, num_ids=V, kernels=kernels)
        x, a = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with kept_for_backward(exclude=[x, a]) as meter:
            if chunk is None:
                logits = F.linear(x, a)
                losses = vocab_parallel_cross_entropy(
                    logits, labels, overwrite_logits=True, **facts
                )
            else:
                losses = vocab_parallel_linear_cross_entropy(
                    x, a, labels, loss_chunk_size=chunk, sequence_parallel=False, **facts
                )
        kept.append(meter.total_bytes())
        (losses * grad_losses.float()).sum().backward()
        if chunk is None:
            assert not logits[..., V:].any()  # the gradient is in their place
        results.append((losses.detach(), x.grad, a.grad))
    assert kept[0] == kept[1] > 0
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)  # order of float32 sums


@pytest.mark.parametrize("offset", [1e4, -1e4, 3e38])
def test_large_logits_neither_overflow_nor_underflow(offset):
    logits, labels, grad_losses = sample(torch.float32)
    logits = logits + offset if abs(offset) < 1e5 else logits * (offset / 30)
    expected, expected_grad = reference(logits, labels, grad_losses.float().double())
    losses, grad = sharded(2, logits, labels, grad_losses.float())
    assert losses[0].isfinite().all() and grad.isfinite().all()
    torch.testing.assert_close(losses[0].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad[..., :V].double(), expected_grad, rtol=1e-5, atol=1e-6)


def test_a_nan_on_one_rank_reaches_the_loss_of_every_rank():
    logits, labels, grad_losses = sample()
    logits[0, 0, 7] = float("nan")
    for of_rank in sharded(2, logits, labels, grad_losses)[0]:
        assert of_rank[0, 0].isnan() and of_rank[1:].isfinite().all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradcheck_in_float64(world_size):
    """The whole logits are the input on every rank, so that all ranks perturb the same element."""
    columns = COLUMNS[world_size]

    def work(rank, world_size):
        with tp_state(world_size) as parallel:
            logits = torch.randn(
                1, 2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
            ).requires_grad_()

            def loss(logits):
                local = copy_to_tensor_parallel_region(logits, parallel.tp_group).chunk(
                    world_size, dim=-1
                )[rank]
                return vocab_parallel_cross_entropy(
                    local,
                    torch.tensor([[9, 0]]),
                    tp_group=parallel.tp_group,
                    first_id=rank * columns,
                    num_ids=num_ids(rank, columns),
                )

            return torch.autograd.gradcheck(loss, (logits,))

    assert all(run_ranks(work, world_size) if world_size > 1 else [work(0, 1)])


def test_a_second_backward_gives_the_same_gradient_and_leaves_the_logits_alone():
    logits, labels, _ = sample()
    local = shard(logits, 0, 12).requires_grad_()
    before = local.detach().clone()
    loss = vocab_parallel_cross_entropy(local, labels, tp_group=None, first_id=0, num_ids=V).mean()
    (first,) = torch.autograd.grad(loss, local, retain_graph=True)
    (second,) = torch.autograd.grad(loss, local)
    assert torch.equal(first, second) and torch.equal(local.detach(), before)


@pytest.mark.parametrize("world_size", [1, 2])
def test_overwritten_logits_hold_the_gradient_with_the_same_bits(world_size):
    def work(rank, world_size):
        columns = COLUMNS[world_size]
        logits, labels, grad_losses = sample(torch.float32)
        gradients = []
        with tp_state(world_size) as parallel:
            for overwrite in (False, True):
                # as the output of an operation, like the projection's
                local = shard(logits, rank, columns).requires_grad_() * 1.0
                losses = vocab_parallel_cross_entropy(
                    local,
                    labels,
                    tp_group=parallel.tp_group,
                    first_id=rank * columns,
                    num_ids=num_ids(rank, columns),
                    overwrite_logits=overwrite,
                )
                (gradient,) = torch.autograd.grad(losses, local, grad_losses.float())
                gradients.append(gradient)
                assert (gradient.data_ptr() == local.data_ptr()) == overwrite
        assert torch.equal(*gradients)
        return True

    assert all(run_ranks(work, world_size) if world_size > 1 else [work(0, 1)])


@pytest.mark.parametrize("how", ["retain_graph", "create_graph"])
def test_a_backward_that_keeps_the_graph_does_not_overwrite_the_logits(how):
    logits, labels, _ = sample()
    leaf = shard(logits, 0, 12).requires_grad_()
    local = leaf * 1.0
    before = local.detach().clone()
    loss = vocab_parallel_cross_entropy(
        local, labels, tp_group=None, first_id=0, num_ids=V, overwrite_logits=True
    ).mean()
    (first,) = torch.autograd.grad(loss, leaf, **{how: True})
    assert torch.equal(local.detach(), before)
    assert first.requires_grad == (how == "create_graph")
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, second) and not torch.equal(local.detach(), before)


def test_no_grad_and_logits_that_need_no_gradient_build_no_graph():
    logits, labels, _ = sample()
    facts = dict(tp_group=None, first_id=0, num_ids=V)
    assert not vocab_parallel_cross_entropy(logits, labels, **facts).requires_grad
    with torch.no_grad():
        assert not vocab_parallel_cross_entropy(
            logits.requires_grad_(), labels, **facts
        ).requires_grad


def test_the_logits_are_never_sent():
    """Forward: two all-reduces, of one and of two numbers per token. Backward: none."""
    logits, labels, grad_losses = sample()

    def work(rank, world_size):
        with tp_state(2) as parallel:
            local = shard(logits, rank, 6).requires_grad_()
            with recorded_collectives() as sent:
                vocab_parallel_cross_entropy(
                    local,
                    labels,
                    tp_group=parallel.tp_group,
                    first_id=rank * 6,
                    num_ids=num_ids(rank, 6),
                ).backward(grad_losses)
            return sent

    assert (
        run_ranks(work, 2) == [[Sent("allreduce_", (S * B,)), Sent("allreduce_", (2, S * B))]] * 2
    )
