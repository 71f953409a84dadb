"""A memory budget in the Trainers of transformers and TRL.

trainer.add_callback(MemoryBudgetCallback("70GiB"))
"""

import inspect
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback

from megatron_lite.parallel.torch_internals import forget_workers
from megatron_lite.recompute.contents import Contents, tensors_of
from megatron_lite.recompute.randomness import (
    GeneratorState,
    drawn_again,
    global_states,
    is_generator,
)

from .fitting import Fit
from .memory_fit import fit_memory_

LOOKED_AT = 8  # batches, of which the largest is measured


class MemoryBudgetCallback(TrainerCallback):
    """Puts the fastest policy that fits on the model when training begins, and takes it off at the
    end.

    What is measured is the Trainer's own step, with its loss and its wrappers, of the largest among
    its first 8 batches; under gradient accumulation two such steps. What the step draws, such as
    the length of texts that it generates, is that of the largest of nine draws. The policy takes
    the place of `activation_checkpointing`, which is turned off. The Trainer's counters and logs
    stay as they are.

    budget, layers_fqn: see `fit_memory_`. fit: the result, once training has begun.
    Raises ValueError for its other settings, which the Trainer makes.
    """

    def __init__(self, budget: str, **settings: Any) -> None:
        for name in settings.keys() - {"layers_fqn"}:
            raise ValueError(
                f"{name}: the Trainer makes the step and its batches, so only layers_fqn may stand "
                "here: leave it out, and set per_device_train_batch_size"
            )
        self._budget, self._settings = budget, settings
        self.fit: Fit | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fits the model."""
        trainer, model, loader = _trainer(), kwargs["model"], kwargs["train_dataloader"]
        # An iterator draws random numbers, and that of accelerate counts as the one of training.
        loader = getattr(loader, "base_dataloader", loader)
        with torch.random.fork_rng([]), drawn_again([*global_states(), *_generators(loader)]):
            first = islice(loader, LOOKED_AT)
            batch = max(first, key=lambda each: sum(one.numel() for one in tensors_of(each)))
        if isinstance(loader, DataLoader):
            forget_workers(loader)
        if self.fit:  # of a training that was interrupted
            self.fit.remove()
        data, told = loader.dataset, ""
        if isinstance(data, IterableDataset) and iter(data) is iter(data):
            told = f"the data can be read only once, so its first {LOOKED_AT} batches are lost\n"
        # TRL turns it on by default. Before transformers 5.23 it had the other name.
        name = "activation" if hasattr(model, "is_activation_checkpointing") else "gradient"
        switch = f"{name}_checkpointing"
        if was_on := getattr(model, f"is_{switch}", False):
            getattr(model, f"{switch}_disable")()
            told += f"{switch} is off in this training: the policy takes its place\n"
        held = Contents(objects=False)  # the Trainer's own numbers and lists
        held.add("", trainer)

        def step() -> None:
            with held.restored():  # TRL's generate in every n-th step alone
                trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
                for _ in range(min(2, args.gradient_accumulation_steps)):
                    # It may take entries out. A trainer that generates gets a list of samples.
                    trainer.training_step(trainer.model_wrapped, copy(batch), None)

        with drawn_again(state for _, state in held.generators):
            try:
                self.fit = fit_memory_(
                    model, self._budget, step=step, optimizer=kwargs["optimizer"], **self._settings
                )
            except BaseException:
                if was_on:
                    getattr(model, f"{switch}_enable")()
                raise
        if trainer.is_world_process_zero():
            print(f"{told}{self.fit}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the policy off."""
        if self.fit:
            self.fit.remove()


def _generators(loader: Any) -> list[GeneratorState]:
    """Returns the generators of a loader of samples, of its samplers and of its dataset."""
    found = [vars(loader)]
    for held in found:
        inside = map(held.get, ("sampler", "batch_sampler", "dataset"))
        found += [vars(one) for one in inside if hasattr(one, "__dict__")]
    return [GeneratorState.of(one) for held in found for one in held.values() if is_generator(one)]


def _trainer() -> Any:
    """Returns the Trainer that calls the callback, which only its frame has."""
    for found in inspect.stack(0):
        if isinstance(holder := found.frame.f_locals.get("self"), Trainer):
            return holder
    raise ValueError("MemoryBudgetCallback needs a Trainer of transformers: call fit_memory_ here")
