"""One training step: accumulate gradients over micro-batches, reduce, clip, update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.optim.adamw import Optimizer
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.training.batches import Batches
from megatron_lite.training.observe import Observer
from megatron_lite.training.runner import StageRunner


class TrainingError(RuntimeError):
    """A run that cannot go on, through no fault of its input. Ends with exit status 1 and its message."""


class StepResult(NamedTuple):
    """Tensors on the device: reading them is left to the log. The first four are 0-d and the same on every rank.

    loss: mean over the global batch. grad_norm: global, before clipping. skipped: 1.0 where no weight was changed. loss_scale:
    the one used, 1.0 where the loss is not scaled. mean_loss: what the loss was compared with, if with anything.
    traces: what this rank has of what came into the loss and the norm, for finding where a NaN came from.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor
    mean_loss: Tensor | None
    traces: Traces


class Traces(NamedTuple):
    """own_loss: this rank's part of the loss. own_grad_norm: of its gradients before the sum over `data_group`, where they are
    watched. piece_norms: of the gradients of its pieces after that sum."""

    own_loss: Tensor
    own_grad_norm: Tensor | None
    piece_norms: Tensor


def train_step(runner: StageRunner, optimizer: Optimizer, batches: Batches, *, learning_rate: float,
               observer: Observer | None = None) -> StepResult:
    """Runs all micro-batches forward and backward and updates the weights once.

    The loss is the mean over micro-batches and over the ranks of `data_group`, which hold equally many tokens, so that gradients
    are those of the global batch.
    observer: looks at the first micro-batch.
    """
    optimizer.zero_grad()
    parallel = runner.parallel
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.scale
    loss = runner.train(batches, share=1.0 / (len(batches) * parallel.data_size), observer=observer or Observer(),
                        loss_scale=scale, before_last=optimizer.sync_next_backward)
    own_loss = loss.clone()
    loss = all_reduce_(all_reduce_(loss, parallel.data_group), parallel.pp_group)
    update = optimizer.step(learning_rate, loss)
    return StepResult(loss, update.grad_norm, update.skipped, torch.ones_like(loss) if scale is None else scale,
                      None if optimizer.spikes is None else optimizer.spikes.mean,
                      Traces(own_loss, optimizer.layout.gradients.own_norm, update.piece_norms))
