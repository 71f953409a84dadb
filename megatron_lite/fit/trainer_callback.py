"""A memory budget in the Trainers of transformers and TRL.

trainer.add_callback(MemoryBudgetCallback("70GiB"))
"""

import inspect
from itertools import islice
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from megatron_lite.fit.memory_fit import Fit, fit_memory_
from megatron_lite.recompute.contents import Contents, tensors_of
from megatron_lite.recompute.randomness import drawn_again, global_states

LOOKED_AT = 8  # batches, of which the largest is measured


class MemoryBudgetCallback(TrainerCallback):
    """Puts the fastest policy that fits on the model when training begins, and takes it off at the
    end.

    What is measured is the Trainer's own step, with its loss and its wrappers, of the largest among
    its first 8 batches; under gradient accumulation two such steps. The policy takes the place of
    `gradient_checkpointing`, which is turned off. The Trainer's counters and logs stay as they are.

    budget, settings: see `fit_memory_`. fit: the result, once training has begun.
    """

    def __init__(self, budget: str, **settings: Any) -> None:
        self._budget, self._settings = budget, settings
        self.fit: Fit | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fits the model."""
        trainer, model, loader = _trainer(), kwargs["model"], kwargs["train_dataloader"]
        # An iterator draws random numbers, and that of accelerate counts as the one of training.
        with torch.random.fork_rng([]), drawn_again(global_states()):
            first = islice(getattr(loader, "base_dataloader", loader), LOOKED_AT)
            batch = max(first, key=lambda each: sum(one.numel() for one in tensors_of(each)))
        told = ""
        if getattr(model, "is_gradient_checkpointing", False):  # TRL turns it on by default
            model.gradient_checkpointing_disable()
            told = "gradient_checkpointing is off in this training: the policy takes its place\n"
        held = Contents(objects=False)  # the Trainer's own numbers and lists
        held.add("", trainer)

        def step() -> None:
            for _ in range(min(2, args.gradient_accumulation_steps)):
                trainer.training_step(trainer.model_wrapped, dict(batch))

        with held.restored():
            trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
            self.fit = fit_memory_(
                model,
                self._budget,
                step=step,
                optimizer=getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"]),
                **self._settings,
            )
        if trainer.is_world_process_zero():
            print(f"{told}{self.fit}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the policy off."""
        if self.fit:
            self.fit.remove()


def _trainer() -> Any:
    """Returns the Trainer that calls the callback, which only its frame has."""
    for found in inspect.stack(0):
        if isinstance(holder := found.frame.f_locals.get("self"), Trainer):
            return holder
    raise ValueError("MemoryBudgetCallback needs a Trainer of transformers: call fit_memory_ here")
