"""The FLOPs of kernels for which torch's counter has no formula: flash on a CPU, grouped products.

Those of flash are those of the kernels' matrix products, whose number of heads is the query's:
torch's own formulas refuse grouped heads in some releases.
"""

import torch

import megatron_lite.tensor_parallel.grouped_linear  # noqa: F401

CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _flash(query, key, value, *_, **__):
    """Scores, then the weighted sum of the values. Shapes [b, heads, s, d]."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (width + value[3])


def _flash_backward(grad, query, key, value, *_, **__):
    """The scores again, then the gradients of value, weights, query and key."""
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[2] * (3 * width + 2 * value[3])


def _grouped(left, right, *_, **__):
    """Rows [n, k] times one of the matrices [E, k, m], or [k, n] times [n, m] in groups of n."""
    return 2 * left[0] * left[1] * right[-1]


FORMULAS = {
    CPU_FLASH: _flash,
    CPU_FLASH_BACKWARD: _flash_backward,
    torch.ops.aten._grouped_mm: _grouped,
    torch.ops.megatron_lite.grouped_product: _grouped,
}
