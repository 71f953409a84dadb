"""The pool of host memory: it grows in the first step only, every buffer returns whatever happens,
none is taken without need."""

import pytest

from megatron_lite.recompute.pool import Pool
from tests.support.offload import CONTIGUOUS, POLICIES, Late, build, equal, step


@pytest.mark.runs(daily=3, ci=9)
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


@pytest.mark.runs(daily=3, ci=8)
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
