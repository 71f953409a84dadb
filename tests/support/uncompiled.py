"""Compiled kernels without a compiler, and the mark of tests that need one."""

import pytest
import torch

from megatron_lite.parallel import compiled

LACKS = compiled.missing_compiler(torch.device("cpu"))
NEEDS_COMPILER = pytest.mark.skipif(LACKS is not None, reason=f"inductor {LACKS}")


def uncompiled_kernels(patch):
    """Makes every kernel the function itself, which no compiler changes.

    Several results are a list, as those of torch's compiler are.
    """

    def as_compiled(function, _):
        def graph(*tensors):
            results = function(*tensors)
            return list(results) if isinstance(results, tuple) else results

        return graph

    patch.setattr(compiled, "_compiled", as_compiled)
    patch.setattr(compiled, "missing_compiler", lambda device: None)
