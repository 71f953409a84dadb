"""The FLOPs of the flash kernels of a CPU, for which torch's counter has no formula.

They are those of the kernels' matrix products, whose number of heads is the query's: torch's own
formulas refuse grouped heads in some releases.
"""

from __future__ import annotations

from typing import Any

import torch

CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _flash(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    """Scores, then the weighted sum of the values. Shapes [b, heads, s, d]."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (width + value[3])


def _flash_backward(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any
) -> int:
    """The scores again, then the gradients of value, weights, query and key."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (3 * width + 2 * value[3])


FORMULAS = {CPU_FLASH: _flash, CPU_FLASH_BACKWARD: _flash_backward}
