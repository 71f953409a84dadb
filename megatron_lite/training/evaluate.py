"""Mean loss over the validation or test samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.training.batches import MicroBatches, SampleDataset
from megatron_lite.training.runner import StageRunner


class Evaluation(NamedTuple):
    """loss: nats per token. perplexity: exp(loss), infinite past a loss of 700."""

    loss: float
    perplexity: float


def evaluate(runner: StageRunner, dataset: SampleDataset, *, num_iterations: int, num_microbatches: int,
             micro_batch_size: int, where: str = "evaluation",
             stops: Callable[[], bool] = lambda: False) -> Evaluation | None:
    """The mean loss over the first `num_iterations` global batches: every evaluation of a run sees the same samples.

    Dropout is off and no random number is drawn, so training goes on as if it had not happened. stops: asked before each batch,
    on all ranks alike; where it says yes, the result is None. where: for errors in the data.
    """
    parallel = runner.parallel
    total = torch.zeros((), dtype=torch.float64, device=parallel.device)
    batch_size = micro_batch_size * num_microbatches * parallel.dp_size
    for iteration in range(num_iterations):
        if stops():
            return None
        total += runner.evaluate(MicroBatches(dataset=dataset, consumed_samples=iteration * batch_size, parallel=parallel,
                                              micro_batch_size=micro_batch_size, num_microbatches=num_microbatches,
                                              where=where))
    total = all_reduce_(all_reduce_(total, parallel.data_group), parallel.pp_group)
    loss = total.item() / (num_iterations * num_microbatches * parallel.data_size)
    return Evaluation(loss, math.exp(loss) if loss < 700.0 else math.inf)
