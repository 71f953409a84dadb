"""The loss scale against Megatron's rule, written down once more and as megatron-core has it."""

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.optimizer_settings import LossScaleConfig, OptimizerConfig
from megatron_lite.config.setting import from_plain
from megatron_lite.optim.loss_scale import LossScale, LossScaleState
from megatron_lite.optim.optimizer import Optimizer
from tests.optim.test_optimizer import RATES, Plain
from tests.support.models import tp_state
from tests.support.saves import same

CPU = torch.device("cpu")
configs = st.builds(
    lambda initial, low, window, hysteresis: LossScaleConfig(
        initial_loss_scale=2.0**initial,
        min_loss_scale=min(low, 2.0**initial),
        loss_scale_window=float(window),
        hysteresis=hysteresis,
    ),
    st.integers(-2, 34),
    st.sampled_from([1.0, 3.0, 0.3, 64.0]),
    st.integers(1, 5),
    st.integers(1, 4),
)


def scales(loss_scale, overflows):
    """The scale of each step."""
    used = []
    for overflowed in overflows:
        used.append(loss_scale.scale.item())
        loss_scale.update(torch.tensor(float(overflowed)))
    return used


def by_hand(config, overflows):
    """The same from counts over the whole past, without trackers."""
    scale, used = config.initial_loss_scale, []
    since_growth = []
    for overflowed in overflows:
        used.append(scale)
        since_growth.append(overflowed)
        if overflowed and sum(since_growth) >= config.hysteresis:
            scale = max(scale / 2, torch.tensor(config.min_loss_scale).item())
        if since_growth[-int(config.loss_scale_window) :] == [False] * int(
            config.loss_scale_window
        ):
            scale, since_growth = scale * 2, []
    return used


@given(configs, st.lists(st.booleans(), max_size=60))
def test_the_scale_follows_the_rule(config, overflows):
    assert scales(LossScale(config, CPU), overflows) == by_hand(config, overflows)


@given(configs, st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_a_restored_scale_goes_on_as_the_saved_one(config, before, after):
    original, restored = LossScale(config, CPU), LossScale(config, CPU)
    scales(original, before)
    state = original.state()
    assert state is not None
    restored.restore(
        from_plain(LossScaleState, json.loads(json.dumps(asdict(state))), "loss_scale")
    )
    assert scales(restored, after) == scales(original, after)


@pytest.mark.parametrize(
    "fault",
    [dict(scale=0.0), dict(scale=float("nan")), dict(scale=float("inf")), dict(good_steps=-1)],
)
def test_a_state_that_no_run_has_is_refused(fault):
    with pytest.raises(ValueError, match="loss_scale.[a-z_]+ must be"):
        from_plain(
            LossScaleState, {"scale": 8.0, "good_steps": 0, "patience": 1, **fault}, "loss_scale"
        )


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
def test_an_update_from_scaled_gradients_is_that_from_plain_ones(clip_grad):
    """To the bit: a power of two changes only exponents. The norm, clipping included, is that of
    the true gradients."""
    plain, scaled = Plain(), Plain()
    with tp_state(1) as parallel:
        config = OptimizerConfig(clip_grad=clip_grad)
        reference = Optimizer(plain, config, parallel)
        loss_scale = LossScale(LossScaleConfig(initial_loss_scale=2.0**20), CPU)
        optimizer = Optimizer(scaled, config, parallel, loss_scale=loss_scale)
        for number, rate in enumerate(RATES):
            reference.zero_grad()
            optimizer.zero_grad()
            plain.loss(number).backward()
            (scaled.loss(number) * loss_scale.scale).backward()
            assert torch.equal(optimizer.step(rate).grad_norm, reference.step(rate).grad_norm)
    assert same(plain.state_dict(), scaled.state_dict())
    assert optimizer.num_updates == len(RATES)
