"""The observers of a run's first two steps: the kept bytes, and the memory timeline."""

from __future__ import annotations

from megatron_lite.config.run import RunConfig
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training.logging import RunLog
from megatron_lite.training.observe import ActivationBytes, ActivationMeter, TimelineRecorder
from megatron_lite.training.step import TrainingError


class FirstSteps:
    """Chooses what observes each step of a run. Every rank makes the same calls.

    The first step measures the kept bytes of a micro-batch, unless the compiler of whole layers
    decides what is kept. The second one records the memory timeline, if the user asked for one: its
    memory is that of all later steps.

    activation_bytes: the bytes that the first micro-batch keeps for backward, once they are known.
    timeline_is_due: whether a timeline has been asked for and has not been recorded yet.
    """

    def __init__(self, config: RunConfig, parallel: ParallelState) -> None:
        self._config, self._parallel = config, parallel
        self._meter: ActivationMeter | None = None
        self.activation_bytes: ActivationBytes | None = None
        self.timeline_is_due = config.logging.memory_timeline is not None

    def meter(self) -> ActivationMeter | None:
        """Returns what measures the kept bytes of the step that begins now."""
        if self.activation_bytes is None and not self._config.compiles_layers:
            self._meter = ActivationMeter(thorough=self._config.recompute.recompute_verify)
        return self._meter

    def timeline(self) -> TimelineRecorder | None:
        """Returns what records the step that begins now. Other ranks than 0 run it plainly."""
        path = self._config.logging.memory_timeline
        if not self.timeline_is_due or self._meter is not None:
            return None
        self.timeline_is_due = False
        assert path is not None
        return TimelineRecorder(path, self._config) if self._parallel.rank == 0 else None

    def compare(self, log: RunLog) -> None:
        """Compares predicted with measured kept bytes right after the step that measured them.

        A difference is a warning in the log. Under --recompute-verify it raises TrainingError.
        Issues one all-reduce over all ranks then.
        """
        if self._meter is None:
            return
        self.activation_bytes = self._meter.result(self._config, self._parallel)
        self._meter = None
        fault = self.activation_bytes.fault
        if fault is not None and self._config.recompute.recompute_verify:
            raise TrainingError(f"--recompute-verify: {fault}")
        if fault is not None:
            log.line(f"warning: {fault}")
