"""Whether 16-bit matrix products are torch's own, whatever processor a test runs on."""

from __future__ import annotations

import pytest

from megatron_lite.parallel import cpu_facts
from megatron_lite.training import processor


def multiplies_16_bits(patch: pytest.MonkeyPatch, fast: bool) -> None:
    """Makes this process, and those that it forks, take the processor for one on which torch's
    16-bit products are fast, or not: then they are computed in float32."""
    patch.setattr(cpu_facts, "lacks_16_bit_products", lambda: not fast)
    gains = {"bf16": not fast, "fp16": not fast}
    chosen = {name: lambda _, gain=gain: gain for name, gain in gains.items()}
    patch.setattr(processor, "GAINS", {**processor.GAINS, **chosen})
