"""The FLOPs of the flash kernels of a CPU, for which torch's counter has no formula."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

# They are given the formulas of their siblings on CUDA.
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FORMULAS = {
    CPU_FLASH: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
    CPU_FLASH_BACKWARD: lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(
        grad, query, key, value
    ),
}
