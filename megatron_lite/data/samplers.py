"""The samples that a data-parallel rank reads in a micro-batch.

They are a pure function of the number of samples that were consumed before. An example with a
global batch of 8 at 24 consumed samples, micro-batches of 2 and 2 ranks:

    micro-batch    rank 0    rank 1
    0              24 25     26 27
    1              28 29     30 31

An iteration reads [consumed, consumed + global batch) at every data-parallel size. Therefore a run
can go on with the same data on another number of ranks. Every evaluation uses the same rule, and
starts at sample 0.
"""

from __future__ import annotations


def microbatch_indices(
    consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int, microbatch: int
) -> range:
    """Returns the samples of one micro-batch.

    consumed_samples: how many samples were consumed before the iteration.
    microbatch: the number of the micro-batch in the iteration.
    """
    start = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)
