"""The progress of a run.

With the weights, the optimizer states and the random-number streams, this is all that resuming
needs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_lite.checkpointing.step_files import MOST_ITERATIONS
from megatron_lite.config import plain

MOST_SAMPLES = 2**62


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run.

    iteration: how many iterations are done.
    consumed_samples: how many samples they have read.
    skipped_iterations: how many of them changed no weight.
    nan_iterations: how many of them had a NaN loss.
    evaluation_is_due: whether the run stopped before or in the evaluation after this iteration.
    skipped_in_a_row: how many of the last iterations in a row changed no weight. The overflows of
    a float16 run do not count.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    evaluation_is_due: bool = False
    skipped_in_a_row: int = 0

    @classmethod
    def from_plain(cls, values: object) -> Progress:
        """Reads a JSON object. Only `iteration` and `consumed_samples` must be present.

        Raises ValueError on numbers that no run has.
        """
        found = plain.as_object(values, "progress")
        plain.check_names(found, [field.name for field in fields(cls)], "progress")
        iteration = plain.whole(found, "iteration", 0, MOST_ITERATIONS)
        skipped, nan, in_a_row = (
            plain.whole(found, name, 0, iteration) if name in found else 0
            for name in ("skipped_iterations", "nan_iterations", "skipped_in_a_row")
        )
        return cls(
            iteration=iteration,
            consumed_samples=plain.whole(found, "consumed_samples", 0, MOST_SAMPLES),
            skipped_iterations=skipped,
            nan_iterations=nan,
            skipped_in_a_row=in_a_row,
            evaluation_is_due="evaluation_is_due" in found
            and plain.boolean(found, "evaluation_is_due"),
        )
