"""A memory budget in the Trainers of transformers and TRL.

trainer.add_callback(MemoryBudgetCallback("70GiB"))
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback

from megatron_lite.fit.memory_fit import Fit, fit_memory_
from megatron_lite.recompute.randomness import GLOBAL, GeneratorState, drawn_again


class MemoryBudgetCallback(TrainerCallback):
    """Puts the fastest policy that fits on the model when training begins, and takes it off at the
    end.

    The step that is measured is the model's own loss of the first batch of the data loader. The
    policy takes the place of `gradient_checkpointing`, which is turned off.

    budget, settings: see `fit_memory_`. fit: the result, once training has begun.
    """

    def __init__(self, budget: str, **settings: Any) -> None:
        self._budget, self._settings = budget, settings
        self.fit: Fit | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fits the model."""
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        device = next(model.parameters()).device
        # An iterator draws random numbers, and that of accelerate counts as the one of training.
        with torch.random.fork_rng([]), drawn_again(map(GeneratorState.of, GLOBAL)):
            first = next(iter(getattr(loader, "base_dataloader", loader)))
        batch = {name: value.to(device) for name, value in first.items()}
        if getattr(model, "is_gradient_checkpointing", False):  # TRL turns it on by default
            model.gradient_checkpointing_disable()
            print("gradient_checkpointing is off in this training: the policy takes its place")
        modes = [(module, module.training) for module in model.modules()]
        model.train()  # as the Trainer does at its first step: a loaded model is in eval mode
        try:
            self.fit = fit_memory_(
                model,
                self._budget,
                step=lambda: model(**batch).loss.backward(),
                optimizer=getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"]),
                **self._settings,
            )
        finally:
            for module, mode in modes:
                module.training = mode
        print(self.fit)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the policy off."""
        if self.fit is not None:
            self.fit.remove()
