"""The sizes from which oneDNN computes a product, made small for a small test."""

from __future__ import annotations

import pytest

from megatron_lite.config import large_products
from megatron_lite.parallel import products
from megatron_lite.training import processor


def product_sizes(patch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Gives LEAST_MULTIPLICATIONS, TOKENS, ROWS or COLUMNS these values wherever they are read."""
    for name, size in sizes.items():
        for module in (large_products, products, processor):
            if hasattr(module, name):
                patch.setattr(module, name, size)
