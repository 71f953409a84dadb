"""The work that is due after an iteration, by the intervals of the run."""

from __future__ import annotations

from typing import NamedTuple

from megatron_lite.config.run import RunConfig


class Due(NamedTuple):
    """The work that is due after an iteration.

    evaluation: the validation loss of --eval-interval. The end of the run evaluates by itself.
    save: the checkpoint of --save-interval.
    replica_check: the comparison of the data-parallel ranks' weights.
    end: whether the run has reached its last iteration.
    """

    evaluation: bool
    save: bool
    replica_check: bool
    end: bool

    @classmethod
    def after(cls, iteration: int, config: RunConfig, *, num_iterations: int) -> Due:
        """Returns the work after an iteration, counted from 1, of a run of `num_iterations`."""
        training, end = config.training, iteration == num_iterations
        return cls(
            evaluation=_is_at(iteration, training.eval_interval) and not end,
            save=_is_at(iteration, config.checkpoint.save_interval),
            replica_check=_is_at(iteration, training.check_weight_hash_across_dp_replicas_interval),
            end=end,
        )

    @property
    def needs_progress(self) -> bool:
        """Tells whether the work needs the progress of every step so far."""
        return self.evaluation or self.save or self.end


def _is_at(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
