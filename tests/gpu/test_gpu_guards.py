"""What watches over a run, on a device: hashes, the running mean of the loss, the probe of a slow
GPU."""

import torch

from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.parallel.tensor_hash import quick_hash
from megatron_lite.supervision.slow_rank import SlowRanks
from tests.gpu.test_gpu import on


def test_a_hash_on_the_device_is_that_on_the_cpu(device):
    """Of tensors that are one block on both: a block of a GPU is longer (config/row_blocks.py)."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1,), (7, 3), (200, 257)):
            tensor = torch.randn(shape).to(dtype)
            assert quick_hash(tensor.to(device)).item() == quick_hash(tensor).item()


def test_the_probe_of_a_slow_gpu_takes_time_and_names_nobody_alone(cuda):
    ranks = SlowRanks(LoggingConfig(log_straggler=True), on(cuda))
    with ranks.step(logged=True):
        pass
    assert ranks.lines() == [] and ranks._probe is not None and ranks._probe.ms() > 0.0
