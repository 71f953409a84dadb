"""The storages of tensors, by the addresses under which the product's meters know them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Returns the addresses of the tensors' storages. A storage keeps its address when its memory
    is resized."""
    return {tensor.untyped_storage()._cdata for tensor in tensors}
