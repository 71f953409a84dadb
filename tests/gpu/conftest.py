"""`device`: the CPU in every run, and the GPU under the mark `gpu`. `cuda`: the GPU alone."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param, 0)
