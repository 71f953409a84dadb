"""torch.addmm with `out_dtype` as CUDA has it, on a CPU, which has none."""

from collections import Counter

import torch

from megatron_lite.parallel import weight_gradient
from megatron_lite.training import apex_kernels


def install(patch):
    """Makes sums of weight gradients use it. Returns how often it was called, by "first" and
    "later" of a sum. It refuses what CUDA refuses, and sums in float32."""
    calls = Counter()
    plain = torch.addmm

    def addmm(total, left, right, **options):
        out_dtype = options.pop("out_dtype", None)
        if out_dtype is None:
            return plain(total, left, right, **options)
        assert left.dtype == right.dtype and left.dtype.itemsize == 2
        assert total.dtype == out_dtype == options["out"].dtype == torch.float32
        calls["later" if options["beta"] else "first"] += 1
        return plain(total, left.float(), right.float(), **options)

    patch.setattr(torch, "addmm", addmm)
    for owner in (weight_gradient, apex_kernels):
        patch.setattr(owner, "adds_unrounded", lambda device, dtype: True)
    return calls
