"""The evaluations of a run: its validation loss at intervals, and both losses at its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.messages import told_if_slow
from megatron_lite.parallel.state import set_timeout

from .batches import masked_mean, sample_order
from .step import TrainingError

if TYPE_CHECKING:
    from megatron_lite.data.datasets import Dataset

    from .loop import Trainer


def log_loss(trainer: Trainer, name: str) -> str | None:
    """Evaluates the validation or test loss and logs it.

    Returns None, or a reason if something ended the run meanwhile. The log has no loss then.
    Raises TrainingError if the loss is not finite and --check-for-nan-in-loss-and-grad is on.
    """
    training, data, log = trainer.config.training, trainer.config.data, trainer.log
    dataset = trainer.datasets.valid if name == "validation" else trainer.datasets.test
    if dataset is None:
        without = (
            "no data is given for it"
            if data.is_per_split
            else f"--split {data.split!r} leaves no documents for it: give it a larger "
            "share, or more documents"
        )
        log.line(f"no {name} loss: {without}")
        return None
    iteration = trainer.progress.iteration
    where = f"iteration {iteration} ({name} loss)"
    # The first evaluation compiles kernels of its own. Like the first step, it has no time limit,
    # and its collectives have the longer one: ranks may compile for unequal times.
    parallel = trainer.config.parallel
    limit = parallel.distributed_timeout_seconds_after_init
    compiles = not trainer.has_evaluated and trainer.config.uses_compiler(
        trainer.parallel.device.type
    )
    trainer.has_evaluated = True
    if compiles and limit is not None:
        set_timeout(60.0 * parallel.distributed_timeout_minutes)

    def stops() -> str | None:
        trainer.exits.pulse.at(where, limited=not compiles)
        return trainer.exits.now()

    work = f"evaluating the {name} loss over {training.eval_iters} global batches"
    log.detail(f"{work} (--eval-iters)")
    with told_if_slow(work, log.line):
        loss = mean_loss(trainer, dataset, where=where, stops=stops)
    if compiles and limit is not None and trainer.seconds:  # before a step it is not yet in force
        set_timeout(limit)
    if isinstance(loss, str):
        log.line(f"the {name} loss is left unfinished: {loss}")
        return loss
    log.evaluation(name, iteration, loss)
    if training.check_for_nan_in_loss_and_grad and not math.isfinite(loss):
        raise TrainingError(
            f"iteration {iteration}: the {name} loss is {loss}. Lower "
            "--lr; --no-check-for-nan-in-loss-and-grad goes on nevertheless"
        )
    return None


def mean_loss(
    trainer: Trainer,
    dataset: Dataset,
    *,
    where: str = "evaluation",
    stops: Callable[[], str | None] = lambda: None,
) -> float | str:
    """Returns the mean loss over --eval-iters global batches, in nats per token, or why it stopped
    before.

    Every evaluation of a run sees the same samples. Dropout is off and no random number is
    drawn, so an evaluation does not change the training after it. With a loss mask the mean is
    over the tokens that count.
    Issues two all-reduces of the 0-d sum, over `dp_cp_group` and over `pp_group`, and with a
    loss mask one of the number of tokens, over `dp_group`.
    where: the beginning of messages about faults in the data.
    stops: called before each batch. It must return the same on all ranks; a reason ends the
        evaluation.
    """
    training, parallel = trainer.config.training, trainer.runner.parallel
    full = training.eval_global_batch_size or trainer.batches.full
    counts, num_microbatches = list[int](), trainer.batches.num_microbatches(full)
    samples = replace(
        trainer.samples,
        dataset=dataset,
        num_microbatches=num_microbatches,
        where=where,
        order=sample_order(trainer.config.data, len(dataset)),
    )
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    for iteration in range(training.eval_iters):
        if reason := stops():
            return reason
        batches = replace(samples, consumed_samples=iteration * full)
        counts += batches.counts()
        total += trainer.runner.evaluate(batches)
    # Pipeline ranks without the last stage add 0.
    total = all_reduce_(all_reduce_(total, parallel.dp_cp_group), parallel.pp_group)
    number = float(training.eval_iters * num_microbatches * parallel.dp_cp_size)
    if counts:
        number = masked_mean(counts, parallel, per_token=True).num_tokens.item()
    return total.item() / number
