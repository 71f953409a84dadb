"""Checkpoints of a run on a device."""

from dataclasses import replace

from tests.gpu.test_gpu import finish, tiny_run_on
from tests.support.runs import step_bytes


def test_a_background_save_holds_what_one_in_the_foreground_does(device, tmp_path):
    """The device goes on with the weights while their copies are written."""
    for name, async_save in (("foreground", False), ("background", True)):
        config = tiny_run_on(device, tmp_path / name, bf16=True, deterministic_mode=True)
        finish(
            replace(
                config,
                checkpoint=replace(config.checkpoint, save_interval=4, async_save=async_save),
            ),
            device,
        )
    for iteration in (4, 8, 12, 16, 20):
        files = [step_bytes(tmp_path / name, iteration) for name in ("foreground", "background")]
        assert files[0] == files[1] and len(files[0]) == 3
