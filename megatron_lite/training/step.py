"""One training step: accumulate gradients over micro-batches, reduce, clip, update."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.model.gpt import GPTModel
from megatron_lite.optim.adamw import Optimizer
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.batches import MicroBatch
from megatron_lite.training.observe import Observer, plain


class TrainingError(RuntimeError):
    """A run that cannot go on, through no fault of its input. Ends with exit status 1 and its message."""


class StepResult(NamedTuple):
    """0-d tensors on the device, the same on every rank: reading them is left to the log.

    loss: mean over the global batch. grad_norm: global, before clipping. skipped: 1.0 where no weight was changed.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor


def train_step(model: GPTModel, optimizer: Optimizer, batches: Iterable[MicroBatch], *, num_microbatches: int,
               learning_rate: float, parallel: ParallelState, observer: Observer = plain) -> StepResult:
    """Runs `num_microbatches` micro-batches forward and backward and updates the weights once.

    The loss is the mean over micro-batches and data-parallel ranks, so that gradients are those of the global batch.
    observer: runs the first micro-batch forward and backward.
    """
    model.train()
    optimizer.zero_grad()
    share = 1.0 / (num_microbatches * parallel.dp_size)
    total = torch.zeros((), device=parallel.device)
    for batch in batches:
        total += observer(partial(_loss, model, batch, share))
        observer = plain
    update = optimizer.step(learning_rate)
    return StepResult(all_reduce_(total, parallel.dp_group), update.grad_norm, update.skipped)


def _loss(model: GPTModel, batch: MicroBatch, share: float) -> Tensor:
    return model.loss(batch.tokens, batch.labels).mean() * share
