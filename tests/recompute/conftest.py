"""Random-number streams for the tests of this folder."""

import pytest
import torch

from megatron_lite.parallel.rng import RngStreams


@pytest.fixture
def rng():
    """Streams of the CPU."""
    return RngStreams(torch.device("cpu"), seed=3)
