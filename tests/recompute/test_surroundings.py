"""The settings of torch that a replay repeats are those of its forward."""

import pytest
import torch

from megatron_lite.recompute import surroundings
from megatron_lite.recompute.surroundings import Surroundings


def test_settings_are_read_when_torch_has_put_its_attention_kernels_in_order(monkeypatch):
    """On a GPU torch puts cuDNN's kernel first, at its first call. Read before it, the order would
    give the replay another kernel (tests/gpu/test_gpu_any_model.py has the real case)."""
    order = ["flash"]
    monkeypatch.setattr(surroundings, "_settle_attention", lambda kind: order.insert(0, kind))
    monkeypatch.setattr(surroundings, "attention_order", lambda: order)
    assert ("cuda", "flash") in Surroundings.now({"cuda"}).flags


@pytest.mark.skipif(not hasattr(torch.backends, "flags"), reason="torch has them since 2.9")
def test_precisions_of_float32_are_restored():
    before = Surroundings.now()
    with torch.backends.flags(fp32_precision="tf32"):
        then = Surroundings.now()
    with then.restored():
        assert Surroundings.now() == then != before
    assert Surroundings.now() == before
