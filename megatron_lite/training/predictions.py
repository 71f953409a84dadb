"""Compares the predicted memory and time of a run's steps with what is measured.

The log has a line after the second step, and one at the end of the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_lite.config.checks import InputError
from megatron_lite.config.run import RunConfig
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState
from megatron_lite.plan.hardware import Hardware, load_hardware, machine_of_gpu
from megatron_lite.plan.step_time import step_time
from megatron_lite.training.out_of_memory import advice, is_out_of_memory
from megatron_lite.training.peak_memory import (
    PeakMemory,
    PeakMeter,
    own_step_peak,
    peak_of_all_ranks,
)
from megatron_lite.training.run_summary import RunSummary

MEASURED_STEP = 2


class Predictions:
    """Follows the steps of a run. Every rank makes the same calls.

    peak: the peak of a step, from the second step on if the run measures it.
    """

    def __init__(
        self,
        config: RunConfig,
        parallel: ParallelState,
        model: ModelStages,
        optimizer: Optimizer,
        *,
        num_microbatches: int,
    ) -> None:
        self._config, self._parallel = config, parallel
        self._num_microbatches = num_microbatches
        self._meter = PeakMeter(model, optimizer, parallel.device)
        self._steps = 0
        self._seconds: list[float] = []
        self.peak: PeakMemory | None = None

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Runs one step. Raises InputError with advice if memory runs out in it.

        On the second step it measures the peak, if the run measures it. That issues one all-reduce.
        """
        self._steps += 1
        measures = self._steps == MEASURED_STEP and self.measures_peak
        try:
            if measures:
                with self._meter.step():
                    yield
            else:
                yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = self._advice(iteration)
            raise InputError(text) from error
        if measures:
            assert self._meter.peak_bytes is not None
            predicted = own_step_peak(self._config, self._parallel, self._num_microbatches)
            self.peak = peak_of_all_ranks(
                predicted.num_bytes, self._meter.peak_bytes, self._parallel
            )

    def took(self, seconds: float) -> None:
        """Notes the time of a step whose figures have been read."""
        self._seconds.append(seconds)

    def peak_line(self) -> str | None:
        """Returns the line about the peak, right after the step that was measured, else None."""
        if self._steps != MEASURED_STEP or self.peak is None:
            return None
        return f"peak of a step, highest of all ranks: {self.peak}"

    def summary(self) -> RunSummary:
        """Returns the predicted and measured figures of the run.

        The measured time is the median of the steps after the second.
        """
        machine, later = self._machine(), self._seconds[MEASURED_STEP:]
        told = None
        if machine is not None:
            told = 1000.0 * step_time(self._config, machine, self._parallel.world_size).seconds
        return RunSummary(
            peak_bytes_predicted=None if self.peak is None else self.peak.predicted,
            peak_bytes_measured=None if self.peak is None else self.peak.measured,
            step_ms_predicted=told,
            step_ms_measured=1000.0 * statistics.median(later) if later else None,
            machine=None if machine is None else machine.name,
        )

    @property
    def measures_peak(self) -> bool:
        """Tells whether the second step measures its peak: always on CUDA, and by a flag on a
        CPU."""
        if self._config.training.torch_compile:  # the temporaries of compiled code are not known
            return False
        return self._parallel.device.type == "cuda" or self._config.logging.log_peak_memory

    def _machine(self) -> Hardware | None:
        if self._config.logging.machine is not None:
            return load_hardware(self._config.logging.machine)
        if self._parallel.device.type != "cuda":
            return None
        return machine_of_gpu(torch.cuda.get_device_name(self._parallel.device))

    def _advice(self, iteration: int) -> str:
        return advice(
            self._config,
            own_step_peak(self._config, self._parallel, self._num_microbatches),
            num_ranks=self._parallel.world_size,
            device=self._parallel.device,
            when=f"in iteration {iteration} on rank {self._parallel.rank}",
        )
