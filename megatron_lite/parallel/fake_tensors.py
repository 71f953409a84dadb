"""Tensors of torch's FakeTensorMode, which have shapes and no values: the tensors of a dry run."""

from __future__ import annotations

import sys

from torch import Tensor


def is_fake(tensor: Tensor) -> bool:
    """Tells whether the tensor is one of torch's FakeTensorMode."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)
