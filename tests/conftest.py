"""Settings of every test: one thread before any fork, and no CUDA outside the tests marked `gpu`."""

from __future__ import annotations

import os

import pytest
import torch

# run_ranks forks this process. A fork hangs in its first parallel loop once the parent has started OpenMP's threads.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """`pytest -m gpu` sees the GPUs. Any other run hides them: CUDA does not survive the forks, and the CPU is the subject."""
    if config.getoption("markexpr", default="").strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` where no GPU is visible."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device (benchmarks/gpu.sh)"))
