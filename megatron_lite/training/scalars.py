"""The scalars of a run in TensorBoard and Weights & Biases, by Megatron's names."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping

import torch

from megatron_lite.checkpointing.progress import Progress
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.training.iteration_line import (
    LogExtras,
    RunFacts,
    full_batch_ms,
    peak_gib,
    teraflops,
    utilization,
)
from megatron_lite.training.metrics import IterationRecord
from megatron_lite.training.tensorboard import ScalarFile
from megatron_lite.training.wandb_run import WandbRun

# The scalars that TensorBoard also gets over the consumed samples, as in Megatron.
BY_SAMPLES = (
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size"),
    *("grad-norm", "num-zeros", "params-norm"),
)


class Scalars:
    """Writes the scalars of one run to TensorBoard's folder and to W&B, if the run has them.

    start: the progress at the start. Points that an earlier run wrote past it are void.
    Raises InputError if the folder cannot be written.
    """

    def __init__(self, folder: str | None, wandb: WandbRun | None, start: Progress) -> None:
        self._wandb, self._files = wandb, None
        if folder is not None:
            self._files = (
                ScalarFile(folder, purge_step=start.iteration + 1),
                # A separate file: its steps count samples, the first file's steps iterations.
                ScalarFile(
                    os.path.join(folder, "by_samples"), purge_step=start.consumed_samples + 1
                ),
            )

    def opening(self) -> Iterator[str | None]:
        """Yields a warning for each file whose first event could not be written, or None."""
        for file in self._files or ():
            yield file.opening

    def write(
        self,
        scalars: Mapping[str, float | None],
        *,
        iteration: int,
        consumed: int,
        by_samples: Collection[str] = (),
    ) -> Iterator[str | None]:
        """Writes the scalars that are not None. Yields a warning for each first lost one, or None.

        consumed: the samples so far.
        by_samples: those that TensorBoard also gets over the consumed samples.
        """
        known = {name: value for name, value in scalars.items() if value is not None}
        if self._wandb is not None:
            yield self._wandb.log({**known, "samples vs steps": consumed}, iteration)
        if self._files is None:
            return
        by_iteration, over_samples = self._files
        for name, value in known.items():
            yield by_iteration.add_scalar(name, value, iteration)
            if name in by_samples:
                yield over_samples.add_scalar(f"{name} vs samples", value, consumed)

    def close(self) -> None:
        """Closes the files and W&B's run."""
        for file in self._files or ():
            file.close()
        if self._wandb is not None:
            self._wandb.close()


def scalars_of(
    record: IterationRecord, extras: LogExtras, facts: RunFacts, config: LoggingConfig
) -> dict[str, float | None]:
    """Returns the scalars of an iteration by Megatron's names; None if one is not asked for.

    The throughput and the peak of the memory need no flag, unlike in Megatron.
    """
    return {
        "learning-rate": record.learning_rate,
        "decoupled-learning-rate": record.decoupled_learning_rate,
        "batch-size": record.global_batch_size,
        "lm loss": record.lm_loss,
        "loss-scale": record.loss_scale if config.log_loss_scale_to_tensorboard else None,
        "world-size": facts.world_size if config.log_world_size_to_tensorboard else None,
        "grad-norm": record.grad_norm,
        "num-zeros": extras.num_zeros,
        "params-norm": extras.params_norm,
        "throughput": teraflops(full_batch_ms([record], facts), facts),
        "tokens-per-second": record.tokens_per_second,
        "iteration-time": record.iteration_ms / 1000.0
        if config.log_timers_to_tensorboard
        else None,
        "mem-peak-gib": peak_gib(facts.device),
        **(memory_scalars(facts.device) if config.log_memory_to_tensorboard else {}),
        **utilization([record], facts),
    }


def memory_scalars(device: torch.device) -> dict[str, float | None]:
    """Returns Megatron's figures of CUDA's allocator; none on a CPU, which has no allocator."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }
