"""float16 and its loss scale on a device."""

import torch

from megatron_lite.config.optimizer_settings import LossScaleConfig, OptimizerConfig
from megatron_lite.optim.loss_scale import LossScale
from megatron_lite.optim.optimizer import Optimizer
from tests.gpu.test_gpu import batch_on, check_resumed, on, one_step
from tests.support.models import build_tiny_model, tiny_config


def scaled_step(device, config):
    parallel = on(device)
    model = build_tiny_model(
        tiny_config(hidden_dropout=0.1, attention_dropout=0.1), parallel, dtype=torch.float16
    )
    return (
        model,
        Optimizer(model, OptimizerConfig(), parallel, loss_scale=LossScale(config, device)),
        parallel,
    )


def test_a_scaled_step_never_waits_for_the_gpu_whether_or_not_it_overflows(cuda):
    model, optimizer, parallel = scaled_step(
        cuda, LossScaleConfig(initial_loss_scale=1024.0, hysteresis=1)
    )
    batch = batch_on(cuda)
    one_step(model, optimizer, parallel, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fine = one_step(model, optimizer, parallel, batch)
        next(model.parameters()).grad.fill_(torch.inf)
        overflowed = optimizer.step(1e-2)
        after = one_step(model, optimizer, parallel, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    updates = (fine.update, overflowed, after.update)
    assert [update.skipped.item() for update in updates] == [0.0, 1.0, 0.0]
    assert (fine.loss_scale.item(), after.loss_scale.item()) == (1024.0, 512.0)


def test_a_resumed_fp16_run_ends_as_an_uninterrupted_one(device, tmp_path):
    """The scale goes up and down on the way."""
    scaling = LossScaleConfig(initial_loss_scale=2.0**24, loss_scale_window=3.0)
    rows = check_resumed(device, tmp_path, fp16=True, loss_scaling=scaling)
    assert len({row["loss_scale"] for row in rows}) > 3
