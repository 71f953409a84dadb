"""Host offload and the arena on a GPU, where copies take their time: the same bits, less memory, no
waiting.

Written like test_gpu.py, for `run.py`. On the CPU the tests that take a `device` try themselves.
"""

import gc
from contextlib import contextmanager

import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.recompute.offload import CudaCopyStreams
from megatron_lite.recompute.schedule import plan_stage
from tests.gpu.test_gpu import no_waits, on
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tiny_sizes
from tests.support.offload import equal, step

NUM_LAYERS = 5
POLICIES = (
    "*:full@host",
    "*:full/2@host",
    "*:none@host",
    "*:core_attn+pointwise@host",
    "0:full; 1:none@host; 2:none; *:full@host",
)
CONTIGUOUS = ("*:full", "*:full/2@host", "0-1:full@host; *:full")


class SlowCopyStreams(CudaCopyStreams):
    """Every copy begins about a millisecond late: what does not wait for it reads, frees or writes
    too early."""

    def copy(self, *tensors, after, back):
        with torch.cuda.stream(self.side(tensors[not back].device, back)):
            torch.cuda._sleep(2_000_000)  # clock cycles
        return super().copy(*tensors, after=after, back=back)


def build(policy, device, *, contiguous=False, dtype=torch.float32, **overrides):
    """Unfused attention, whose gradients are the same bits in every run; with dropout."""
    recompute = RecomputeConfig(recompute_policy=policy, contiguous_saved_activations=contiguous)
    fields = dict(
        num_layers=NUM_LAYERS,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        attention_backend="unfused",
    )
    return build_tiny_model(
        tiny_config(**{**fields, **overrides}),
        on(device),
        dtype=dtype,
        plan=plan_stage(recompute, NUM_LAYERS),
    )


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_store_changes_a_gradient(device):
    """Three steps, so that memory is used again; with two micro-batches in flight."""
    settings = [(policy, False) for policy in POLICIES] + [(policy, True) for policy in CONTIGUOUS]
    with deterministic():
        for dtype in (torch.float32, torch.bfloat16):
            plain = build("*:none", device, dtype=dtype)
            for policy, contiguous in settings:
                model = build(policy, device, contiguous=contiguous, dtype=dtype)
                model.decoder.stores.micro_batches = 2
                for seeds in ((3, 4), (4,), (5, 6)):
                    assert equal(step(model, batches=seeds), step(plain, batches=seeds)), (
                        policy,
                        contiguous,
                        dtype,
                        seeds,
                    )
                assert model.decoder.stores.host_bytes == model.decoder.stores.device_bytes == 0


def test_copies_that_come_late_change_no_gradient(cuda):
    with deterministic():
        plain = build("*:none", cuda)
        for policy in POLICIES:
            model = build(policy, cuda)
            model.decoder.stores.copy_streams = SlowCopyStreams()
            for seed in (3, 4):
                assert equal(step(model, batches=(seed,)), step(plain, batches=(seed,))), policy


def test_a_graph_that_is_dropped_while_copies_are_on_their_way_spoils_nothing(cuda):
    """What was called back and never read is freed only when it has arrived."""

    def breaks(*_):
        raise InterruptedError

    with deterministic():
        model, plain = build("*:full@host", cuda), build("*:none", cuda)
        model.decoder.stores.copy_streams = SlowCopyStreams()
        for _ in range(3):
            loss = model(*(tensor.to(cuda) for tensor in sample_tokens())).mean()
            handle = model.decoder.layers[3].mlp.register_forward_pre_hook(breaks)
            try:
                loss.backward()
            except InterruptedError:
                handle.remove()
            assert not model.decoder.layers[3].mlp._forward_pre_hooks
            del loss
            assert model.decoder.stores.host_bytes == 0
            assert equal(step(model), step(plain))


def kept_bytes(model, device):
    """(on the device, in host memory), of one micro-batch."""
    with kept_for_backward(exclude=model.parameters()) as meter:
        loss = model(*(tensor.to(device) for tensor in sample_tokens())).mean()
    stores = model.decoder.stores
    found = meter.total_bytes() + stores.device_bytes, stores.host_bytes
    del loss
    return found


def predicted_bytes(model, sizes):
    run = model.decoder.plan, sizes
    return activation_bytes(*run), activation_bytes(*run, on_host=True)


def test_as_many_bytes_as_predicted_are_on_the_host_and_as_many_fewer_on_the_device(device):
    plain = build("*:none", device, dtype=torch.bfloat16)
    sizes = tiny_sizes(plain.config, element_bytes=2, device=device.type)
    all_found, all_predicted = kept_bytes(plain, device), predicted_bytes(plain, sizes)
    assert all_found[1] == all_predicted[1] == 0
    for policy in POLICIES:
        for contiguous in (False, True) if "full" in policy else (False,):
            model = build(policy, device, contiguous=contiguous, dtype=torch.bfloat16)
            found, predicted = kept_bytes(model, device), predicted_bytes(model, sizes)
            assert found[1] == predicted[1] > 0, (policy, contiguous)
            assert all_found[0] - found[0] == all_predicted[0] - predicted[0], (policy, contiguous)


def all_held(stores):
    torch.cuda.synchronize()
    return stores.pool.num_bytes, stores.storages(), torch.cuda.memory_allocated()


def test_host_memory_is_pinned_and_taken_in_the_first_step_only(cuda):
    for policy in POLICIES:
        model = build(policy, cuda)
        step(model)
        stores = model.decoder.stores
        assert all(each.is_pinned() for each in stores.pool._buffers)
        gc.collect()  # the model before is in cycles
        first = all_held(stores)
        for _ in range(3):
            step(model)
        assert all_held(stores) == first, policy


def test_a_step_with_offload_never_waits_for_the_gpu(cuda):
    """The first step may: it allocates."""
    for policy in POLICIES:
        model = build(policy, cuda)
        batch = [tensor.to(cuda) for tensor in sample_tokens()]
        model(*batch).mean().backward()
        with no_waits():
            model(*batch).mean().backward()
