"""Marks for tests of what only newer releases of torch have. setup.py names the oldest release.

The library works without these features, in another way or with more memory.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from megatron_lite.parallel.torch_internals import cpu_attention_takes_groups

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
HAS_CUSTOM_COLLECTIVES = hasattr(FSDPModule, "set_custom_all_gather")
NEEDS_GRAD_DTYPE = pytest.mark.skipif(
    not HAS_GRAD_DTYPE,
    reason="this torch has no Tensor.grad_dtype, a float32 gradient of a 16-bit parameter",
)
NEEDS_MUON = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="this torch has no torch.optim.Muon to compare with"
)
NEEDS_CUSTOM_COLLECTIVES = pytest.mark.skipif(
    not HAS_CUSTOM_COLLECTIVES,
    reason="this torch's FSDP2 has no custom collectives, which bound its buffers",
)
NEEDS_GROUPED_KERNEL = pytest.mark.skipif(
    not cpu_attention_takes_groups(),
    reason="this torch's attention kernel for CPUs takes no query groups: keys are repeated",
)
