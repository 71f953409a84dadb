"""A stand-in for NVIDIA apex on a CPU: the kernel that the library uses, by torch.

It follows apex at commit 6424da3b (csrc/megatron/fused_weight_gradient_dense*.cu). It refuses the
calls that apex refuses, and those for which apex would read or write out of bounds. Arithmetic is
in float32, as in apex.
"""

from collections import Counter
from types import ModuleType, SimpleNamespace

import torch

from megatron_lite.training import apex_kernels
from tests.support.modules import provide

HALVES = (torch.float16, torch.bfloat16)


def install(patch):
    """Makes imports of apex and of its extension modules find the stand-in.

    Returns the number of calls of each kernel in this process. Ranks that are forked later inherit
    the stand-in.
    """
    calls, package = Counter(), ModuleType("apex")
    has_kernels_for(patch, "cpu")
    package.__path__ = []
    for name in ("apex", "apex.optimizers"):
        provide(patch, name, package)
    provide(patch, "fused_weight_gradient_mlp_cuda", kernels(calls))
    return calls


def has_kernels_for(patch, device_type):
    """Runs on a device of this type may use apex, and no others."""
    patch.setattr(apex_kernels, "DEVICE_TYPE", device_type)


def _check(condition, message):
    if not condition:
        raise RuntimeError(f"apex's stand-in: {message}")


def kernels(calls):
    def wgrad_gemm_accum_fp32(input, d_output, d_weight, /):
        calls["wgrad_gemm_accum_fp32"] += 1
        operands = input, d_output, d_weight
        rows, grad_rows = input.flatten(0, -2), d_output.flatten(0, -2)
        _check(d_weight.dtype == torch.float32, f"the sum is {d_weight.dtype}")
        _check(
            input.dtype == d_output.dtype and input.dtype in (torch.float32, *HALVES),
            f"operands are {input.dtype} and {d_output.dtype}",
        )
        _check(all(one.is_contiguous() for one in operands), "an operand is not contiguous")
        _check(
            d_weight.shape == (grad_rows.shape[1], rows.shape[1]) and len(rows) == len(grad_rows),
            f"{[tuple(one.shape) for one in operands]} are out of bounds",
        )
        d_weight.addmm_(grad_rows.t().float(), rows.float())

    return SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
