"""The watchers of the steps of a run: timers, the profiler, slow ranks, and replicas that drift."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from megatron_lite.config.run import RunConfig
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState
from megatron_lite.supervision.drift import ReplicaCheck
from megatron_lite.supervision.slow_rank import SlowRanks
from megatron_lite.training.logging import RunLog
from megatron_lite.training.profiler import Profiler
from megatron_lite.training.step import TrainingError
from megatron_lite.training.timers import Timers


class Watchers:
    """Watches the steps of one run, as its flags ask. Every rank makes the same calls.

    timers: those of --timing-log-level. profiler: that of --profile.
    """

    def __init__(
        self, config: RunConfig, parallel: ParallelState, model: ModelStages, optimizer: Optimizer
    ) -> None:
        self._logging = config.logging
        self.timers = Timers(config.logging, parallel)
        self.profiler = Profiler(config, parallel)
        self._replicas: ReplicaCheck | None = None
        if config.training.check_weight_hash_across_dp_replicas_interval is not None:
            self._replicas = ReplicaCheck(model, optimizer, parallel)
        self._slow_ranks: SlowRanks | None = None
        if config.logging.log_straggler:
            self._slow_ranks = SlowRanks(config.logging, parallel)

    def listening(self) -> AbstractContextManager[object]:
        """Returns a context around all steps, in which slow ranks are timed."""
        return nullcontext() if self._slow_ranks is None else self._slow_ranks.listening()

    def step(self, iteration: int) -> AbstractContextManager[object]:
        """Returns a context around one step."""
        if self._slow_ranks is None:
            return nullcontext()
        return self._slow_ranks.step(logged=self._is_logged(iteration))

    def log(self, log: RunLog, iteration: int) -> None:
        """Logs slow ranks and times every --log-interval iterations."""
        if not self._is_logged(iteration):
            return
        for line in self._slow_ranks.lines() if self._slow_ranks is not None else ():
            log.line(line)
        if self.timers.run:
            log.times(self.timers.report(self._logging.log_interval), iteration)

    def compare_replicas(self, iteration: int) -> None:
        """Raises TrainingError if ranks that should hold the same weights no longer do."""
        if self._replicas is not None and (fault := self._replicas.fault()) is not None:
            raise TrainingError(
                f"iteration {iteration}: ranks no longer hold the same weights: "
                f"{fault}. Continue from a checkpoint before it, without the node of that rank if "
                "it happens again"
            )

    def _is_logged(self, iteration: int) -> bool:
        return iteration % self._logging.log_interval == 0
