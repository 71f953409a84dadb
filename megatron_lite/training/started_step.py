"""A step that has been started, and the record of its figures once they have been read."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from megatron_lite.training.iteration_line import LogExtras
from megatron_lite.training.metrics import IterationRecord
from megatron_lite.training.observe import ActivationBytes
from megatron_lite.training.skipped import StepFigures
from megatron_lite.training.step import StepResult


class StartedStep(NamedTuple):
    """A step whose figures may still be on the device."""

    iteration: int
    consumed_samples: int
    batch_size: int
    learning_rate: float
    result: StepResult
    params_norm: Tensor | None
    num_zeros: Tensor | None
    decoupled_learning_rate: float | None = None

    @property
    def samples(self) -> range:
        """The numbers of the step's samples, in the order in which the run reads its data."""
        return range(self.consumed_samples - self.batch_size, self.consumed_samples)

    def record(
        self,
        figures: StepFigures,
        *,
        seconds: float,
        seq_length: int,
        activation_bytes: ActivationBytes | None,
    ) -> IterationRecord:
        """Returns the record of the step.

        figures: its figures, read from the device.
        seconds: the time of the iteration.
        """
        kept = activation_bytes
        return IterationRecord(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            global_batch_size=self.batch_size,
            lm_loss=figures.loss,
            grad_norm=figures.grad_norm,
            learning_rate=self.learning_rate,
            decoupled_learning_rate=self.decoupled_learning_rate,
            loss_scale=figures.loss_scale,
            iteration_ms=seconds * 1000.0,
            tokens_per_second=self.batch_size * seq_length / seconds,
            skipped=int(figures.skipped),
            nan=int(not math.isfinite(figures.loss)),
            activation_bytes_predicted=None if kept is None else kept.predicted,
            activation_bytes_measured=None if kept is None else kept.measured,
            activation_host_bytes_predicted=None if kept is None else kept.host_predicted,
            activation_host_bytes_measured=None if kept is None else kept.host_measured,
        )

    def extras(self) -> LogExtras:
        """Reads the figures that only logged iterations have. Waits for the device."""
        return LogExtras(
            params_norm=None if self.params_norm is None else self.params_norm.item(),
            num_zeros=None if self.num_zeros is None else int(self.num_zeros.item()),
        )
