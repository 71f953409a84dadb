"""The buffers through which gloo's operands go, made small for a small test."""

from __future__ import annotations

import pytest

from megatron_lite.parallel import collectives


def staged_in(patch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Gathers and sums into a buffer go through gloo in stretches of this many bytes."""
    patch.setattr(collectives, "STAGING_BYTES", num_bytes)
