"""AdamW by NVIDIA apex's FusedAdam: torch's up to rounding, in every layout, over skipped steps and
across checkpoints."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim.optimizer import Optimizer
from tests.optim.test_muon import Prescribed, state_of, step
from tests.optim.test_optimizer import CONFIG, RATES, Plain
from tests.support import apex
from tests.support.models import tp_state

# Both compute in float32, in another order: a few roundings of the weight, and of an update of the
# size of the learning rate.
ROUNDING = dict(rtol=2e-6, atol=1e-7)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return apex.install(monkeypatch)


def optimizer_of(model: nn.Module, parallel: Any, impl: str) -> Optimizer:
    rule = dict(optimizer_impl=impl) if impl in ("torch", "apex") else dict(optimizer=impl)
    return Optimizer(model, OptimizerConfig(**CONFIG, clip_grad=0.05, **rule), parallel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_masters_and_moments_are_torchs_up_to_rounding(
    calls: Counter[str], dtype: torch.dtype
) -> None:
    results = []
    for impl in ("torch", "apex"):
        with tp_state(1) as parallel:
            model = Plain(dtype)
            optimizer = optimizer_of(model, parallel, impl)
            for number, rate in enumerate(RATES):
                step(model, optimizer, number, rate)
            results.append(state_of(model, optimizer))
    assert calls[apex.ADAM] == 2 * len(RATES)  # groups
    for key, value in results[0].items():
        if dtype == torch.float32:
            torch.testing.assert_close(results[1][key], value, **ROUNDING, msg=key)
        elif (
            "/" in key
        ):  # a 16-bit weight may be rounded the other way, which changes what comes after it
            torch.testing.assert_close(
                results[1][key], value, rtol=torch.finfo(dtype).eps, atol=1e-3, msg=key
            )


@pytest.mark.parametrize("impl", ["torch", "apex", "muon", "sgd"])
@pytest.mark.parametrize(
    ("fault", "bad_steps"), [(math.inf, (0,)), (math.nan, (1, 2)), (math.inf, (0, 1, 3))]
)
def test_skipped_steps_change_nothing_and_do_not_count(
    calls: Counter[str], impl: str, fault: float, bad_steps: tuple[int, ...]
) -> None:
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


@pytest.mark.parametrize(
    ("writer", "reader"), [("torch", "apex"), ("apex", "torch"), ("apex", "apex")]
)
@pytest.mark.parametrize("last_is_skipped", [False, True])
def test_states_load_across_implementations(
    calls: Counter[str], writer: str, reader: str, last_is_skipped: bool
) -> None:
    """The reader may have made steps of its own before, a skipped one last. Early steps, where bias
    correction is large."""
    with tp_state(1) as parallel:
        first, second = Plain(), Plain()
        original = optimizer_of(first, parallel, writer)
        for number in range(2):
            step(first, original, number, 0.01)
        loaded = optimizer_of(second, parallel, reader)
        step(second, loaded, 5, 0.01)
        if last_is_skipped:
            loaded.buffer.grads["norm_weight"].fill_(math.inf)
            loaded.step(0.01)
        loaded.load(copy.deepcopy(original.states), num_updates=original.num_updates)
        second.load_state_dict(first.state_dict())
        for model, optimizer in ((first, original), (second, loaded)):
            for number in (6, 7):
                step(model, optimizer, number, 0.01)
        expected, actual = state_of(first, original), state_of(second, loaded)
    for key, value in expected.items():
        if writer == reader:
            assert torch.equal(actual[key], value), key
        torch.testing.assert_close(actual[key], value, **ROUNDING, msg=key)
