"""The checkpoint Function alone: what it keeps, what it restores, what may go in and out."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from megatron_lite.parallel.rng import DEFAULT, TENSOR_PARALLEL, RngStreams
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute.checkpoint import checkpoint
from tests.support.odd_layers import assert_equal

WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


def noisy(rng, hidden, weight):
    """A function whose backward needs the numbers that its forward drew, on both streams."""
    with rng.fork(TENSOR_PARALLEL):
        inner = torch.rand_like(hidden)
    return torch.tanh(hidden @ weight * inner) * torch.rand_like(hidden)


def grads(rng, run, times):
    """[output, d hidden, d weight] of `run(hidden, weight)`, from the same streams each time."""
    start = rng.snapshot()
    hidden, weight = torch.ones(4, 6, requires_grad=True), WEIGHT.clone().requires_grad_()
    output = run(hidden, weight)
    for time in range(times):
        output.sum().backward(retain_graph=time + 1 < times)
    rng.restore(start)
    return [output.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("times", range(1, 4))
@pytest.mark.parametrize("way", ["alone", "nested", DEFAULT, TENSOR_PARALLEL])
def test_every_backward_sees_the_numbers_of_the_forward(rng, way, times):
    """Also of nested units, and of a unit inside an open fork."""

    def run(unit):
        def forward(hidden, weight):
            if way == "nested":
                return unit(lambda h, w: noisy(rng, unit(noisy, rng, h, w), w), hidden, weight)
            with nullcontext() if way == "alone" else rng.fork(way):
                return unit(noisy, rng, hidden, weight)

        return grads(rng, forward, times)

    assert_equal(run(partial(checkpoint, rng=rng)), run(lambda call, *given: call(*given)))


def test_outputs_may_be_many_and_some_without_gradient(rng):
    hidden = torch.tensor([3.0, 1.0, 2.0], requires_grad=True)
    values, indices, nothing = checkpoint(lambda h: (*h.square().sort(), None), hidden, rng=rng)
    assert nothing is None and not indices.requires_grad and indices.tolist() == [1, 2, 0]
    values[2].backward()
    assert hidden.grad.tolist() == [6.0, 0.0, 0.0]


def test_a_function_without_any_gradient_says_so(rng):
    output = checkpoint(lambda h: h.detach() * 2, torch.ones(3, requires_grad=True), rng=rng)
    with pytest.raises(RuntimeError, match="no output that requires grad"):
        output.sum().backward()


def test_a_parameter_may_be_returned(rng):
    """Its node must not become the parameter's own history: backward would never end."""
    linear = nn.Linear(6, 2)
    output, bias = checkpoint(lambda h: (linear(h), linear.bias), torch.ones(4, 6), rng=rng)
    assert linear.bias.is_leaf
    (output.sum() + bias.sum()).backward()
    assert torch.equal(linear.bias.grad, torch.full((2,), 5.0))


@pytest.mark.parametrize("around", ["forward", "backward"])
def test_a_replay_sees_the_autocast_of_its_forward(rng, around):
    dtypes = []

    def function(hidden):
        dtypes.append((hidden @ WEIGHT).dtype)
        return hidden @ WEIGHT

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around == "forward"):
        output = checkpoint(function, torch.ones(4, 6, requires_grad=True), rng=rng)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around == "backward"):
        output.sum().backward()
    assert dtypes == [torch.bfloat16 if around == "forward" else torch.float32] * 2


@pytest.mark.parametrize("times", [1, 2])
def test_a_replay_repeats_the_cpu_generator_beside_the_streams_of_a_device(times):
    # of a generator that is not the CPU's, as on a GPU
    own = torch.Generator()
    streams = RngStreams(torch.device("cuda"), seed=3, generator=own)

    def function(hidden, weight):
        with streams.fork(TENSOR_PARALLEL):
            inner = torch.rand(hidden.shape, generator=own)
        return torch.tanh(hidden @ weight * inner) * torch.rand_like(hidden)

    def outcome(run):
        torch.manual_seed(5)
        return grads(streams, run, times)

    assert_equal(outcome(lambda h, w: checkpoint(function, h, w, rng=streams)), outcome(function))


def test_a_gradient_is_handed_on_in_the_layout_that_backward_gave_it(rng):
    """A sum over it (the weight gradient of a norm before) adds in the order of its strides."""
    strides = []
    for run in (torch.t, lambda h: checkpoint(torch.t, h, rng=rng)):
        hidden = torch.ones(4, 6, requires_grad=True) * 2
        hidden.register_hook(lambda grad: strides.append(grad.stride()))
        (run(hidden) * torch.ones(6, 4)).sum().backward()
    assert strides == [(1, 4), (1, 4)]


def test_an_argument_handed_through_and_a_tensor_returned_or_passed_twice(rng):
    def function(hidden, same):
        doubled = hidden * same * 2
        return hidden, doubled, doubled

    leaf = torch.tensor([3.0, 5.0], requires_grad=True)
    through, one, other = checkpoint(function, leaf, leaf, rng=rng)
    (through + one + 10 * other).sum().backward()
    assert leaf.grad.tolist() == [1 + 44 * 3, 1 + 44 * 5]


def test_where_gradients_are_off_nothing_is_kept_and_the_result_is_direct(rng, monkeypatch):
    def forbidden(*_):
        raise AssertionError("gradients are off")

    monkeypatch.setattr(RngStreams, "snapshot", forbidden)
    monkeypatch.setattr(engine, "split_for_rank", forbidden)
    result = {}
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert (
                checkpoint(lambda hidden: result, torch.ones(4, 6), rng=rng, split_group=object())
                is result
            )


def test_a_backward_for_chosen_inputs_is_refused_before_it_writes_a_gradient(rng):
    """The backward of a replay reaches every parameter: `torch.autograd.grad` would fill their
    .grad behind the caller's back."""
    linear, x = torch.nn.Linear(6, 6), torch.ones(3, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"without `inputs`"):
        torch.autograd.grad(checkpoint(linear, x, rng=rng).sum(), [x])
    assert linear.weight.grad is None
