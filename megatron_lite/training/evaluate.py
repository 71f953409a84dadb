"""Mean loss over the validation or test samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_lite.data.samplers import microbatch_indices
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.training.batches import MicroBatches, SampleDataset
from megatron_lite.training.document_positions import DocumentRules
from megatron_lite.training.loss_mask import masked_mean
from megatron_lite.training.sample_order import SampleOrder
from megatron_lite.training.step import StageRunner


class Evaluation(NamedTuple):
    """loss: nats per token. perplexity: exp(loss), infinite from a loss of 700 on."""

    loss: float
    perplexity: float


def evaluate(
    runner: StageRunner,
    dataset: SampleDataset,
    *,
    num_iterations: int,
    num_microbatches: int,
    micro_batch_size: int,
    order: SampleOrder = microbatch_indices,
    where: str = "evaluation",
    stops: Callable[[], bool] = lambda: False,
    rules: DocumentRules | None = None,
) -> Evaluation | None:
    """Returns the mean loss over the first `num_iterations` global batches, or None if stopped.

    Every evaluation of a run sees the same samples. Dropout is off and no random number is drawn,
    so an evaluation does not change the training after it.
    Issues two all-reduces of the 0-d sum: over `dp_cp_group` and over `pp_group`.
    order: the samples of a micro-batch.
    where: the beginning of messages about faults in the data.
    stops: called before each batch. It must return the same on all ranks; True ends the evaluation.
    rules: what the ends of documents mean; None: nothing. With a loss mask the mean is over the
        tokens that count, and their number is one more all-reduce, over `dp_group`.
    """
    parallel = runner.parallel
    masks, counted = rules is not None and rules.mask_loss, 0
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    batch_size = micro_batch_size * num_microbatches * parallel.dp_size
    for iteration in range(num_iterations):
        if stops():
            return None
        batches = MicroBatches(
            dataset=dataset,
            consumed_samples=iteration * batch_size,
            parallel=parallel,
            micro_batch_size=micro_batch_size,
            num_microbatches=num_microbatches,
            where=where,
            order=order,
            rules=rules,
        )
        if masks:
            counted += sum(batches.counts())
        total += runner.evaluate(batches)
    # Pipeline ranks without the last stage add 0.
    total = all_reduce_(all_reduce_(total, parallel.dp_cp_group), parallel.pp_group)
    number = float(num_iterations * num_microbatches * parallel.dp_cp_size)
    if masks:
        number = masked_mean([counted], parallel, per_token=True).num_tokens.item()
    loss = total.item() / number
    return Evaluation(loss, math.exp(loss) if loss < 700.0 else math.inf)
