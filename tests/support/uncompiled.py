"""Compiled kernels without a compiler."""

from __future__ import annotations

import pytest

from megatron_lite.parallel import compiled


def uncompiled_kernels(patch: pytest.MonkeyPatch) -> None:
    """Makes every kernel the function itself, which no compiler changes."""
    patch.setattr(compiled, "_compiled", lambda function, tensors: function)
    patch.setattr(compiled, "missing_compiler", lambda: None)
