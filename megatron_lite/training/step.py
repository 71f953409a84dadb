"""One training step: accumulate gradients over micro-batches, reduce, clip, update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.timed import Timed, not_timed
from megatron_lite.training.batches import Batches
from megatron_lite.training.loss_mask import MaskedMean
from megatron_lite.training.micro_batches import StageRunner
from megatron_lite.training.observe import Observer


class TrainingError(RuntimeError):
    """A run that cannot go on, through no fault of its input.

    The process prints the message and exits with status 1.
    """


class StepResult(NamedTuple):
    """The figures of one step, as tensors on the device that the log reads later.

    The first four are 0-d and the same on every rank.
    loss: the mean over the global batch.
    grad_norm: the global 2-norm before clipping.
    skipped: 1.0 if no weight was changed, else 0.0.
    loss_scale: the scale that was used; 1.0 if the loss is not scaled.
    mean_loss: the running mean of the loss, against which spikes are judged. None if the run looks
        for no spikes.
    traces: this rank's own part of the loss and the norm, which shows where a NaN came from.
    """

    loss: Tensor
    grad_norm: Tensor
    skipped: Tensor
    loss_scale: Tensor
    mean_loss: Tensor | None
    traces: Traces


class Traces(NamedTuple):
    """This rank's own part of the loss and of the gradient norm.

    own_loss: this rank's part of the loss.
    own_grad_norm: the norm of its gradients before the sum over `dp_cp_group`, if it is measured.
    piece_norms: the norms of the gradients of its pieces after that sum.
    """

    own_loss: Tensor
    own_grad_norm: Tensor | None
    piece_norms: Tensor


def train_step(
    runner: StageRunner,
    optimizer: Optimizer,
    batches: Batches,
    *,
    learning_rate: float,
    decoupled_learning_rate: float | None = None,
    observer: Observer | None = None,
    timed: Timed = not_timed,
    masked: MaskedMean | None = None,
) -> StepResult:
    """Runs all micro-batches forward and backward and updates the weights once.

    The loss is the mean over micro-batches and over the ranks of `dp_cp_group`. These ranks hold
    equally many tokens, so the gradients are those of the global batch.
    Issues two all-reduces of the 0-d loss: over `dp_cp_group` and over `pp_group`.
    decoupled_learning_rate: the rate of the word embedding and the output layer; None: the same.
    observer: looks at the first micro-batch.
    timed: times the two halves of the step, by the names of training/timers.py.
    masked: how the losses of micro-batches with a loss mask become one. The loss is then the mean
        over the tokens of the global batch that count.
    """
    optimizer.zero_grad()
    parallel = runner.parallel
    scale = None if optimizer.loss_scale is None else optimizer.loss_scale.scale
    with timed("forward-backward"):
        loss = runner.train(
            batches,
            loss_factor=1.0 / (len(batches) * parallel.dp_cp_size),
            observer=observer or Observer(),
            mask_factors=None if masked is None else masked.factors,
            loss_scale=scale,
            before_last=optimizer.sync_next_backward,
        )
    own_loss = loss.clone()  # the sums below are in place
    # Pipeline ranks without the last stage add 0.
    loss = all_reduce_(all_reduce_(loss, parallel.dp_cp_group), parallel.pp_group)
    if masked is not None:
        loss = loss / masked.num_tokens.to(loss.dtype)
    with timed("optimizer"):
        update = optimizer.step(
            learning_rate, loss, decoupled_learning_rate=decoupled_learning_rate
        )
    return StepResult(
        loss,
        update.grad_norm,
        update.skipped,
        torch.ones_like(loss) if scale is None else scale,
        None if optimizer.spikes is None else optimizer.spikes.mean,
        Traces(own_loss, update.own_grad_norm, update.piece_norms),
    )
