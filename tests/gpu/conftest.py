"""`device`: the CPU in every run, and the GPU under the mark `gpu`. `cuda`: the GPU alone."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it at the first matmul

# On a CPU the others only try themselves.
IN_EVERY_RUN = (
    "test_gradients_stay_near_float64",
    "test_all_kernels_of_attention_agree",
    "test_attention_over_three_ranks_is_that_of_one",
    "test_collectives_of_groups_of_one_change_nothing",
)


def pytest_collection_modifyitems(items):
    for item in items:
        other = item.path.parent.name == "gpu" and item.originalname not in IN_EVERY_RUN
        if other and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.weekly)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request):
    return torch.device(request.param, 0)
