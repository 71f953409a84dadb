"""float16 and its loss scale on a device."""

import torch

from megatron_lite.config.optimizer_settings import LossScaleConfig
from megatron_lite.optim.loss_scale import LossScale
from tests.gpu.test_gpu import batch_on, check_resumed, no_waits, one_step, small_step


def test_a_scaled_step_never_waits_for_the_gpu_whether_or_not_it_overflows(cuda):
    scale = LossScale(LossScaleConfig(initial_loss_scale=1024.0, hysteresis=1), cuda)
    model, optimizer, parallel = small_step(cuda, torch.float16, scale)
    batch = batch_on(cuda)
    one_step(model, optimizer, parallel, batch)
    with no_waits():
        fine = one_step(model, optimizer, parallel, batch)
        next(model.parameters()).grad.fill_(torch.inf)
        overflowed = optimizer.step(1e-2)
        after = one_step(model, optimizer, parallel, batch)
    updates = (fine.update, overflowed, after.update)
    assert [update.skipped.item() for update in updates] == [0.0, 1.0, 0.0]
    assert (fine.loss_scale.item(), after.loss_scale.item()) == (1024.0, 512.0)


def test_a_resumed_fp16_run_ends_as_an_uninterrupted_one(device, tmp_path):
    """The scale goes up and down on the way."""
    scaling = dict(initial_loss_scale=2.0**24, loss_scale_window=3.0)
    rows = check_resumed(device, tmp_path, fp16=True, **scaling)
    assert len({row["loss_scale"] for row in rows}) > 3
