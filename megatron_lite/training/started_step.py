"""A step that has been started: the end of its work, and the record of its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.training.iteration_line import IterationRecord
from megatron_lite.training.observe import ActivationBytes
from megatron_lite.training.skipped import StepFigures
from megatron_lite.training.step import StepResult


class StepEnd:
    """A point in the work of a device: its time, and figures that are copied to the host there.

    On a GPU the copy to pinned memory and an event are launched behind the work so far. Reading
    waits for that event alone, so that a step launched later goes on meanwhile, and the time is the
    event's. On a CPU the work is done at once.
    figures: 0-d tensors on the device, by name.
    """

    def __init__(self, device: torch.device, figures: Mapping[str, Tensor] | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        self._names, self._values = tuple(figures or ()), torch.empty(0)
        if figures:
            # float64 holds every figure exactly, counts included.
            self._values = torch.stack([figure.double() for figure in figures.values()])
        if self.is_late(device):
            if figures:
                on_host = torch.empty(len(figures), dtype=torch.float64, pin_memory=True)
                self._values = on_host.copy_(self._values, non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._seconds = time.perf_counter()

    @staticmethod
    def is_late(device: torch.device) -> bool:
        """Tells whether the device does its work later than the host launches it."""
        return device.type != "cpu"

    def figures(self) -> dict[str, float]:
        """Returns the figures by name. On a GPU it waits until the work has come to this point."""
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))

    def seconds_after(self, earlier: StepEnd) -> float:
        """Returns the time from an earlier end to this one, whose figures have been read."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1000.0


class StartedStep(NamedTuple):
    """A step whose figures may still be on the device.

    end: the end of its work, with the values of StepFigures.
    """

    iteration: int
    consumed_samples: int
    batch_size: int
    learning_rate: float
    decoupled_learning_rate: float | None
    result: StepResult
    end: StepEnd

    @property
    def samples(self) -> range:
        """The numbers of the step's samples, in the order in which the run reads its data."""
        return range(self.consumed_samples - self.batch_size, self.consumed_samples)

    def figures(self) -> StepFigures:
        """Returns the figures of the step. On a GPU it waits for the end of its work."""
        return StepFigures(**self.end.figures())

    def record(
        self, figures: StepFigures, *, seconds: float, seq_length: int, kept: ActivationBytes | None
    ) -> IterationRecord:
        """Returns the record of the step.

        seconds: the time of the iteration. kept: the bytes that a micro-batch keeps, if measured.
        """
        return IterationRecord(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            global_batch_size=self.batch_size,
            lm_loss=figures.loss,
            grad_norm=figures.grad_norm,
            learning_rate=self.learning_rate,
            decoupled_learning_rate=self.decoupled_learning_rate,
            params_norm=figures.params_norm,
            num_zeros=None if figures.num_zeros is None else int(figures.num_zeros),
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
