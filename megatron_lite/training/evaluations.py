"""The evaluations of a run: its validation loss at intervals, and both losses at its end."""

from __future__ import annotations

import math

from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.run import RunConfig
from megatron_lite.supervision.exits import Exits
from megatron_lite.supervision.pulse import Pulse
from megatron_lite.training.batches import SampleDataset
from megatron_lite.training.document_positions import DocumentRules
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.logging import RunLog
from megatron_lite.training.sample_order import sample_order
from megatron_lite.training.step import StageRunner, TrainingError


class Evaluations:
    """Evaluates losses with the full batch size of a run, and logs them.

    pulse: tells before each batch where this rank is.
    rules: what the ends of documents mean; None: nothing.
    """

    def __init__(
        self,
        config: RunConfig,
        runner: StageRunner,
        batches: BatchSchedule,
        pulse: Pulse,
        rules: DocumentRules | None = None,
    ) -> None:
        self._config, self._runner, self._rules = config, runner, rules
        self._batches, self._pulse = batches, pulse

    def log_loss(
        self, name: str, dataset: SampleDataset | None, *, iteration: int, log: RunLog, exits: Exits
    ) -> str | None:
        """Evaluates the loss over `dataset` and logs it.

        Returns None, or a reason if something ended the run meanwhile. The log has no loss then.
        iteration: the iteration after which the loss is evaluated.
        Raises TrainingError if the loss is not finite and --check-for-nan-in-loss-and-grad is on.
        """
        training = self._config.training
        if training.eval_iters == 0:
            return None
        if dataset is None:
            data = self._config.data
            without = (
                "no data is given for it"
                if data.is_per_split
                else f"--split {data.split!r} leaves no documents for it: give it a larger "
                "share, or more documents"
            )
            log.line(f"no {name} loss: {without}")
            return None
        reason, where = None, f"iteration {iteration} ({name} loss)"

        def stops() -> bool:
            nonlocal reason
            self._pulse.at(where)
            reason = exits.now()
            return reason is not None

        work = f"evaluating the {name} loss over {training.eval_iters} global batches"
        log.detail(f"{work} (--eval-iters)")
        with log.slow(work):
            result = evaluate(
                self._runner,
                dataset,
                num_iterations=training.eval_iters,
                num_microbatches=self._batches.num_microbatches(self._batches.full),
                micro_batch_size=training.micro_batch_size,
                order=sample_order(self._config.data, len(dataset)),
                where=where,
                stops=stops,
                rules=self._rules,
            )
        if result is None:
            log.line(f"the {name} loss is left unfinished: {reason}")
            return reason
        log.evaluation(name, iteration, result)
        if training.check_for_nan_in_loss_and_grad and not math.isfinite(result.loss):
            raise TrainingError(
                f"iteration {iteration}: the {name} loss is {result.loss}. Lower "
                "--lr; --no-check-for-nan-in-loss-and-grad goes on nevertheless"
            )
        return None
