"""The running sum of live storages equals a count that reads every storage anew."""

import weakref

import torch
from torch import nn

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.step_meter import (
    BACKWARD,
    FORWARD,
    HOST,
    OTHER,
    PHASES,
    UPDATE,
    WEIGHTS,
    StepMeter,
)
from megatron_lite.recompute.phase import allocating_on_host
from tests.support.storages import address


class Checked(LiveStorages):
    """Compares the sum with the sizes of all storages that operators returned, after each one."""

    def __init__(self):
        super().__init__()
        self.all = {}
        self.compared = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if self.find(storage):
                self.all[address(storage)] = weakref.ref(storage)
            del storage
        alive = sum(one.nbytes() for reference in self.all.values() if (one := reference()))
        assert not self.sum_is_above(alive) and self.sum_is_above(alive - 1)
        self.compared += 1
        return result


def test_the_sum_is_right_after_every_operator_of_a_training_step():
    torch.manual_seed(0)
    with Checked() as live:
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            model(torch.randn(5, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert live.compared > 50
        held = sum(one.nbytes for one in model.parameters())
        assert live.total_bytes() == 3 * held + 4 * len(list(model.parameters()))


def test_a_resize_outside_of_operators_counts_once_it_is_read_again():
    with LiveStorages() as live:
        tensor, other = torch.empty(100), torch.empty(10)
        tensor.untyped_storage().resize_(0)
        assert live.total_bytes() == 40
        tensor.untyped_storage().resize_(400)
        tensor.add_(1)  # reads the storage's size
        assert live.sum_is_above(439) and not live.sum_is_above(440)
        tensor.untyped_storage().resize_(0)
        other.add_(1)
        assert live.peak_bytes == 440
        more = torch.empty(100)
        assert (live.peak_bytes, live.total_bytes()) == (440, 440)
        del more


def test_a_peak_has_the_storages_that_were_alive_by_their_categories_and_its_moment():
    model = nn.Linear(10, 10, bias=False)
    with StepMeter(host_apart=True) as meter:
        weight, lost = model.weight.detach().clone(), torch.empty(3)
        meter.assign(WEIGHTS, [weight])
        del lost
        with meter.step([nn.Sequential(model)]):
            with allocating_on_host():
                host = torch.empty(500, dtype=torch.uint8)
            output = nn.Sequential(model)(torch.ones(5, 10, requires_grad=True)).square()
            output.sum().backward()
            meter.part("optimizer")
            update = torch.empty(400)
            del update, output
    peak = meter.peak
    assert peak.moment == (UPDATE, "", "aten.empty")
    assert peak.by_category[WEIGHTS] == 400 and peak.by_category[OTHER] == 0
    assert sum(peak.by_category.values()) == peak.num_bytes
    assert peak.by_category[UPDATE] == 1600
    assert peak.by_category[FORWARD] and peak.by_category[BACKWARD]
    assert HOST not in peak.by_category and meter.host_peak_bytes == host.nbytes
    held = meter.held()
    assert (held[WEIGHTS], held[OTHER]) == (400, 400)  # the gradient of the weight
    assert not set(held) & set(PHASES)
