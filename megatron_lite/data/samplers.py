"""Which samples a data-parallel rank reads in a micro-batch: a pure function of how many samples were consumed before.

    global batch at 24 consumed, micro-batch 2, 2 ranks:    micro-batch 0            micro-batch 1
                                                            rank 0: 24 25  rank 1: 26 27    rank 0: 28 29  rank 1: 30 31

The iteration reads [consumed, consumed + global batch) at every data-parallel size, so a run resumes on other ranks with the
same data. Evaluation uses the same rule from 0 on, each time anew.
"""

from __future__ import annotations


def microbatch_indices(consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int, microbatch: int) -> range:
    """The samples of micro-batch number `microbatch` of an iteration that starts after `consumed_samples`."""
    start = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return range(start, start + micro_batch_size)
