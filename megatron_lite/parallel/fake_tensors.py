"""Tensors of torch's FakeTensorMode, which have shapes and no values: the tensors of a dry run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

Part = TypeVar("Part")
# The second part finds the tensors of the first one still in use, and each later one is like the
# second.
FIRST_PARTS = 3


def is_fake(tensor: Tensor) -> bool:
    """Tells whether the tensor is one of torch's FakeTensorMode."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(tensor, fake.FakeTensor)


def unlike_parts(parts: Sequence[Part], tensor: Tensor) -> Sequence[Part]:
    """Returns the parts of a tensor that a loop must visit, which are all of them.

    A fake tensor has no values to compute, so the loop visits only the first parts and the last
    one, which may be shorter. Its memory is the same. It is for loops that write each part's result
    into memory that was allocated before.
    """
    if is_fake(tensor) and len(parts) > FIRST_PARTS:
        return [*parts[:FIRST_PARTS], parts[-1]]
    return parts
