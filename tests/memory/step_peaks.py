"""The measured peak of a training step of one rank: what torch's CPU allocator had at most.

    measured = measure(config, parallel)

A run of two steps, and the peak is that of the second one, so that states built by the first step
count. The figure has every tensor of the process, with the allocator's rounding, and the copies
that gloo's collectives make. Memory outside of torch's allocator is not part of it.
"""

import pytest
import torch

from megatron_lite.memory.measure.live_storages import allocator_peak
from megatron_lite.parallel.collectives import gloo_has_freed
from megatron_lite.training import loop
from megatron_lite.training.build_trainer import build_trainer
from tests.support.mutants import replaces


def measure(config, parallel):
    """Returns the most bytes allocated at once in the second step of a run on this rank.

    Every rank of the run calls it at the same time.
    """

    @replaces("train_step", loop)
    def marked(train_step, *args, **options):
        found.mark()
        result = train_step(*args, **options)
        found.mark()
        return result

    # The profiler sees the main thread alone, so gloo's threads must free nothing. It sees the
    # allocations of its own thread and of threads that it starts.
    with (
        gloo_has_freed(),
        allocator_peak() as found,
        torch.autograd.set_multithreading_enabled(False),
        pytest.MonkeyPatch.context() as patch,
    ):
        marked(patch)
        build_trainer(config, parallel).run()
    return found.marks[3][1]
