"""The measured peak of a training step of one rank: what torch's CPU allocator had at most.

    measured = measure(config, parallel)

The trainer's own parts run two steps, and the peak is that of the second one, so that states built
by the first step count. The figure has every tensor of the process, with the allocator's rounding,
and the copies that gloo's collectives make. Memory outside of torch's allocator is not part of it.
"""

import numpy as np
import torch

from megatron_lite.memory.measure.live_storages import allocator_peak
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import gloo_has_freed
from megatron_lite.training.apex_kernels import fuse_weight_gradients_
from megatron_lite.training.batches import MicroBatches, document_rules, masked_mean
from megatron_lite.training.build_trainer import build_stages
from megatron_lite.training.step import StageRunner, train_step


def measure(config, parallel, *, num_microbatches):
    """Returns the most bytes allocated at once in this rank's second step.

    Every rank of the run calls it at the same time.

    num_microbatches: those of one data-parallel rank.
    """
    # The profiler sees the main thread alone, so gloo's threads must free nothing.
    with gloo_has_freed(), allocator_peak() as found:
        model = build_stages(config, parallel)
        optimizer = Optimizer(model, config.optimizer, parallel, config.data_parallel)
        fuse_weight_gradients_(config.training, parallel, model, optimizer)
        runner = StageRunner.of(config, model, parallel)
        batches = MicroBatches(
            dataset=_Samples(config),
            consumed_samples=0,
            micro_batch_size=config.training.micro_batch_size,
            num_microbatches=num_microbatches,
            parallel=parallel,
            rules=document_rules(config),
        )
        # The profiler sees the allocations of its own thread and of threads that it starts.
        with torch.autograd.set_multithreading_enabled(False):
            masked = None
            if batches.rules is not None and batches.rules.mask_loss:
                masked = masked_mean(batches.counts(), parallel, per_token=False)
            for _ in range(2):
                found.mark()
                train_step(runner, optimizer, batches, learning_rate=1e-4, masked=masked)
            found.mark()
    return found.marks[-1][1]


class _Samples:
    """A dataset of random token ids."""

    def __init__(self, config):
        self._config = config

    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        size = self._config.data.seq_length + 1
        return np.random.default_rng(index).integers(
            self._config.tokenizer.true_vocab_size, size=size, dtype=np.int64
        )
