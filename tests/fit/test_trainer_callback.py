"""The callback fits a model with what the Trainer of transformers gives its callbacks.

The Trainer itself needs accelerate, which the tests do not install.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_callback import CallbackHandler

from megatron_lite.fit.trainer_callback import MemoryBudgetCallback
from tests.support.foreign_families import FAMILIES, tokens


def test_the_callback_fits_at_the_begin_and_removes_at_the_end(capsys):
    model: Any = FAMILIES["GPT-2"].build()
    rows = [{"input_ids": each, "labels": each} for each in tokens(0)]
    batches = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters())
    callback = MemoryBudgetCallback("1GiB")
    handler = CallbackHandler([callback], model, None, optimizer, None)
    handler.train_dataloader = batches
    state = torch.get_rng_state()
    handler.call_event("on_train_begin", None, None, None)
    assert torch.equal(torch.get_rng_state(), state)  # else training would draw other numbers
    assert callback.fit is not None and callback.fit.policies == {"transformer.h": "*:none"}
    assert capsys.readouterr().out.startswith("fits 1.000 GiB: a step takes ")
    small = MemoryBudgetCallback(f"{callback.fit.measured - 1}B")
    handler.callbacks = [small]
    handler.call_event("on_train_begin", None, None, None)
    assert "forward" in vars(model.transformer.h[0])
    handler.call_event("on_train_end", None, None, None)
    assert "forward" not in vars(model.transformer.h[0])
    assert small.fit is not None and not optimizer.state


def test_a_model_in_eval_mode_is_measured_in_train_mode():
    """As `from_pretrained` returns it, and as the Trainer has it until its first step."""
    rows = [{"input_ids": each, "labels": each} for each in tokens(0)]
    measured = []
    for mode in (True, False):
        model: Any = FAMILIES["GPT-2"].build().train(mode)
        model.gradient_checkpointing_enable()
        model.transformer.h[0].eval()  # a frozen part stays as it is outside of the fit
        callback = MemoryBudgetCallback("1GiB")
        handler = CallbackHandler(
            [callback], model, None, torch.optim.SGD(model.parameters()), None
        )
        handler.train_dataloader = torch.utils.data.DataLoader(rows, batch_size=2)
        handler.call_event("on_train_begin", None, None, None)
        assert callback.fit is not None
        measured.append(callback.fit.measured)
        assert model.training is mode and not model.transformer.h[0].training
        assert not model.is_gradient_checkpointing
    assert measured[0] == measured[1]
