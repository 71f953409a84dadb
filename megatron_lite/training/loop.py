"""The training loop: step, record, evaluate, save, until the run ends or something ends it early.

On a GPU the loop reads the figures of a step only after it has started the next step. The device
therefore never waits for the log.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from megatron_lite.checkpointing.load import load_checkpoint
from megatron_lite.checkpointing.progress import Progress
from megatron_lite.checkpointing.saver import Saver
from megatron_lite.checkpointing.snapshot import take_snapshot
from megatron_lite.checkpointing.start import Start
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.run import RunConfig
from megatron_lite.data.datasets import Datasets
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.timeouts import set_timeout
from megatron_lite.supervision.drift import ReplicaCheck
from megatron_lite.supervision.exits import Exits
from megatron_lite.supervision.pulse import Pulse
from megatron_lite.supervision.slow_rank import SlowRanks
from megatron_lite.training.batches import MicroBatches, SampleDataset
from megatron_lite.training.compiler import memory_budget
from megatron_lite.training.documents import DocumentRules
from megatron_lite.training.due import Due
from megatron_lite.training.evaluations import Evaluations
from megatron_lite.training.logging import RunLog
from megatron_lite.training.loss_mask import masked_mean_of
from megatron_lite.training.micro_batches import StageRunner
from megatron_lite.training.observe import (
    ActivationBytes,
    ActivationMeter,
    Observer,
    TimelineRecorder,
)
from megatron_lite.training.predictions import Predictions
from megatron_lite.training.profiler import Profiler
from megatron_lite.training.run_facts import run_facts
from megatron_lite.training.sample_order import SampleOrder, sample_order
from megatron_lite.training.skipped import (
    SkippedUpdates,
    StepFigures,
    counted,
    skipped_batches_path,
)
from megatron_lite.training.started_step import StartedStep
from megatron_lite.training.step import TrainingError, train_step
from megatron_lite.training.timers import Timers
from megatron_lite.training.wandb_run import WandbRun


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run, and its progress.

    num_iterations: the iteration at which the run ends.
    start: the checkpoint that `run` loads.
    rules: what the ends of documents mean; None: nothing.
    notices: lines for the log, about kernels and about checks that compare nothing.
    tokenizer: the contents of the tokenizer's files, which every checkpoint stores.
    pulse: the record of where this rank is. The trainer writes it and a watch reads it.
    progress: the iterations and samples so far.
    activation_bytes: the bytes that the run's first micro-batch keeps for backward. None before it,
        and under --torch-compile.
    """

    config: RunConfig
    parallel: ParallelState
    model: ModelStages
    optimizer: Optimizer
    schedule: LrSchedule
    datasets: Datasets
    num_iterations: int
    batches: BatchSchedule
    saver: Saver
    start: Start = field(default_factory=Start)
    rules: DocumentRules | None = None
    notices: tuple[str, ...] = ()
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    pulse: Pulse = field(default_factory=Pulse)
    progress: Progress = field(default_factory=Progress)
    activation_bytes: ActivationBytes | None = field(default=None, init=False)
    _runner: StageRunner = field(init=False)
    _evaluations: Evaluations = field(init=False)
    _order: SampleOrder = field(init=False)
    _predictions: Predictions = field(init=False)
    _skipped: SkippedUpdates = field(init=False)
    _replicas: ReplicaCheck | None = field(default=None, init=False)
    _slow_ranks: SlowRanks | None = field(default=None, init=False)
    _timers: Timers = field(init=False)
    _profiler: Profiler = field(init=False)
    _started: deque[StartedStep] = field(default_factory=deque, init=False)
    _clock: float = field(default=0.0, init=False)
    _saved_at: int = field(default=-1, init=False)
    _timeline_is_due: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._runner = StageRunner.of(self.config, self.model, self.parallel)
        self._order = sample_order(self.config.data, len(self.datasets.train))
        self._evaluations = Evaluations(
            self.config, self._runner, self.batches, self.pulse, self.rules
        )
        self._predictions = Predictions(
            self.config,
            self.parallel,
            self.model,
            self.optimizer,
            num_microbatches=self.batches.num_microbatches(self.batches.largest),
        )
        self._timeline_is_due = self.config.logging.memory_timeline is not None
        self._make_guards()

    def _make_guards(self) -> None:
        self._timers = Timers(self.config.logging, self.parallel)
        if self._timers.run:
            self.optimizer.timed = self._runner.timed = self._timers
        self._profiler = Profiler(self.config, self.parallel)
        scaling = self.optimizer.loss_scale
        self._skipped = SkippedUpdates(
            self.config,
            self.parallel,
            self.optimizer.layout.pieces,
            self.datasets.train,
            loss_scale_minimum=None if scaling is None else scaling.minimum,
            order=self._order,
        )
        if self.config.training.check_weight_hash_across_dp_replicas_interval is not None:
            self._replicas = ReplicaCheck(self.model, self.optimizer, self.parallel)
        if self.config.logging.log_straggler:
            self._slow_ranks = SlowRanks(self.config.logging, self.parallel)

    def run(self, exits: Exits | None = None) -> Progress:
        """Trains from the step that `--load` chose to the end, or until `exits` ends the run.

        exits: listens for signals already. By default the run makes its own, which listens for as
        long as the run lasts.
        Raises TrainingError if the run cannot go on, for example because the loss is not finite.
        """
        if exits is None:
            with Exits(self.config.training, self.parallel).listening() as own:
                return self.run(own)
        with self.saver:
            return self._run(exits)

    def _run(self, exits: Exits) -> Progress:
        notices = [*self.saver.notices, *self.parallel.together("--load", self._load)]
        with self.parallel.together("the log", self._open_log) as log:
            for notice in (*notices, *self.notices):
                log.line(notice)
            if self.progress.iteration >= self.num_iterations:
                log.line(
                    f"nothing to train: iteration {self.progress.iteration} is the end of the run "
                    f"or past it ({self.num_iterations})"
                )
            exits.begin()
            timed = self._slow_ranks.listening() if self._slow_ranks is not None else nullcontext()
            with memory_budget(self.config.recompute.activation_memory_budget), timed:
                finished = self._train(log, exits)
            for line in self._profiler.close():
                log.line(line)
            if self._timeline_is_due:
                log.line(
                    "no memory timeline: --memory-timeline records the second iteration, and "
                    "there was none"
                )
            self._save(log)
            self.saver.wait(log.line)
            if finished and self._evaluate("validation", self.datasets.valid, log, exits) is None:
                self._evaluate("test", self.datasets.test, log, exits)
            log.summary(self._predictions.summary())
        return self.progress

    def _train(self, log: RunLog, exits: Exits) -> bool:
        """Runs iterations. Returns True at the run's end, False if something ended it early."""
        reason = self._evaluate_within(log, exits) if self.progress.evaluation_is_due else None
        if reason is not None:
            log.line(f"exiting at iteration {self.progress.iteration}: {reason}")
            return False
        self._clock = time.perf_counter()
        first = self.progress.iteration + 1
        waits = self.config.parallel.distributed_timeout_seconds_after_init
        self.pulse.at(f"iteration {first}", limited=False)  # no time limit: kernels compile in it
        while self.progress.iteration < self.num_iterations:
            batch = self.batches.at(self.progress.consumed_samples)
            self._started.append(self._start_step(log))
            iteration = self.progress.iteration
            self.saver.poll(log.line)
            due = Due.after(iteration, self.config, num_iterations=self.num_iterations)
            reason, last = exits.now(), exits.at_interval(iteration)
            # An evaluation, a save or the end of the run needs the progress of all steps. Otherwise
            # one step's figures may stay on the GPU, so that reading them does not stall it.
            while len(self._started) > (
                0 if due.needs_progress or reason or last else self._steps_in_flight()
            ):
                self._finish_step(self._started.popleft(), log)
            if due.replica_check:
                self._compare_replicas()
            if due.evaluation:
                # If the run ends during the evaluation, the checkpoint records it as still due.
                self.progress = replace(self.progress, evaluation_is_due=True)
                reason = reason or self._evaluate_within(log, exits)
            if due.save:
                self._save(log)
                reason = reason or exits.now()
            reason = reason or last
            if reason is not None and not due.end:
                log.line(f"exiting at iteration {iteration}: {reason}")
                return False
            if due.evaluation or due.save:
                self._clock = time.perf_counter()
            if iteration == first and waits is not None:
                set_timeout(waits)
            self.pulse.at(
                f"iteration {iteration + 1}",
                growth=max(1.0, self.batches.at(self.progress.consumed_samples) / batch),
            )
        return True

    def _evaluate_within(self, log: RunLog, exits: Exits) -> str | None:
        """Evaluates the validation loss in the middle of the run.

        Returns the reason if the evaluation was left unfinished, else None.
        """
        reason = self._evaluate("validation", self.datasets.valid, log, exits)
        if reason is None:
            self.progress = replace(self.progress, evaluation_is_due=False)
        return reason

    def _steps_in_flight(self) -> int:
        """Returns how many steps may leave figures on the device while the next step starts."""
        return 1 if self.parallel.device.type == "cuda" else 0

    def _start_step(self, log: RunLog) -> StartedStep:
        before = self.progress.consumed_samples
        learning_rate, batch_size = self.schedule.at(before), self.batches.at(before)
        decoupled_learning_rate = self.schedule.decoupled_at(before)
        batches = MicroBatches(
            dataset=self.datasets.train,
            consumed_samples=before,
            num_microbatches=self.batches.num_microbatches(batch_size),
            micro_batch_size=self.config.training.micro_batch_size,
            parallel=self.parallel,
            where=f"iteration {self.progress.iteration + 1}",
            order=self._order,
            timed=self._timers,
            rules=self.rules,
        )
        measured = self.activation_bytes is not None or self.config.training.torch_compile
        meter = (
            None if measured else ActivationMeter(thorough=self.config.recompute.recompute_verify)
        )
        logging, iteration = self.config.logging, self.progress.iteration + 1
        logged = iteration % logging.log_interval == 0
        self._profiler.begin(iteration)
        with (
            self._predictions.step(iteration),
            self._slow_ranks.step(logged=logged) if self._slow_ranks is not None else nullcontext(),
        ):
            result = train_step(
                self._runner,
                self.optimizer,
                batches,
                learning_rate=learning_rate,
                decoupled_learning_rate=decoupled_learning_rate,
                observer=meter or self._timeline_recorder(),
                timed=self._timers,
                masked=masked_mean_of(
                    batches, per_token=self.config.training.calculate_per_token_loss
                ),
            )
        for notice in self._profiler.end(iteration):
            log.line(notice)
        if meter is not None:
            self._compare_bytes(meter, log)
        if (line := self._predictions.peak_line()) is not None:
            log.line(line)
        self.progress = replace(
            self.progress, iteration=iteration, consumed_samples=before + batch_size
        )
        return StartedStep(
            iteration,
            self.progress.consumed_samples,
            batch_size,
            learning_rate,
            result,
            self.optimizer.params_norm() if logged and logging.log_params_norm else None,
            self.optimizer.num_zeros_in_grad()
            if logged and logging.log_num_zeros_in_grad
            else None,
            decoupled_learning_rate,
        )

    def _compare_bytes(self, meter: ActivationMeter, log: RunLog) -> None:
        """Compares predicted with measured kept bytes of the run's first micro-batch.

        A difference is a warning in the log. Under --recompute-verify it raises TrainingError.
        """
        self.activation_bytes = meter.result(self.config, self.parallel)
        fault = self.activation_bytes.fault
        if fault is not None and self.config.recompute.recompute_verify:
            raise TrainingError(f"--recompute-verify: {fault}")
        if fault is not None:
            log.line(f"warning: {fault}")

    def _timeline_recorder(self) -> Observer:
        """Returns the observer of an iteration that the activation meter does not measure.

        The first such iteration records the memory timeline, if the user asked for one. That is the
        run's second iteration, whose memory is that of all later ones.
        """
        if self._timeline_is_due:
            self._timeline_is_due = False
            return TimelineRecorder(
                self.config.logging.memory_timeline if self.parallel.rank == 0 else None,
                self.config,
            )
        return Observer()

    def _finish_step(self, step: StartedStep, log: RunLog) -> None:
        """Reads a step's figures, counts them and logs them. Reading them waits for the device."""
        figures = StepFigures.read(step.result)
        seconds = time.perf_counter() - self._clock
        self._clock += seconds
        self._predictions.took(seconds)
        update = None
        if figures.skipped:
            update = self._skipped.judge(
                step.iteration, step.samples, figures, step.result, self.progress
            )
            log.skipped(update)
        self.progress = counted(self.progress, figures, update)
        log.iteration(
            step.record(
                figures,
                seconds=seconds,
                seq_length=self.config.data.seq_length,
                activation_bytes=self.activation_bytes,
            ),
            step.extras(),
        )
        if update is not None:
            self._skipped.check(update)
        if self._slow_ranks is not None and step.iteration % self.config.logging.log_interval == 0:
            for line in self._slow_ranks.lines():
                log.line(line)
        if self._timers.run and step.iteration % self.config.logging.log_interval == 0:
            log.times(self._timers.report(self.config.logging.log_interval), step.iteration)

    def _compare_replicas(self) -> None:
        if self._replicas is not None and (fault := self._replicas.fault()) is not None:
            raise TrainingError(
                f"iteration {self.progress.iteration}: ranks no longer hold the same weights: "
                f"{fault}. Continue from a checkpoint before it, without the node of that rank if "
                "it happens again"
            )

    def _evaluate(
        self, name: str, dataset: SampleDataset | None, log: RunLog, exits: Exits
    ) -> str | None:
        """Logs a loss over `dataset`. Returns a reason if something ended the run meanwhile."""
        return self._evaluations.log_loss(
            name, dataset, iteration=self.progress.iteration, log=log, exits=exits
        )

    def _load(self) -> list[str]:
        if self.config.checkpoint.load is None:
            return []
        loaded = load_checkpoint(
            self.start,
            self.config,
            self.parallel,
            self.model,
            self.optimizer,
            data=self.datasets.identity,
        )
        self.progress = loaded.progress
        if self.config.checkpoint.continues:
            self._saved_at = loaded.progress.iteration
        return list(loaded.notices)

    def _save(self, log: RunLog) -> None:
        directory, iteration = self.config.checkpoint.save, self.progress.iteration
        if directory is None or iteration in (0, self._saved_at):
            return
        if not math.isfinite(self.optimizer.params_norm().item()):
            raise TrainingError(
                f"iteration {iteration}: a weight is not finite, so no checkpoint is written. "
                "Lower --lr, and continue from an earlier checkpoint"
            )
        self._compare_replicas()
        self.pulse.at(f"iteration {iteration} (saving)", limited=False)
        self.saver.wait(log.line)
        log.line(f"saving checkpoint at iteration {iteration:7d} to {directory}")
        began = time.perf_counter()
        snapshot = take_snapshot(
            self.config,
            self.parallel,
            self.model,
            self.optimizer,
            self.progress,
            data=self.datasets.identity,
            copy=self.saver.copies,
            schedule=self.schedule,
            tokenizer=self.tokenizer,
        )
        self.saver.save(snapshot, log.line)
        if self.saver.copies:
            log.line(
                f"  training waited {(time.perf_counter() - began) * 1000.0:.1f} ms for the "
                "copy, which is now written"
            )
        self._saved_at = iteration

    def _open_log(self) -> RunLog:
        config = self.config
        facts = run_facts(
            config,
            self.batches,
            self.progress,
            num_iterations=self.num_iterations,
            world_size=self.parallel.world_size,
            device=self.parallel.device,
        )
        return RunLog(
            config.logging,
            facts,
            enabled=self.parallel.rank == 0,
            start=self.progress,
            skipped_batches=skipped_batches_path(config),
            keep_last=config.checkpoint.save_keep_last,
            wandb=WandbRun(config)
            if config.logging.wandb_project and self.parallel.rank == 0
            else None,
        )
