"""The measured peak of a training step of one rank: what torch's CPU allocator had at most.

    measured = measure(config, parallel)

The trainer's own parts run two steps, and the peak is that of the second one, so that states built
by the first step count. The figure has every tensor of the process, with the allocator's rounding,
and the copies that gloo's collectives make. Memory outside of torch's allocator is not part of it.
"""

from functools import partial

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function

from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import gloo_has_freed
from megatron_lite.training.apex_kernels import fuse_weight_gradients_
from megatron_lite.training.batches import MicroBatches, document_rules, masked_mean
from megatron_lite.training.build_trainer import build_stages
from megatron_lite.training.step import StageRunner, train_step

STEP = "the measured step"
LEARNING_RATE = 1e-4


def measure(config, parallel, *, num_microbatches):
    """Returns the most bytes allocated at once in this rank's second step.

    Every rank of the run calls it at the same time.

    num_microbatches: those of one data-parallel rank.
    """
    activities = [ProfilerActivity.CPU]
    # The profiler sees the main thread alone, so gloo's threads must free nothing.
    with (
        gloo_has_freed(),
        torch.profiler.profile(activities=activities, profile_memory=True) as profile,
    ):
        model = build_stages(config, parallel)
        optimizer = Optimizer(model, config.optimizer, parallel, config.data_parallel)
        fuse_weight_gradients_(config.training, parallel, model, optimizer)
        runner = StageRunner.of(config, model, parallel)
        batches = MicroBatches(
            dataset=samples(config),
            consumed_samples=0,
            micro_batch_size=config.training.micro_batch_size,
            num_microbatches=num_microbatches,
            parallel=parallel,
            rules=document_rules(config),
        )
        # The profiler sees the allocations of its own thread and of threads that it starts.
        with torch.autograd.set_multithreading_enabled(False):
            per_token = config.training.calculate_per_token_loss
            masked = None
            if batches.rules is not None and batches.rules.mask_loss:
                masked = masked_mean(batches.counts(), parallel, per_token=per_token)
            step = partial(
                train_step, runner, optimizer, batches, learning_rate=LEARNING_RATE, masked=masked
            )
            step()
            with record_function(STEP):
                step()
    return _peak(profile)


def samples(config):
    """Returns a dataset of random token ids for the run."""
    return _Samples(config)


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


def _peak(profile):
    """Returns the most bytes that were allocated at once during the marked step."""
    events = []
    begins = ends = 0
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name == STEP:
            begins, ends = event.start_time_ns, event.end_time_ns
        if type(event.extra_fields).__name__.endswith("Allocation"):
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    alive = {}
    total = most = 0
    for time, address, size in sorted(events, key=lambda event: event[0]):
        if size > 0:  # memory that another thread freed is used again
            total += size - alive.get(address, 0)
            alive[address] = size
        else:
            total -= alive.pop(address, 0)
        if begins <= time <= ends:
            most = max(most, total)
    return most
