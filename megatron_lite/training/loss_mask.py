"""The loss of a step in which some tokens do not count (--eod-mask-loss).

                  gradients are those of                            the log has
    by default    the mean over micro-batches of                    sum(mask loss) / sum(mask)
                  sum(mask loss) / sum(mask) of each                over the global batch
    with --calculate-per-token-loss                                 the same
                  sum(mask loss) / sum(mask) over the global batch

Both are Megatron's. A sum of masks counts as 1 if it is 0. A micro-batch is that of all its
context-parallel ranks, so context parallelism does not change the result. Megatron-core 0.16 gives
each context-parallel rank's mean the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState


class MaskedMean(NamedTuple):
    """The factors that make a mean of the sums of the masked losses.

    factors: [m] float64, the factor on the gradients of each micro-batch's sum.
    num_tokens: 0-d float64, the tokens of the global batch that count, at least 1.
    """

    factors: Tensor
    num_tokens: Tensor


def masked_mean(counts: Sequence[int], parallel: ParallelState, *, per_token: bool) -> MaskedMean:
    """Returns the mean of a step. Issues one all-reduce of a number over `dp_group`.

    counts: the tokens that count in each of this rank's micro-batches, on all context-parallel
        ranks together.
    """
    own = torch.tensor(counts, dtype=torch.float64).to(parallel.device)
    total = all_reduce_(own.sum(), parallel.dp_group).clamp(min=1.0)
    if per_token:
        return MaskedMean(total.reciprocal().expand(len(counts)), total)
    # the mean over a micro-batch's tokens, times its share of all micro-batches of all ranks
    shares = own.clamp(min=1.0) * (len(counts) * parallel.dp_size)
    return MaskedMean(shares.reciprocal(), total)
