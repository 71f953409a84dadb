"""The facts of a run that its log lines use: batch sizes, FLOPs, and the samples at its end."""

from __future__ import annotations

import torch

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.predict.flops import hardware_flops, step_flops
from megatron_lite.memory.predict.pipeline_memory import spared_flops
from megatron_lite.recompute.schedule import plan_model
from megatron_lite.training.iteration_line import RunFacts
from megatron_lite.training.peak_rate import PeakRate


def run_facts(
    config: RunConfig,
    batches: BatchSchedule,
    progress: Progress,
    *,
    num_iterations: int,
    world_size: int,
    device: torch.device,
    peak: PeakRate,
) -> RunFacts:
    """Returns the facts of a run that goes from `progress` to the end of `num_iterations`.

    peak: the peak that MFU and HFU divide by.
    """
    seq_length, parallel = config.data.seq_length, config.parallel
    vocabulary = config.tokenizer.padded_vocab_size(parallel.tensor_model_parallel_size)
    batch_size = batches.full
    remaining = num_iterations - progress.iteration
    consumed = progress.consumed_samples
    spared = {
        size: spared_flops(
            config,
            batches.num_microbatches(size),
            device=device.type,
            samples_per_microbatch=batches.samples_per_microbatch,
        )
        for size in batches.sizes_from(consumed, num_iterations=remaining)
    }
    return RunFacts(
        num_iterations=num_iterations,
        batch_size=batch_size,
        device=device,
        tokens=batch_size * seq_length,
        num_samples=batches.consumed_after(remaining, consumed=consumed),
        spared_flops=spared,
        world_size=world_size,
        flops=step_flops(
            config.model, batch=batch_size, seq_length=seq_length, padded_vocab_size=vocabulary
        ),
        hardware_flops=hardware_flops(
            config.model,
            plan_model(config),
            batch=batch_size,
            seq_length=seq_length,
            padded_vocab_size=vocabulary,
            device=device.type,
            loss_chunk_size=config.loss_chunk_size,
            loss_in_one_pass=config.loss_in_one_pass,
            tp_size=parallel.tensor_model_parallel_size,
            cp_size=parallel.context_parallel_size,
        ),
        peak_flops=peak.flops,
    )
