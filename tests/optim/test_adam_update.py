"""Skipped steps of every update rule."""

import math

import pytest
import torch

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim.optimizer import Optimizer
from tests.optim.test_muon import Prescribed, state_of, step
from tests.optim.test_optimizer import CONFIG, Plain
from tests.support.models import tp_state


def optimizer_of(model, parallel, impl):
    config = OptimizerConfig(**CONFIG, clip_grad=0.05, optimizer=impl)
    return Optimizer(model, config, parallel)


@pytest.mark.parametrize("impl", ["adam", "muon", "sgd"])
@pytest.mark.parametrize(
    ("fault", "bad_steps"), [(math.inf, (0,)), (math.nan, (1, 2)), (math.inf, (0, 1, 3))]
)
def test_skipped_steps_change_nothing_and_do_not_count(impl, fault, bad_steps):
    """Bias correction would tell a step that counts: the first update is as large at every learning
    rate."""
    with tp_state(1) as parallel:
        kind = Prescribed if impl == "muon" else Plain
        model, undisturbed = kind(), kind()
        ours, theirs = (optimizer_of(one, parallel, impl) for one in (model, undisturbed))
        for number in range(5):
            if number in bad_steps:
                before = state_of(model, ours)
                ours.zero_grad()
                model.loss(9).backward()
                next(iter(ours.buffer.grads.values()))[2] = fault
                assert ours.step(0.1).skipped.item() == 1.0
                assert all(
                    torch.equal(value, before[key]) for key, value in state_of(model, ours).items()
                )
            else:
                for one, optimizer in ((model, ours), (undisturbed, theirs)):
                    step(one, optimizer, number, 0.1)
        assert ours.num_updates == theirs.num_updates == 5 - len(bad_steps)
    expected = state_of(undisturbed, theirs)
    assert all(torch.equal(value, expected[key]) for key, value in state_of(model, ours).items())
