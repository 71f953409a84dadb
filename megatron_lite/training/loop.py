"""The training loop: step, record, evaluate, save, until the run ends or something ends it early.

On a GPU the loop reads the figures of a step only after it has started the next step, and waits for
the first of the two alone. The device therefore never waits for the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.checkpointing.saver import Saver
from megatron_lite.checkpointing.start import Start
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.invocation import BY_SCRIPT, Invocation
from megatron_lite.config.run import RunConfig
from megatron_lite.data.datasets import Datasets
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState, set_timeout
from megatron_lite.supervision.exits import Exits
from megatron_lite.supervision.pulse import Pulse
from megatron_lite.training.batches import MicroBatches, SampleDataset
from megatron_lite.training.compiler import memory_budget
from megatron_lite.training.document_positions import DocumentRules
from megatron_lite.training.due import Due
from megatron_lite.training.evaluations import Evaluations
from megatron_lite.training.first_steps import FirstSteps
from megatron_lite.training.iteration_line import LogExtras
from megatron_lite.training.logging import RunLog
from megatron_lite.training.loss_mask import masked_mean_of
from megatron_lite.training.observe import ActivationBytes
from megatron_lite.training.open_log import open_log
from megatron_lite.training.predictions import Predictions
from megatron_lite.training.run_checkpoints import RunCheckpoints
from megatron_lite.training.sample_order import SampleOrder, sample_order
from megatron_lite.training.skipped import SkippedUpdates, StepFigures, counted
from megatron_lite.training.slow_work import told_by_rank_0
from megatron_lite.training.started_step import StartedStep, StepEnd
from megatron_lite.training.step import StageRunner, train_step
from megatron_lite.training.watchers import Watchers


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run, and its progress.

    num_iterations: the iteration at which the run ends.
    start: the checkpoint that `run` loads.
    rules: what the ends of documents mean; None: nothing.
    notices: lines for the log, about kernels and about checks that compare nothing.
    invocation: how a command line started the run.
    tokenizer: the contents of the tokenizer's files, which every checkpoint stores.
    pulse: the record of where this rank is. The trainer writes it and a watch reads it.
    progress: the iterations and samples so far. predictions: the peak of a step, and the measured.
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
    invocation: Invocation = BY_SCRIPT
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    pulse: Pulse = field(default_factory=Pulse)
    progress: Progress = field(default_factory=Progress)
    _runner: StageRunner = field(init=False)
    _evaluations: Evaluations = field(init=False)
    _order: SampleOrder = field(init=False)
    predictions: Predictions = field(init=False)
    _skipped: SkippedUpdates = field(init=False)
    _watchers: Watchers = field(init=False)
    _started: deque[StartedStep] = field(default_factory=deque, init=False)
    _last_end: StepEnd = field(init=False)
    _first_steps: FirstSteps = field(init=False)
    _checkpoints: RunCheckpoints = field(init=False)

    def __post_init__(self) -> None:
        self._runner = StageRunner.of(self.config, self.model, self.parallel)
        self._order = sample_order(self.config.data, len(self.datasets.train))
        self._evaluations = Evaluations(
            self.config, self._runner, self.batches, self.pulse, self.rules
        )
        self.predictions = Predictions(
            self.config,
            self.parallel,
            self.model,
            self.optimizer,
            num_microbatches=self.batches.num_microbatches(self.batches.largest),
        )
        self._watchers = Watchers(self.config, self.parallel, self.model, self.optimizer)
        if self._watchers.timers.run:
            self.optimizer.timed = self._runner.timed = self._watchers.timers
        self._first_steps = FirstSteps(self.config, self.parallel)
        self._checkpoints = RunCheckpoints(
            config=self.config,
            parallel=self.parallel,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            datasets=self.datasets,
            saver=self.saver,
            tokenizer=self.tokenizer,
            pulse=self.pulse,
            compare_replicas=self._watchers.compare_replicas,
        )
        scaling = self.optimizer.loss_scale
        self._skipped = SkippedUpdates(
            self.config,
            self.parallel,
            self.optimizer.layout.pieces,
            self.datasets.train,
            loss_scale_minimum=None if scaling is None else scaling.minimum,
            order=self._order,
        )

    @property
    def activation_bytes(self) -> ActivationBytes | None:
        """The bytes that the run's first micro-batch keeps for backward.

        None before it, and under --activation-memory-budget.
        """
        return self._first_steps.activation_bytes

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
            budget = self.config.recompute.activation_memory_budget
            with memory_budget(budget), self._watchers.listening():
                finished = self._train(log, exits)
            for line in self._watchers.profiler.close():
                log.line(line)
            if self._first_steps.timeline_is_due:
                log.line(
                    "no memory timeline: --memory-timeline records the second iteration, and "
                    "there was none"
                )
            self._checkpoints.save(self.progress, log)
            self.saver.wait(log.line)
            self.saver.check()
            if finished and self._evaluate("validation", self.datasets.valid, log, exits) is None:
                self._evaluate("test", self.datasets.test, log, exits)
            log.summary(self.predictions.summary(), self.progress, finished=finished)
        return self.progress

    def _train(self, log: RunLog, exits: Exits) -> bool:
        """Runs iterations. Returns True at the run's end, False if something ended it early."""
        reason = self._evaluate_within(log, exits) if self.progress.evaluation_is_due else None
        if reason is not None:
            log.line(f"exiting at iteration {self.progress.iteration}: {reason}")
            return False
        self._last_end = StepEnd(self.parallel.device)
        first = self.progress.iteration + 1
        waits = self.config.parallel.distributed_timeout_seconds_after_init
        self.pulse.at(f"iteration {first}", limited=False)  # no time limit: kernels compile in it
        while self.progress.iteration < self.num_iterations:
            batch = self.batches.at(self.progress.consumed_samples)
            # Kernels load or compile in the first step, which takes minutes on some machines.
            is_first = self.progress.iteration + 1 == first
            with log.slow("the first step of this start") if is_first else nullcontext():
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
                self._watchers.compare_replicas(iteration)
            if due.evaluation:
                # If the run ends during the evaluation, the checkpoint records it as still due.
                self.progress = replace(self.progress, evaluation_is_due=True)
                reason = reason or self._evaluate_within(log, exits)
            if due.save:
                self._checkpoints.save(self.progress, log)
                reason = reason or exits.now()
            reason = reason or last
            if reason is not None and not due.end:
                log.line(f"exiting at iteration {iteration}: {reason}")
                return False
            # The time of an evaluation or a save belongs to no iteration.
            if due.evaluation or due.save:
                self._last_end = StepEnd(self.parallel.device)
            # The first iteration may compile kernels on some ranks, so it had the longer limit.
            if iteration == first and waits is not None:
                set_timeout(waits)
            # A step of a larger batch may take so many times as long as the one before.
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
        """Returns how many steps may leave figures on the device while the next step starts.

        Under a loss scale the next learning rate depends on whether the update was skipped. Timers
        wait for the device anyway, and their report is that of the steps so far.
        """
        waits = self.optimizer.loss_scale is not None or self._watchers.timers.run
        return 0 if waits or not StepEnd.is_late(self.parallel.device) else 1

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
            timed=self._watchers.timers,
            rules=self.rules,
        )
        logging, iteration = self.config.logging, self.progress.iteration + 1
        logged = iteration % logging.log_interval == 0
        self._watchers.profiler.begin(iteration)
        with self.predictions.step(iteration), self._watchers.step(iteration):
            result = train_step(
                self._runner,
                self.optimizer,
                batches,
                learning_rate=learning_rate,
                decoupled_learning_rate=decoupled_learning_rate,
                meter=self._first_steps.meter(),
                timeline=self._first_steps.timeline(),
                masked=masked_mean_of(
                    batches, per_token=self.config.training.calculate_per_token_loss
                ),
            )
        for notice in self._watchers.profiler.end(iteration):
            log.line(notice)
        self._first_steps.compare(log)
        if (line := self.predictions.peak_line()) is not None:
            log.line(line)
        self.progress = replace(
            self.progress, iteration=iteration, consumed_samples=before + batch_size
        )
        figures = dict(zip(StepFigures._fields, result[:4], strict=False))
        if logged and logging.log_params_norm:
            figures["params_norm"] = self.optimizer.params_norm()
        if logged and logging.log_num_zeros_in_grad:
            figures["num_zeros"] = self.optimizer.num_zeros_in_grad()
        return StartedStep(
            iteration,
            self.progress.consumed_samples,
            batch_size,
            learning_rate,
            decoupled_learning_rate,
            result,
            StepEnd(self.parallel.device, figures),
        )

    def _finish_step(self, step: StartedStep, log: RunLog) -> None:
        """Reads a step's figures, counts them and logs them. Waits for the end of that step."""
        figures = StepFigures(**step.end.figures())
        seconds = step.end.seconds_after(self._last_end)
        self._last_end = step.end
        self.predictions.took(seconds)
        update = None
        if figures.skipped:
            update = self._skipped.judge(
                step.iteration, step.samples, figures, step.result, self.progress
            )
            log.skipped(update)
            self._hold_schedule(step.batch_size)
        self.progress = counted(self.progress, figures, update)
        log.iteration(
            step.record(
                figures,
                seconds=seconds,
                seq_length=self.config.data.seq_length,
                activation_bytes=self.activation_bytes,
            ),
            LogExtras(
                figures.params_norm, None if figures.num_zeros is None else int(figures.num_zeros)
            ),
            peak=self.predictions.peak,
        )
        # This may end the run, so it comes after the row of the step is in the log.
        if update is not None:
            self._skipped.check(update)
        self._watchers.log(log, step.iteration)

    def _hold_schedule(self, num_samples: int) -> None:
        """Keeps a skipped update from advancing the learning rate, under a loss scale."""
        if self.optimizer.loss_scale is not None:
            skipped = self.schedule.skipped_samples + num_samples
            self.schedule = replace(self.schedule, skipped_samples=skipped)
            self._checkpoints.schedule = self.schedule

    def _evaluate(
        self, name: str, dataset: SampleDataset | None, log: RunLog, exits: Exits
    ) -> str | None:
        """Logs a loss over `dataset`. Returns a reason if something ended the run meanwhile."""
        return self._evaluations.log_loss(
            name, dataset, iteration=self.progress.iteration, log=log, exits=exits
        )

    def _load(self) -> list[str]:
        with told_by_rank_0("loading the checkpoint", self.parallel):
            loaded = self._checkpoints.load(self.start)
        if loaded is None:
            return []
        self.progress = loaded.progress
        return list(loaded.notices)

    def _open_log(self) -> RunLog:
        return open_log(
            self.config,
            self.parallel,
            self.batches,
            self.progress,
            num_iterations=self.num_iterations,
            shows_peak=self.predictions.measures_peak,
            invocation=self.invocation,
        )
