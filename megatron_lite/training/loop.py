"""The training loop: step, record, evaluate, save, until the run ends or something ends it early.

On a GPU the loop reads the figures of a step only after it has started the next step, and waits for
the first of the two alone. The device therefore never waits for the log.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_lite.checkpointing.step_files import NO_PROGRESS, Progress
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.run import RunConfig
from megatron_lite.data.datasets import Datasets
from megatron_lite.model.gpt import ModelStages
from megatron_lite.optim.lr_schedule import LrSchedule
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.messages import told_by_rank_0, told_if_slow
from megatron_lite.parallel.state import ParallelState, set_timeout
from megatron_lite.parallel.torch_internals import compiler_settings
from megatron_lite.supervision.exits import Exits

from .batches import MicroBatches, masked_mean
from .iteration_line import IterationRecord
from .log import RunLog
from .observe import ActivationMeter, Look, PeakMemory, measures_peak, peak_of_step, record_step
from .out_of_memory import told_where_memory_runs_out
from .step import StageRunner, StepEnd, TrainingError, train_step
from .summary import described

if TYPE_CHECKING:
    from megatron_lite.checkpointing.saver import Saver
    from megatron_lite.checkpointing.start import Start
    from megatron_lite.supervision.slow_rank import SlowRanks

    from .graphs import Recorder
    from .profiler import Profiler, Timers


@dataclass(kw_only=True)
class Trainer:
    """The parts of a run, and its progress. build_trainer.py makes them.

    num_iterations: the iteration at which the run ends.
    batches, samples: the batch size over the run, and the samples that its iterations read.
    saver, start: saves under --save, and the checkpoint that `run` loads; None without the flag.
    notices: lines for the log, about kernels and about checks that compare nothing.
    timers, profiler, slow_ranks, graphs: None unless a flag asks for them.

    progress: the iterations and samples so far.
    log, exits: of `run`, as long as it lasts.
    kept_bytes: the figures of the bytes that the run's first micro-batch keeps for backward, for
        every record. {} before it, and for compiled layers, of which the compiler decides what they
        keep.
    peak: the peak of a step, from the second step on if the run measures it.
    seconds: the times of the steps of this start that are finished.
    has_evaluated: whether this start has begun an evaluation.
    """

    config: RunConfig
    parallel: ParallelState
    model: ModelStages
    runner: StageRunner
    optimizer: Optimizer
    schedule: LrSchedule
    datasets: Datasets
    num_iterations: int
    batches: BatchSchedule
    samples: MicroBatches
    saver: Saver | None
    start: Start | None
    notices: tuple[str, ...]
    timers: Timers | None = None
    profiler: Profiler | None = None
    slow_ranks: SlowRanks | None = None
    graphs: Recorder | None = None
    progress: Progress = NO_PROGRESS
    kept_bytes: dict[str, Any] = field(default_factory=dict)
    peak: PeakMemory | None = None
    seconds: list[float] = field(default_factory=list)
    has_evaluated: bool = False
    _num_steps: int = 0  # of this start
    _saved_at: int = -1
    _attended: Tensor | None = None
    _reported: int = 0  # the steps of which the timers have told

    def run(self, exits: Exits | None = None, printed: Sequence[str] = ()) -> Progress:
        """Trains from the step that `--load` chose to the end, or until `exits` ends the run.

        exits: listens for signals already. By default the run makes its own, which listens for as
        long as the run lasts.
        printed: the notices that the terminal has already. The log file gets them.
        Raises TrainingError if the run cannot go on, for example because the loss is not finite.
        """
        if exits is None:
            with Exits(self.config.training, self.parallel).listening() as own:
                return self.run(own, printed)
        self.exits = exits
        with self.saver or nullcontext():
            notices = [*self.saver.warnings] if self.saver is not None else []
            notices += [*self.parallel.together("--load", self._load), *self.notices]
            with self.parallel.together("the log", lambda: RunLog(self, printed)) as log:
                self.log = log
                for notice in notices:
                    log.line(notice)
                if self.progress.iteration >= self.num_iterations:
                    log.line(
                        f"nothing to train: iteration {self.progress.iteration} is the end of the "
                        f"run or past it ({self.num_iterations})"
                    )
                exits.begin()
                if self.saver is not None:
                    self.saver.say = log.line
                    self.saver.published = partial(setattr, exits.pulse, "saved")
                budget, patched = self.config.recompute.activation_memory_budget, nullcontext()
                if budget is not None:
                    patched = compiler_settings().patch(activation_memory_budget=budget)
                told = told_where_memory_runs_out(
                    self.config,
                    self.parallel,
                    lambda: f"in {exits.pulse.where} on rank {self.parallel.rank}",
                )
                with told, patched:
                    finished = self._train()
                if self.profiler is not None:
                    self.profiler.close()
                if self.config.logging.memory_timeline is not None and self._num_steps < 2:
                    log.line("no memory timeline: the run had no second iteration to record")
                self._save()
                if self.saver is not None:
                    self.saver.finish()
                if finished and self._evaluate("validation") is None:
                    self._evaluate("test")
                log.summary(finished=finished)
        return self.progress

    def _train(self) -> bool:
        """Runs iterations. Returns True at the run's end, False if something ended it early."""
        log, exits = self.log, self.exits
        training = self.config.training
        limit = self.config.parallel.distributed_timeout_seconds_after_init
        iteration = self.progress.iteration
        # One step may leave figures on the device while the next step starts. Under a loss scale
        # the next learning rate depends on whether the update was skipped. Timers wait for the
        # device anyway, and their report is that of the steps so far.
        waits = self.optimizer.loss_scale is not None or self.timers is not None
        waits = waits or self.parallel.device.type in StepEnd.ON_TIME
        reason = self._evaluate("validation") if self.progress.evaluation_is_due else None
        if reason is not None:
            log.line(f"exiting at iteration {iteration}: {reason}")
            return False

        def due(every: int | None) -> bool:
            return bool(every and iteration % every == 0)

        self._last_end = StepEnd(self.parallel.device)
        started = list[Iterator[None]]()  # steps that are not finished
        # No time limit in the first step: kernels load or compile in it, for minutes on some
        # machines.
        exits.pulse.at(f"iteration {iteration + 1}", limited=False)
        while iteration < self.num_iterations:
            batch_size = self.batches.at(self.progress.consumed_samples)
            is_first = self._num_steps == 0
            what = "the first step of this start"
            with told_if_slow(what, log.line) if is_first else nullcontext():
                step = self._step()
                next(step)
                started.append(step)
            if is_first and (kernels := next(iter(self.model)).context.kernels) is not None:
                log.line(
                    f"{kernels.num_graphs} kernels were compiled in {kernels.seconds:.1f} s of the "
                    "first step; TORCHINDUCTOR_CACHE_DIR keeps them for the next start"
                )
            iteration = self.progress.iteration
            if self.saver is not None:
                self.saver.poll()
            ends = iteration == self.num_iterations
            evaluates = due(training.eval_interval) and not ends  # the end does so by itself
            saves = self.saver is not None and due(self.config.checkpoint.save_interval)
            reason, last = exits.now(), None
            if due(training.exit_interval):
                last = f"--exit-interval {training.exit_interval}"
            # An evaluation, a save or the end of the run needs the progress of all steps. Otherwise
            # one step's figures may stay on the GPU, so that reading them does not stall it.
            needs_all = waits or evaluates or saves or ends or reason or last
            while len(started) > (0 if needs_all else 1):
                next(started.pop(0), None)
            if due(training.check_weight_hash_across_dp_replicas_interval):
                self._compare_replicas()
            if evaluates:
                # If the run ends during the evaluation, the checkpoint records it as still due.
                self.progress = replace(self.progress, evaluation_is_due=True)
                reason = reason or self._evaluate("validation")
            if saves:
                self._save()
                reason = reason or exits.now()
            reason = reason or last
            if reason is not None and not ends:
                log.line(f"exiting at iteration {iteration}: {reason}")
                return False
            # The time of an evaluation or a save belongs to no iteration.
            if evaluates or saves:
                self._last_end = StepEnd(self.parallel.device)
            # The first iteration may compile kernels on some ranks, so it had the longer limit.
            if is_first and limit is not None:
                set_timeout(limit)
            # A step of a larger batch may take so many times as long as the one before.
            growth = self.batches.at(self.progress.consumed_samples) / batch_size
            exits.pulse.at(f"iteration {iteration + 1}", growth=max(1.0, growth))
        return True

    def _step(self) -> Iterator[None]:
        """Runs a step. Goes on, once it is asked to, with its figures: waits for the end of the
        step, reads and counts them, and logs them."""
        config, parallel, logging = self.config, self.parallel, self.config.logging
        iteration, before = self.progress.iteration + 1, self.progress.consumed_samples
        batch_size = self.batches.at(before)
        consumed = before + batch_size
        learning_rate = self.schedule.at(before)
        decoupled_learning_rate = self.schedule.decoupled_at(before)
        logged = iteration % logging.log_interval == 0 or iteration == self.num_iterations
        batches = replace(
            self.samples,
            consumed_samples=before,
            num_microbatches=self.batches.num_microbatches(batch_size),
            where=f"iteration {iteration}",
        )
        self._num_steps += 1
        look = None
        with ExitStack() as around:
            if self.profiler is not None:
                around.enter_context(self.profiler.step(iteration))
            if self._num_steps <= 2 or (logging.log_peak_memory and self.peak is None):
                look = around.enter_context(self._looks(iteration))
            if self.slow_ranks is not None:
                around.enter_context(self.slow_ranks.step(logged=logged))
            masked = None
            if config.data.eod_mask_loss:
                masked = masked_mean(
                    batches.counts(), parallel, per_token=config.training.calculate_per_token_loss
                )
            plain_step = partial(train_step, self.runner, self.optimizer)
            result = (plain_step if self.graphs is None else self.graphs.run)(
                batches,
                learning_rate=learning_rate,
                decoupled_learning_rate=decoupled_learning_rate,
                masked=masked,
                look=look,
            )
        self.progress = replace(self.progress, iteration=iteration, consumed_samples=consumed)
        figures = {
            "lm_loss": result.loss,
            "grad_norm": result.update.grad_norm,
            "skipped": result.update.skipped,
            "loss_scale": result.loss_scale,
        }
        if config.data.reset_attention_mask:
            # It takes a pass over the samples, so a row without it has the one before.
            if logged or self._attended is None:
                self._attended = batches.attended()
            figures["attended"] = self._attended
        if logged:
            if logging.log_params_norm:
                figures["params_norm"] = self.optimizer.params_norm()
            if logging.log_num_zeros_in_grad:
                figures["num_zeros"] = self.optimizer.num_zeros_in_grad()
            if config.model.num_experts is not None:
                from megatron_lite.model.router import router_figures

                figures |= router_figures(self.runner.routers, parallel, config.model, len(batches))
        end = StepEnd(parallel.device, **figures)
        yield
        read, seconds = end.read(self._last_end)
        found: dict[str, Any] = {
            name: int(value) if name in ("skipped", "num_zeros") else value
            for name, value in read.items()
        }
        self._last_end = end
        self.seconds.append(seconds)
        record = IterationRecord(
            iteration=iteration,
            consumed_samples=consumed,
            global_batch_size=batch_size,
            learning_rate=learning_rate,
            decoupled_learning_rate=decoupled_learning_rate,
            **found,
            **self.kept_bytes,
            nan=int(not math.isfinite(found["lm_loss"])),
            iteration_ms=seconds * 1000.0,
            tokens_per_second=batch_size * config.data.seq_length / seconds,
        )
        update, progress = None, self.progress
        if record.skipped:
            # Imported late: most runs skip nothing.
            from .skipped import judge

            update = judge(self, record, result)
            self.log.skipped(update)
            if self.optimizer.loss_scale is not None:  # it must not advance the learning rate
                samples_skipped = self.schedule.skipped_samples + batch_size
                self.schedule = replace(self.schedule, skipped_samples=samples_skipped)
        self.progress = replace(
            progress,
            skipped_iterations=progress.skipped_iterations + record.skipped,
            nan_iterations=progress.nan_iterations + record.nan,
            skipped_in_a_row=0 if update is None else update.in_a_row,
        )
        self.log.iteration(record)
        # This may end the run, so it comes after the row of the step is in the log.
        if update is not None:
            update.check(self)
        if logged:
            for line in self.slow_ranks.lines() if self.slow_ranks is not None else ():
                self.log.line(line)
            if self.timers is not None:
                since, self._reported = len(self.seconds) - self._reported, len(self.seconds)
                self.log.times(self.timers.report(since), iteration)

    @contextmanager
    def _looks(self, iteration: int) -> Iterator[Look | None]:
        """Looks at the step within the block. Yields what runs its first micro-batch, if anything.

        The first one of this start measures the kept bytes, and compares them with the prediction:
        a difference is a warning in the log, and an error under --recompute-verify. The second one
        measures its peak and records the memory timeline: its memory is that of all later steps. On
        a CPU torch's profiler measures the peak, and crashes inside another recording of its own.
        Then a later step is measured, the same one on all ranks.
        """
        config, path, look = self.config, self.config.logging.memory_timeline, None
        if self._num_steps == 1 and not config.compiles_layers:
            meter = ActivationMeter(config, self.parallel)
            yield meter.forward
            self.kept_bytes, fault = meter.result()
            if fault and config.recompute.recompute_verify:
                raise TrainingError(f"--recompute-verify: {fault}")
            if fault:
                self.log.line(f"warning: {fault}")
            return
        if self._num_steps == 2 and path is not None and self.parallel.rank == 0:
            look = partial(record_step, partial(self.log.attempt, path), path, config)
        traced = config.profiling.use_pytorch_profiler and config.profiling.records(iteration)
        measured = self._num_steps > 1 and measures_peak(config, self.parallel.device)
        if not measured or (traced and self.parallel.device.type == "cpu"):
            yield look
            return
        with peak_of_step(config, self.model, self.optimizer, self.parallel) as found:
            yield look
        (self.peak,) = found
        self.log.line(f"peak of a step, highest of all ranks: {self.peak}")

    def _compare_replicas(self) -> None:
        """Raises TrainingError if ranks that should hold the same weights no longer do."""
        if self.config.training.check_weight_hash_across_dp_replicas_interval is None:
            return
        from megatron_lite.supervision.slow_rank import replica_fault

        if fault := replica_fault(self.model, self.optimizer, self.parallel):
            raise TrainingError(
                f"iteration {self.progress.iteration}: ranks no longer hold the same weights: "
                f"{fault}. Continue from a checkpoint before it, without the node of that rank if "
                "it happens again"
            )

    def _evaluate(self, name: str) -> str | None:
        """Logs the validation or test loss. Returns what ended the run meanwhile, else None."""
        reason = None
        if self.config.training.eval_iters:
            # Imported late: a run with --eval-iters 0 has none.
            from .evaluate import log_loss

            reason = log_loss(self, name)
        if reason is None:
            self.progress = replace(self.progress, evaluation_is_due=False)
        return reason

    def _load(self) -> list[str]:
        """Loads the step that `--load` chose, if it is given. Returns lines for the log."""
        start, self.start = self.start, None  # the files are open for as long as it is kept
        if start is None:
            return []
        from megatron_lite.checkpointing.state import load_checkpoint

        with told_by_rank_0("loading the checkpoint", self.parallel.rank):
            notices = load_checkpoint(
                start,
                self.config,
                self.parallel,
                self.model,
                self.optimizer,
                data=self.datasets.identity,
            )
        self.progress, saved = start.progress, start.saved
        if self.config.checkpoint.continues and saved is not None:
            self._saved_at = self.progress.iteration
            self.exits.pulse.saved = saved.path
            before, now = saved.metadata.computed_on, described(self.parallel.device)
            if before not in ("", now):
                notices.append(
                    f"the checkpoint was computed on {before}; this run computes on {now}, so its "
                    "results can have other low bits than those of a run that stayed there"
                )
        return notices

    def _save(self) -> None:
        """Saves the run under `--save`, unless this iteration has been saved already.

        Raises TrainingError if a weight is not finite. If a rank cannot write, a line of the log
        says so, and the run goes on.
        """
        iteration, log, saver = self.progress.iteration, self.log, self.saver
        if saver is None or iteration == 0:
            return
        self.exits.pulse.at(f"iteration {iteration} (saving)", limited=False)
        saver.wait()  # for as long as the disk needs
        if iteration == self._saved_at and saver.failure is None:
            return
        from megatron_lite.checkpointing.state import take_snapshot

        if not math.isfinite(self.optimizer.params_norm().item()):
            raise TrainingError(
                f"iteration {iteration}: a weight is not finite, so no checkpoint is written. "
                "Lower --lr, and continue from an earlier checkpoint"
            )
        self._compare_replicas()
        log.line(f"saving checkpoint at iteration {iteration:7d} to {self.config.checkpoint.save}")
        began = time.perf_counter()
        with told_if_slow("saving the checkpoint", log.line):
            snapshot = take_snapshot(
                self.config,
                self.parallel,
                self.model,
                self.optimizer,
                self.progress,
                data=self.datasets.identity,
                copy=saver.copies,
                schedule=self.schedule,
                computed_on=described(self.parallel.device),
                tokenizer=saver.tokenizer,
            )
            saver.save(snapshot)
        if saver.copies:
            log.line(
                f"  training waited {(time.perf_counter() - began) * 1000.0:.1f} ms for the "
                "copy, which is now written"
            )
        self._saved_at = iteration
