"""float16 and its loss scale on a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_lite.config.optimizer_settings import LossScaleConfig, OptimizerConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.optim.loss_scale import LossScale
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState
from tests.gpu.test_gpu import (
    ARCHITECTURES,
    CPU,
    all_equal,
    attention_and_gradients,
    batch_on,
    finish,
    gradients,
    on,
    one_step,
    relative_error,
    rows_of,
    tiny_run_on,
    weights_and_states,
)
from tests.support.models import build_tiny_model, tiny_config


def scaled_step(
    device: torch.device, config: LossScaleConfig
) -> tuple[GPTModel, Optimizer, ParallelState]:
    parallel = on(device)
    model = build_tiny_model(
        tiny_config(hidden_dropout=0.1, attention_dropout=0.1), parallel, dtype=torch.float16
    )
    return (
        model,
        Optimizer(model, OptimizerConfig(), parallel, loss_scale=LossScale(config, device)),
        parallel,
    )


def test_fp16_stays_near_float64(device: torch.device) -> None:
    """fp16 rounds at 5e-4: each weight gradient may be off by a few of those, the loss by one."""
    for name, fields in ARCHITECTURES.items():
        config = tiny_config(**fields)
        reference, result = (
            gradients(config, CPU, torch.float64),
            gradients(config, device, torch.float16),
        )
        assert relative_error(result.loss, reference.loss) < 2e-3, name
        for parameter, grad in reference.grads.items():
            if parameter.endswith("weight") and grad.dim() > 1:
                assert relative_error(result.grads[parameter], grad) < 0.02, (name, parameter)


def test_fp16_attention_agrees_with_float64(device: torch.device) -> None:
    reference = attention_and_gradients("unfused", CPU, torch.float64)
    for backend in ("flash", "unfused"):
        for ours, exact in zip(
            attention_and_gradients(backend, device, torch.float16), reference, strict=True
        ):
            assert relative_error(ours.detach().cpu().double(), exact.detach()) < 4e-3, backend


def test_a_scale_that_is_too_large_falls_until_steps_count_and_the_loss_falls_too(
    device: torch.device,
) -> None:
    model, optimizer, parallel = scaled_step(device, LossScaleConfig(loss_scale_window=1000.0))
    results = [one_step(model, optimizer, parallel, batch_on(device)) for _ in range(40)]
    scales = [result.loss_scale.item() for result in results]
    assert scales[:2] == [2.0**32] * 2 and scales == sorted(scales, reverse=True)
    assert 2 < sum(result.skipped.item() for result in results) < 30
    assert results[-1].loss.item() < results[0].loss.item() - 0.5


def test_a_scaled_step_never_waits_for_the_gpu_whether_or_not_it_overflows(
    cuda: torch.device,
) -> None:
    model, optimizer, parallel = scaled_step(
        cuda, LossScaleConfig(initial_loss_scale=1024.0, hysteresis=1)
    )
    batch = batch_on(cuda)
    one_step(model, optimizer, parallel, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fine = one_step(model, optimizer, parallel, batch)
        next(model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        overflowed = optimizer.step(1e-2)
        after = one_step(model, optimizer, parallel, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [step.skipped.item() for step in (fine, overflowed, after)] == [0.0, 1.0, 0.0]
    assert (fine.loss_scale.item(), after.loss_scale.item()) == (1024.0, 512.0)


def test_a_resumed_fp16_run_ends_as_an_uninterrupted_one(
    device: torch.device, tmp_path: Path
) -> None:
    """The scale goes up and down on the way."""
    scaling = LossScaleConfig(initial_loss_scale=2.0**24, loss_scale_window=3.0)
    whole, part = (
        replace(
            tiny_run_on(
                device,
                tmp_path / name,
                fp16=True,
                deterministic_mode=True,
                exit_interval=exit_interval,
            ),
            loss_scaling=scaling,
        )
        for name, exit_interval in (("whole", None), ("parts", 10))
    )
    uninterrupted = finish(whole, device)
    assert finish(part, device).progress.iteration == 10
    resumed = finish(
        replace(
            part,
            checkpoint=replace(part.checkpoint, load=part.checkpoint.save),
            training=replace(part.training, exit_interval=None),
        ),
        device,
    )
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    assert len({row["loss_scale"] for row in rows_of(tmp_path / "whole")}) > 3
    assert all_equal(
        weights_and_states(resumed.model, resumed.optimizer),
        weights_and_states(uninterrupted.model, uninterrupted.optimizer),
    )
