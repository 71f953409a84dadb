"""The loss scale against Megatron's rule, written down once more and as megatron-core has it."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.loss_scaling import LossScaleConfig
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim.loss_scale import LossScale, LossScaleState
from megatron_lite.optim.optimizer import Optimizer
from tests.optim.test_optimizer import RATES, Plain
from tests.support.models import tp_state

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


def scales(loss_scale: LossScale, overflows: list[bool]) -> list[float]:
    """The scale of each step."""
    used = []
    for overflowed in overflows:
        used.append(loss_scale.scale.item())
        loss_scale.update(torch.tensor(float(overflowed)))
    return used


def by_hand(config: LossScaleConfig, overflows: list[bool]) -> list[float]:
    """The same from counts over the whole past, without trackers."""
    scale, used = config.initial_loss_scale, []
    since_growth: list[bool] = []
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
def test_the_scale_follows_the_rule(config: LossScaleConfig, overflows: list[bool]) -> None:
    assert scales(LossScale(config, CPU), overflows) == by_hand(config, overflows)


@pytest.mark.filterwarnings("ignore")  # its imports warn of packages that it can do without
def test_the_scale_is_that_of_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose tensors are put on the CPU."""
    grad_scaler = pytest.importorskip("megatron.core.optimizer.grad_scaler")
    monkeypatch.setattr(
        grad_scaler,
        "torch",
        SimpleNamespace(
            float=torch.float32,
            max=torch.max,
            tensor=lambda values, dtype, device: torch.tensor(values, dtype=dtype),
        ),
    )
    draw = random.Random(3)
    for _ in range(60):
        config = LossScaleConfig(
            initial_loss_scale=2.0 ** draw.randint(0, 34),
            min_loss_scale=draw.choice((1.0, 0.3)),
            loss_scale_window=draw.randint(1, 9),
            hysteresis=draw.randint(1, 4),
        )
        oracle = grad_scaler.DynamicGradScaler(
            config.initial_loss_scale,
            config.min_loss_scale,
            2.0,
            0.5,
            config.loss_scale_window,
            config.hysteresis,
        )
        ours, share = LossScale(config, CPU), draw.random()
        for _ in range(150):
            assert (
                ours.scale.item() == oracle.scale.item()
                and ours.inverse().item() == oracle.inv_scale.item()
            )
            overflowed = draw.random() < share
            ours.update(torch.tensor(float(overflowed)))
            oracle.update(overflowed)


def test_by_hand_what_the_defaults_do() -> None:
    """The second overflow is the first to count, and from then on each does, until a thousand good
    steps have passed."""
    overflows = [True, True, False, True] + [False] * 1000 + [True, True]
    used = scales(LossScale(LossScaleConfig(), CPU), [*overflows, False])
    assert used[:5] == [2.0**32, 2.0**32, 2.0**31, 2.0**31, 2.0**30]
    assert used[1003:] == [2.0**30, 2.0**31, 2.0**31, 2.0**30]


def test_a_constant_scale_stays_and_has_no_state() -> None:
    constant = LossScale(LossScaleConfig(loss_scale=24.0), CPU)
    assert scales(constant, [True, False] * 9) == [24.0] * 18
    constant.restore(LossScaleState(scale=8.0, good_steps=1, patience=1))
    assert (constant.scale.item(), constant.minimum, constant.state()) == (24.0, 24.0, None)


@given(configs, st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_a_restored_scale_goes_on_as_the_saved_one(
    config: LossScaleConfig, before: list[bool], after: list[bool]
) -> None:
    original, restored = LossScale(config, CPU), LossScale(config, CPU)
    scales(original, before)
    state = original.state()
    assert state is not None
    restored.restore(LossScaleState.from_plain(json.loads(json.dumps(asdict(state)))))
    assert scales(restored, after) == scales(original, after)


@pytest.mark.parametrize(
    "fault",
    [dict(scale=0.0), dict(scale=float("nan")), dict(scale=float("inf")), dict(good_steps=-1)],
)
def test_a_state_that_no_run_has_is_refused(fault: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no state of a loss scale"):
        LossScaleState.from_plain({"scale": 8.0, "good_steps": 0, "patience": 1, **fault})


def test_the_scale_of_a_step_is_not_written_into() -> None:
    """Its figures are read after the next step has begun."""
    loss_scale = LossScale(LossScaleConfig(initial_loss_scale=8.0, hysteresis=1), CPU)
    first = loss_scale.scale
    loss_scale.update(torch.tensor(1.0))
    assert (first.item(), loss_scale.scale.item()) == (8.0, 4.0)


@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
def test_an_update_from_scaled_gradients_is_that_from_plain_ones(clip_grad: float) -> None:
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
    assert all(
        torch.equal(value, scaled.state_dict()[name]) for name, value in plain.state_dict().items()
    )
    assert optimizer.num_updates == len(RATES)
