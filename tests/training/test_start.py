"""The start of a run: what it does not import, and the memory of a large model's rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import MOCK, ROOT, SMALL_RUN, environment
from tests.support.limits import HANG_S

# Each takes a large part of a second, and such a run needs none of them. torch.autograd.backward
# imports sympy once a replay of a whole layer or of core attention gives it a gradient.
SLOW_IMPORTS = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor")
SLOW_IMPORTS += ("tensorboard", "transformers", "scipy", "matplotlib", "wandb")


def python(program: str) -> str:
    """The standard output of a program that must not fail."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_with_a_log_and_a_checkpoint_imports_nothing_slow(tmp_path: Path) -> None:
    words = [*SMALL_RUN, *MOCK, "--train-iters", "2"]
    words += ["--save", str(tmp_path / "saved"), "--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    words += ["--recompute-policy", "*:pointwise", "--eval-iters", "0"]
    found = python(
        "import sys\n"
        "from pretrain_gpt import main\n"
        f"assert main({words!r}) == 0\n"
        f"print('slow:', *[name for name in {SLOW_IMPORTS!r} if name in sys.modules])"
    )
    assert found.splitlines()[-1].split() == ["slow:"]


@pytest.mark.long
def test_a_rank_of_a_model_of_70_billion_parameters_never_holds_a_whole_weight() -> None:
    """Under a limit of the address space, in which one whole matrix of the MLP has no room."""
    printed = python("""if True:
        import resource
        import torch
        from megatron_lite.api import run_config
        from megatron_lite.parallel.simulated import SimulatedTensors, simulated_rank
        from megatron_lite.training.build_trainer import build_stages

        config = run_config(
            preset="llama3-70b", seq_length=8192, micro_batch_size=1, bf16=True,
            tensor_model_parallel_size=8, pipeline_model_parallel_size=80,
        )
        with simulated_rank(
            config.parallel, SimulatedTensors(), rank=8 * 40 + 3, world_size=640, seed=1
        ) as parallel:
            torch.zeros(8, 8) @ torch.zeros(8, 8)  # what the libraries map at their first use
            pages = int(open("/proc/self/statm").read().split()[0])
            most = pages * resource.getpagesize() + 1_200_000_000
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            try:
                torch.empty(57344, 8192)
            except RuntimeError:
                pass
            else:
                raise AssertionError("the limit does not keep a whole weight out")
            (stage,) = build_stages(config, parallel)
            print(sum(weight.numel() for weight in stage.parameters()))
    """)
    h, ffn, heads, groups = 8192, 28672, 64, 8
    matrices = h * (h + 2 * groups * h // heads) + h * h + 3 * h * ffn
    assert int(printed) == matrices // 8 + 2 * h
