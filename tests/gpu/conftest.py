"""`device`: the CPU in every run, and the GPU under the mark `gpu`. `cuda`: the GPU alone."""

import pytest
import torch

# On a CPU other tests have what these find: they only try themselves.
WEEKLY = (
    "test_a_resumed_run_ends_as_an_uninterrupted_one",
    "test_a_resumed_fp16_run_ends_as_an_uninterrupted_one",
    "test_a_background_save_holds_what_one_in_the_foreground_does",
    "test_no_store_changes_a_gradient",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.partition("[")[0] in WEEKLY and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.weekly)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def cuda(request):
    return torch.device(request.param, 0)
