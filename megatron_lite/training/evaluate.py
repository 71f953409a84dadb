"""Mean loss over the validation or test samples."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.batches import SampleDataset, microbatches


class Evaluation(NamedTuple):
    """loss: nats per token. perplexity: exp(loss), infinite past a loss of 700."""

    loss: float
    perplexity: float


@torch.no_grad()
def evaluate(model: GPTModel, dataset: SampleDataset, *, num_iterations: int, num_microbatches: int, micro_batch_size: int,
             parallel: ParallelState) -> Evaluation:
    """The mean loss over the first `num_iterations` global batches: every evaluation of a run sees the same samples.

    Dropout is off and no random number is drawn, so training goes on as if it had not happened.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    batch_size = micro_batch_size * num_microbatches * parallel.dp_size
    for iteration in range(num_iterations):
        for batch in microbatches(dataset, consumed_samples=iteration * batch_size, micro_batch_size=micro_batch_size,
                                  num_microbatches=num_microbatches, parallel=parallel):
            total += model.loss(batch.tokens, batch.labels).mean()
    model.train()
    loss = all_reduce_(total, parallel.dp_group).item() / (num_iterations * num_microbatches * parallel.dp_size)
    return Evaluation(loss, math.exp(loss) if loss < 700.0 else math.inf)
