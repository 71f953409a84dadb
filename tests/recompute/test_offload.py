"""Host offload: the same bits back, originals freed in time, copies back early enough, whatever the
device's haste. Its pool grows in the first step only, and every buffer returns."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from unittest.mock import Mock, call, patch

import pytest
import torch

from megatron_lite.recompute.layer_runner import run_layers
from megatron_lite.recompute.offload import CopyStreams, CudaCopyStreams, Offload
from megatron_lite.recompute.pool import Pool
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.recompute.stores import Stores
from tests.support.models import sample_tokens
from tests.support.offload import (
    CONTIGUOUS,
    CPU,
    POLICIES,
    Late,
    build,
    config_of,
    draw_alike,
    equal,
    step,
)


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize("policy", [*POLICIES, CONTIGUOUS])
def test_copies_that_are_made_as_late_as_they_may_be_change_no_gradient(policy):
    """Two steps of two micro-batches in flight, so that buffers are used again."""
    copy_streams = Late()
    ours, plain = build(policy, copy_streams), build("*:none")
    ours.decoder.stores.micro_batches = 2
    for batches in ((3, 4), (4, 5)):
        assert (
            equal(step(ours, batches=batches), step(plain, batches=batches))
            and copy_streams.faults == []
        )
    assert copy_streams.count > 0


@pytest.mark.parametrize(
    "policy", ["*:full/2@host", "*:none@host", "*:pointwise@host", "*:ops(matmul)@host", CONTIGUOUS]
)
def test_two_backwards_through_a_retained_graph_equal_those_without(policy):
    def outcome(model):
        draw_alike(model)
        loss = model(*sample_tokens()).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    copy_streams = Late()
    assert (
        equal(outcome(build(policy, copy_streams)), outcome(build("*:none")))
        and copy_streams.faults == []
    )


def grads_of(layer, policy, rng, copy_streams):
    """Of a leaf, through one layer that calls no region."""
    leaf = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    stores = Stores(CPU)
    stores.copy_streams = copy_streams
    run_layers(
        plan_stage(config_of(policy), 1), [layer], leaf * 1, rng=rng, tp_group=None, stores=stores
    ).sum().backward()
    assert stores.host_bytes == 0
    return [leaf.grad]


def test_a_layer_may_run_a_backward_of_its_own_in_its_forward(rng):
    """It reads what is still on its way."""

    def layer(hidden, _):
        (force,) = torch.autograd.grad(hidden.tanh().exp().sum(), hidden, create_graph=True)
        return force.square() + hidden.sin()

    copy_streams = Late()
    assert (
        equal(
            grads_of(layer, "*:none@host", rng, copy_streams),
            grads_of(layer, "*:none", rng, CopyStreams()),
        )
        and copy_streams.faults == []
    )


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batches", [(3,), (3, 4, 5)])
def test_the_pool_grows_in_the_first_step_only_and_every_buffer_returns(policy, batches):
    model = build(policy)
    pool = model.decoder.stores.pool
    assert pool.num_bytes == 0
    step(model, batches=batches)
    first, buffers = pool.num_bytes, pool.storages()
    assert first > 0 and pool.bytes_in_use == 0
    for _ in range(2):
        step(model, batches=batches)
        assert (pool.num_bytes, pool.storages(), pool.bytes_in_use) == (first, buffers, 0)


class Broken(Exception):
    pass


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize("policy", ["*:full@host", "*:none@host", "*:pointwise@host", CONTIGUOUS])
@pytest.mark.parametrize("in_backward", [False, True])
def test_an_exception_leaves_no_buffer_taken_and_the_next_step_right(policy, in_backward):
    copy_streams = Late()
    model, plain = build(policy, copy_streams), build("*:none")
    step(model), step(plain)

    def breaks(*_):
        raise Broken

    def breaks_in_backward(module, args, output):
        if output.requires_grad:
            output.register_hook(breaks)

    mlp = model.decoder.layers[2].mlp
    handle = (
        mlp.register_forward_hook(breaks_in_backward)
        if in_backward
        else mlp.register_forward_pre_hook(breaks)
    )
    try:
        step(model)
    except Broken:
        handle.remove()
    else:
        pytest.fail("the layer did not break")
    assert model.decoder.stores.host_bytes == 0
    assert equal(step(model), step(plain)) and copy_streams.faults == []


def test_a_buffer_remembers_its_last_use_for_the_next_who_takes_it():
    pool = Pool(pinned=False)
    slot = pool.take(8)
    slot.last_use = "copy 7"
    del slot
    assert pool.take(8).last_use == "copy 7" and pool.take(9).last_use is None


def test_each_card_has_streams_of_its_own_and_waits_for_them():
    """On that of another card torch would copy on the current stream, and no event would tell."""
    cards = ["cuda:0", "cuda:1"]
    copies = [Mock(original=Mock(device=one), left=Mock(device=one)) for one in cards * 2]
    with patch.object(torch, "cuda") as cuda:
        offload = Offload(CudaCopyStreams(), kind="cuda")
        for one in copies:
            offload._copy_streams.copy(one.original, torch.empty(4), after=None, back=True)
        offload._before.copies = [Mock(return_value=one) for one in copies]
        offload.finish()
    assert cuda.Stream.call_args_list == [*map(call, cards)]
    assert cuda.current_stream.call_args_list == [*map(call, cards * 3)]


def test_two_threads_of_a_backward_may_read_one_copy():
    """As those of two devices. While one launches the copy back, the other must not read it."""
    launches, streams = Event(), CopyStreams()
    offload, leaf = Offload(streams, kind="cpu"), torch.ones(4, requires_grad=True)
    with offload.segment(Pool(pinned=False), stay=()):
        kept = leaf.exp()
    (copy,) = (each() for each in offload._before.copies)

    def late(target, source, **_):
        launches.set()
        time.sleep(0.2)
        target.copy_(source)

    streams.copy = late
    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy.memory)
        assert launches.wait(9.0)
        assert torch.equal(copy.memory().view(torch.float32), kept)


def test_a_graph_that_is_dropped_in_a_forward_takes_its_copies_with_it():
    pool = Pool(pinned=False)
    offload = Offload(CopyStreams(), kind="cpu")
    with offload.segment(pool, stay=()):
        torch.ones(4, requires_grad=True).exp()
    assert pool.bytes_in_use == 0 < pool.num_bytes
