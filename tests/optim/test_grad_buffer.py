"""Buckets: what is in them, when they are sent and what is sent."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.parameter_spec import ParameterSpec, mark
from tests.support.collectives import Sent, recorded_collectives
from tests.support.models import on_ranks, tp_state
from tests.support.saves import same

NAMES = ("first", "second", "third", "fourth")
OVERLAP = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=70)


class Chain(nn.Module):
    """Four vectors of 40 weights, used one after the other."""

    def __init__(self, *, dtype=torch.float32):
        super().__init__()
        for number, name in enumerate(NAMES):
            spec = ParameterSpec(global_shape=(40,))
            weight = torch.linspace(0.5, 1.5, 40, dtype=dtype) + number
            self.register_parameter(name, mark(nn.Parameter(weight), spec))

    def forward(self, x, names=NAMES):
        for name in names:
            x = (x * self.get_parameter(name)).tanh()
        return x.sum()


def buffer_of(model, parallel, config=None):
    return GradBuffer(dict(model.named_parameters()), parallel, config)


def inputs(rank, number=0):
    return torch.linspace(-1.0, 1.0, 40) * (rank + 1 + 10 * number)


HALF = (128,)  # two parameters of 40, each aligned to 32


@pytest.mark.runs(daily=2, ci=2)
@pytest.mark.parametrize(
    "config, announced, expected",
    [
        (OVERLAP, True, [[], [Sent("allreduce_", HALF)] * 2, []]),
        (OVERLAP, False, [[], [], [Sent("allreduce_", HALF)] * 2]),
        (DataParallelConfig(), True, [[], [], [Sent("allreduce_", (256,))]]),
        (
            replace(OVERLAP, use_distributed_optimizer=True),
            True,
            [[], [Sent("_reduce_scatter_base_", HALF)] * 2, []],
        ),
    ],
)
def test_buckets_are_sent_during_the_last_backward_with_overlap_else_afterwards(
    config, announced, expected
):
    """In the first backward, in the last one, and in reduce_()."""

    def work(parallel):
        model = Chain()
        buffer = buffer_of(model, parallel, config)
        found = []
        for number in range(2):
            if number == 1 and announced:
                buffer.sync_next_backward()
            with recorded_collectives() as sent:
                model(inputs(parallel.rank, number)).backward()
            found.append(list(sent))
        with recorded_collectives() as sent:
            buffer.reduce_()
        return [*found, list(sent)]

    assert on_ranks(work, 2)[0] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_that_wait_for_the_end_of_a_step_have_the_same_sums(dtype):
    """As on a GPU: two steps of two micro-batches, the last without some of the vectors."""
    found = []
    with tp_state(1) as parallel:
        for waits in (False, True):
            model = Chain(dtype=dtype)
            buffer = buffer_of(model, parallel)
            buffer._vectors_wait = waits
            for step in range(2):
                buffer.forget()
                for number in range(2):
                    names = NAMES if step == 0 else NAMES[:2]
                    model(inputs(step, number).to(dtype), names).backward()
                buffer.reduce_()
                found.append({name: grad.clone() for name, grad in buffer.grads.items()})
                assert all(
                    parameter.grad is buffer.grads[name]
                    for name, parameter in model.named_parameters()
                    if not buffer._gradients[name].adds
                )
    assert all(map(same, found[:2], found[2:]))


@pytest.mark.parametrize("used", [("second", "third"), ("fourth",), ()])
def test_weights_without_a_part_in_the_last_micro_batch_are_sent_afterwards(used):
    """Gradients are those of the replicas without overlap. Ranks that skip other weights would wait
    for each other in vain."""

    def work(parallel):
        found = []
        for config in (DataParallelConfig(), OVERLAP):
            model = Chain()
            buffer = buffer_of(model, parallel, config)
            for step in range(2):
                buffer.forget()
                model(inputs(parallel.rank, step)).backward()
                buffer.sync_next_backward()
                (
                    model(inputs(parallel.rank, 5 + step), used)
                    if used
                    else torch.zeros((), requires_grad=True)
                ).backward()
                buffer.reduce_()
            found.append({name: grad.clone() for name, grad in buffer.grads.items()})
        return found

    for plain, overlapped in on_ranks(work, 2):
        assert same(plain, overlapped) and all(grad.any() for grad in plain.values())


def test_a_gradient_that_comes_after_its_bucket_was_sent_is_an_error():
    def work(parallel):
        model = Chain()
        buffer = buffer_of(model, parallel, OVERLAP)
        buffer.sync_next_backward()
        model(inputs(parallel.rank)).backward()
        try:
            model(inputs(parallel.rank)).backward()
        except RuntimeError as error:
            buffer.reduce_()
            return str(error)
        return ""

    assert all(
        "another gradient of fourth came after it was sent" in message
        for message in on_ranks(work, 2)
    )


def reduced(config):
    """What ranks with other micro-batch gradients get for their sum, with bf16 weights."""
    parts = [256.0, 1.0, 1.0, 1.0]

    def work(parallel):
        model = Chain(dtype=torch.bfloat16)
        optimizer = Optimizer(model, OptimizerConfig(clip_grad=0.0), parallel, config)
        (model.first * parts[parallel.rank]).sum().backward()
        optimizer.step(0.0)
        held = {piece.name: piece.grad for piece in optimizer.layout.pieces}
        return optimizer.layout.whole("first", held.get("first")).unique().tolist()

    first, *others = on_ranks(work, 4)
    assert all(other == first for other in others)
    return first


@pytest.mark.runs
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_are_summed_over_ranks_in_float32_unless_they_are_asked_to_be_in_bf16(sharded):
    """256 + 1 + 1 + 1 is 259, which bf16 does not have: it makes 256 or 260 of it, as the order has
    it."""
    config = DataParallelConfig(use_distributed_optimizer=sharded)
    assert reduced(config) == [259.0]
    assert set(reduced(replace(config, grad_reduce_in_bf16=True))) <= {256.0, 260.0}
