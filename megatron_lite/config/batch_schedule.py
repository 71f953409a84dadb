"""The global batch size as a pure function of the samples consumed so far: constant, or ramped up in equal steps.

    samples of an iteration
    full  |              .________
          |        ______|            --rampup-batch-size START INCREMENT SAMPLES, with Megatron's arithmetic
    START |_______|
          0           SAMPLES    consumed so far
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """Sizes are samples over all ranks. From `start` the batch grows by `increment` while `ramp_samples` are consumed.

    samples_per_microbatch: --micro-batch-size x data-parallel size, which divides every size. A constant batch: start = full.
    """

    full: int
    samples_per_microbatch: int
    start: int
    increment: int = 0
    ramp_samples: int = 0

    @classmethod
    def constant(cls, batch_size: int, *, samples_per_microbatch: int = 1) -> BatchSchedule:
        """The same batch in every iteration."""
        return cls(full=batch_size, samples_per_microbatch=samples_per_microbatch, start=batch_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size that an iteration may have, in order."""
        return tuple(range(self.start, self.full, self.increment or 1)) + (self.full,)

    def at(self, consumed_samples: int) -> int:
        """Samples of the iteration that starts after `consumed_samples`."""
        if self.start == self.full or consumed_samples > self.ramp_samples:
            return self.full
        increments = (self.full - self.start) // self.increment
        return self.start + int(consumed_samples / (self.ramp_samples / increments)) * self.increment  # rounded as Megatron's

    def num_microbatches(self, batch_size: int) -> int:
        """Micro-batches that each rank runs for a batch of this size."""
        return batch_size // self.samples_per_microbatch

    def consumed_after(self, iterations: int, *, consumed: int = 0) -> int:
        """Samples consumed once that many iterations have run, beginning after `consumed`."""
        while iterations > 0 and consumed <= self.ramp_samples:
            consumed, iterations = consumed + self.at(consumed), iterations - 1
        return consumed + max(0, iterations) * self.full

    def iterations_within(self, samples: int, *, consumed: int = 0) -> int:
        """Iterations after `consumed` that end within `samples`; what is left over is less than the next batch."""
        iterations = 0
        while consumed <= self.ramp_samples and consumed + self.at(consumed) <= samples:
            consumed, iterations = consumed + self.at(consumed), iterations + 1
        return iterations + max(0, samples - consumed) // self.full
