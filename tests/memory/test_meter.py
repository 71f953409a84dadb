"""The meter: what a forward keeps, to the byte, by torch's hooks; and the same figure from the
storages that live."""

import gc
import time
import weakref

import torch
from torch import nn

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.meter import kept_for_backward
from tests.support.storages import addresses, bytes_by_label

ROW = 4 * 7  # bytes of a float32 row of 7


def leaf(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_the_count_keeps_nothing_alive_not_even_a_saved_output():
    """A hook that held the very output that its graph saved would make a cycle."""
    gc.disable()
    try:
        with kept_for_backward() as meter:
            output = leaf(3, 7).exp()
        storage = weakref.ref(output.untyped_storage())
        del output
        assert storage() is None and meter.total_bytes() == 0
    finally:
        gc.enable()


def test_bytes_fall_to_the_module_whose_forward_saved_them_first():
    first, second = nn.Linear(7, 5), nn.Sequential(nn.Linear(5, 5, bias=False), nn.GELU())
    model = nn.ModuleDict({"first": first, "second": second})
    x = leaf(3, 7)
    with kept_for_backward(exclude=model.parameters(), model=model) as meter:
        hidden = first(x)
        total = (second(hidden) * hidden).sum()
    size = 4 * 3 * 5
    # hidden is second.0's already
    assert bytes_by_label(meter) == {"first": 3 * ROW, "second.0": size, "second.1": size, "": size}
    assert total.requires_grad


def test_bytes_beside_the_known_are_waited_for(monkeypatch):
    with LiveStorages() as live:
        known, late, stays = torch.zeros(2, 7), [torch.zeros(3, 7)], torch.zeros(1, 7)
    monkeypatch.setattr(time, "sleep", lambda seconds: late.clear())
    assert live.bytes_beside(addresses([known])) == ROW
    assert live.bytes_beside(addresses([known, stays])) == 0
