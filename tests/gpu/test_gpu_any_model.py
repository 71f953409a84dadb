"""`apply_policy_` on a device, in a fresh process: torch orders its attention kernels at the first
call, and the first replay uses that of the forward."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from megatron_lite.api import apply_policy_

device, policy = sys.argv[1:]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(128, 3 * 128)

    def forward(self, x):
        heads = self.qkv(x).view(2, 256, 3, 2, 64).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + attended.transpose(1, 2).reshape(2, 256, 128)


model = nn.Module()
model.layers = nn.ModuleList([Attention(), Attention()])
model.to(device, torch.bfloat16)
apply_policy_(model, layers_fqn="layers", policy=policy)
x = torch.randn(2, 256, 128, device=device, dtype=torch.bfloat16)
for layer in model.layers:
    x = layer(x)
x.float().square().sum().backward()
"""


@pytest.mark.long
def test_the_first_replay_of_a_process_has_the_kernels_of_its_forward(device):
    policies = ("*:full", "*:ops(matmul)", "*:ops(attention)")
    for policy in policies if device.type == "cuda" else policies[:1]:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, device.type, policy],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{policy}: {done.stderr}"
