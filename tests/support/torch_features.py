"""Marks for tests of what only newer releases of torch have. setup.py names the oldest release.

The library works without these features, in another way or with more memory.
"""

import pytest
import torch

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
NEEDS_GRAD_DTYPE = pytest.mark.skipif(
    not HAS_GRAD_DTYPE,
    reason="this torch has no Tensor.grad_dtype, a float32 gradient of a 16-bit parameter",
)
NEEDS_MUON = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="this torch has no torch.optim.Muon to compare with"
)
