"""The settings of torch that a replay repeats are those of its forward."""

import torch

from megatron_lite.recompute import surroundings
from megatron_lite.recompute.surroundings import Surroundings


def test_settings_are_read_when_torch_has_put_its_attention_kernels_in_order(monkeypatch):
    """On a GPU torch puts cuDNN's kernel first, at its first call. Read before it, the order would
    give the replay another kernel (tests/gpu/test_gpu_any_model.py has the real case)."""
    order, card = ["flash"], torch.device("cuda", 1)  # not the current one
    attention = "torch.nn.functional.scaled_dot_product_attention"
    monkeypatch.setattr(attention, lambda heads, *_: order.insert(0, heads))
    monkeypatch.setattr(torch, "zeros", lambda *_, device, **__: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(surroundings, "attention_order", lambda: order)
    assert (card, "flash") in Surroundings.now({card}).flags


def test_precisions_of_float32_are_restored(monkeypatch):
    before = Surroundings.now()
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32", raising=False)
    then = Surroundings.now()
    monkeypatch.undo()
    with then.restored():
        assert Surroundings.now() == then
    assert Surroundings.now() == before
