"""The global batch size as a pure function of the samples consumed so far.

The size is constant, or it grows in equal steps: --rampup-batch-size START INCREMENT SAMPLES. The
arithmetic is Megatron's.

    samples of an iteration
    full  |              .________
          |        ______|
    START |_______|
          0           SAMPLES    consumed so far
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The batch size over a run, in samples over all ranks.

    full: the size at the end of the ramp. A constant batch has start = full.
    samples_per_microbatch: --micro-batch-size x data-parallel size, which divides every size.
    start, increment: the first size, and the number of samples that each step of the ramp adds.
    ramp_samples: the number of samples that are consumed while the batch grows.
    """

    full: int
    samples_per_microbatch: int
    start: int
    increment: int = 0
    ramp_samples: int = 0

    @classmethod
    def constant(cls, batch_size: int, *, samples_per_microbatch: int = 1) -> BatchSchedule:
        """Returns a schedule with the same batch size in every iteration."""
        return cls(full=batch_size, samples_per_microbatch=samples_per_microbatch, start=batch_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes that an iteration may have, in increasing order."""
        return tuple(range(self.start, self.full, self.increment or 1)) + (self.full,)

    def at(self, consumed_samples: int) -> int:
        """Returns the batch size of the iteration that starts after `consumed_samples`."""
        if self.start == self.full or consumed_samples > self.ramp_samples:
            return self.full
        increments = (self.full - self.start) // self.increment
        # This float division rounds exactly as Megatron's.
        return (
            self.start + int(consumed_samples / (self.ramp_samples / increments)) * self.increment
        )

    def sizes_from(self, consumed: int, *, num_iterations: int) -> tuple[int, ...]:
        """Returns the sizes of the iterations that begin after `consumed` samples.

        Each size comes once, in increasing order. A short ramp may leave sizes out.

        num_iterations: the number of these iterations.
        """
        sizes: dict[int, None] = {}
        while num_iterations > 0 and consumed <= self.ramp_samples:
            size = self.at(consumed)
            sizes[size] = None
            consumed, num_iterations = consumed + size, num_iterations - 1
        return (*sizes, *((self.full,) if num_iterations > 0 and self.full not in sizes else ()))

    def num_microbatches(self, batch_size: int) -> int:
        """Returns the number of micro-batches that each rank runs for a batch of this size."""
        return batch_size // self.samples_per_microbatch

    def consumed_after(self, iterations: int, *, consumed: int = 0) -> int:
        """Returns the number of samples consumed after so many iterations.

        consumed: the number of samples consumed before the first of them.
        """
        while iterations > 0 and consumed <= self.ramp_samples:
            consumed, iterations = consumed + self.at(consumed), iterations - 1
        return consumed + max(0, iterations) * self.full

    def iterations_within(self, samples: int, *, consumed: int = 0) -> int:
        """Returns the number of whole iterations that fit between `consumed` and `samples` samples.

        The samples that are left over are fewer than the next batch.
        """
        iterations = 0
        while consumed <= self.ramp_samples and consumed + self.at(consumed) <= samples:
            consumed, iterations = consumed + self.at(consumed), iterations + 1
        return iterations + max(0, samples - consumed) // self.full
