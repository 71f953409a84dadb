"""Updates that change no weight. They are counted and logged. Too many in a row end the run.

    not finite   the loss, or a gradient of any rank, is NaN or infinite
    overflow     only a gradient is not finite, in a float16 run whose loss scale can still be
                 lowered. That is no fault and never ends a run.
    spike        the loss is above --skip-update-on-spike times its running mean

The samples of each are appended to DIR/skipped_batches.jsonl of --save DIR. A user can look at them
or leave them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_lite.optim.layouts import Piece
from megatron_lite.parallel.messages import by_rank

from .iteration_line import IterationRecord
from .step import StepResult, TrainingError
from .terminal import SKIPPED_BATCHES

if TYPE_CHECKING:
    from .loop import Trainer

LOSS = "its loss"
SPIKES_IN_A_ROW = 10  # so many end a run without --max-skipped-updates


class SkippedUpdate(NamedTuple):
    """A row of skipped_batches.jsonl.

    reason: "not finite", "overflow" or "spike".
    first_sample, num_samples: the samples, numbered in the order in which the run reads its data.
    in_a_row: the number of consecutive skipped updates, this one included. Overflows do not count.
    mean_loss: the running mean that a spike exceeded, else None.
    found_on: the ranks whose loss or gradient was not finite, as text.
    documents: the numbers of the samples' documents by .bin file, ascending. {} except on rank 0.
    """

    iteration: int
    reason: str
    first_sample: int
    num_samples: int
    in_a_row: int
    lm_loss: float
    mean_loss: float | None
    grad_norm: float
    loss_scale: float
    found_on: str
    documents: dict[str, list[int]]

    def line(self) -> str:
        """Returns the line for the log."""
        last = self.first_sample + self.num_samples - 1
        spike = (
            f", {self.lm_loss / self.mean_loss:.2f} x its running mean {self.mean_loss:.4f}"
            if self.mean_loss
            else ""
        )
        found_on = f"; not finite on {self.found_on}" if self.found_on else ""
        return (
            f"skipped update of iteration {self.iteration}, number {self.in_a_row} in a row "
            f"({self.reason}): lm loss {self.lm_loss:.6E}{spike}, grad norm {self.grad_norm:.3f}, "
            f"samples {self.first_sample} to {last}{found_on}"
        )

    def check(self, trainer: Trainer) -> None:
        """Raises TrainingError if the run ends with this update, on all ranks alike."""
        config, reason, scaling = trainer.config.training, self.reason, trainer.optimizer.loss_scale
        first_is_last = 1 if config.check_for_nan_in_loss_and_grad else None
        limit = {
            "overflow": None,
            "spike": config.max_skipped_updates or SPIKES_IN_A_ROW,
            "not finite": config.max_skipped_updates or first_is_last,
        }[reason]
        if limit is None or self.in_a_row < limit:
            return
        counted = f"{self.in_a_row} updates in a row were skipped (--max-skipped-updates {limit})"
        start = f"iteration {self.iteration}: the loss is {self.lm_loss}"
        if reason == "spike":
            raise TrainingError(
                f"{start}, more than --skip-update-on-spike {config.skip_update_on_spike} times "
                f"its running mean {self.mean_loss}, and {counted}. Lower --lr, or look at the "
                f"samples in {SKIPPED_BATCHES}, and continue from the last checkpoint"
            )
        scale = ""
        if scaling is not None:
            scale = f", with loss scale {self.loss_scale} (at least {scaling.minimum})"
        found = f" ({self.found_on})" if self.found_on else ""
        if config.max_skipped_updates is None:
            counted = (
                "with --max-skipped-updates N such iterations are skipped and counted, up to N in "
                "a row"
            )
        raise TrainingError(
            f"{start} and the gradient norm {self.grad_norm}{scale}{found}, so no weight was "
            f"changed. Lower --lr or raise --lr-warmup-iters; {counted}"
        )


def judge(trainer: Trainer, record: IterationRecord, result: StepResult) -> SkippedUpdate:
    """Returns the row of one skipped update. Every rank must call this.

    trainer: with the progress of the iterations before it.
    Gathers a text from every rank, unless it is a spike. Only rank 0's row has documents.
    """
    parallel, optimizer = trainer.parallel, trainer.optimizer
    finite = math.isfinite(record.grad_norm)  # a loss that is not finite makes the norm so too
    origins = [] if finite else parallel.gathered(_not_finite(result, optimizer.layout.pieces))
    if LOSS in origins:  # gradients of other ranks are its consequence
        origins = [text if text == LOSS else "" for text in origins]
    scaling = optimizer.loss_scale
    overflow = (
        not finite
        and LOSS not in origins
        and scaling is not None
        and record.loss_scale > scaling.minimum
    )
    first, size = record.consumed_samples - record.global_batch_size, record.global_batch_size
    documents: dict[str, set[int]] = {}  # of all data-parallel ranks
    for rank in range(0 if parallel.rank else parallel.dp_size):
        for number in range(trainer.batches.num_microbatches(size)):
            place = trainer.config.training.micro_batch_size, rank, parallel.dp_size, number
            for sample in trainer.samples.order(first, *place):
                for file, found in trainer.datasets.train.documents(sample).items():
                    documents.setdefault(file, set()).update(found)
    return SkippedUpdate(
        iteration=record.iteration,
        reason="spike" if finite else "overflow" if overflow else "not finite",
        first_sample=first,
        num_samples=size,
        in_a_row=trainer.progress.skipped_in_a_row + (not overflow),
        lm_loss=record.lm_loss,
        grad_norm=record.grad_norm,
        loss_scale=record.loss_scale,
        mean_loss=result.mean_loss.item() if finite and result.mean_loss is not None else None,
        found_on=by_rank(origins),
        documents={file: sorted(found) for file, found in documents.items()},
    )


def _not_finite(result: StepResult, pieces: Sequence[Piece]) -> str:
    """Returns the first thing on this rank that is not finite, or "". Reads the device.

    The order is: its loss, its own gradient (if measured, else the summed gradient of its pieces).
    """
    if not math.isfinite(result.own_loss.item()):
        return LOSS
    own = result.update.own_grad_norm
    if own is not None and math.isfinite(own.item()):
        return ""
    finite = result.update.piece_norms.isfinite().tolist()
    names = [piece.name for piece, one in zip(pieces, finite, strict=False) if not one]
    first = f" of {names[0]}" if names else ""
    if own is not None:
        return f"its gradient{first}"
    return f"the gradient{first}" if names else ""
