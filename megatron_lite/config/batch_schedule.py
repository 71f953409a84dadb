"""The global batch size as a pure function of the samples consumed so far.

The size is constant, or it grows in equal steps (--rampup-batch-size START INCREMENT SAMPLES), or
it changes at given numbers of tokens (--step-batch-size-schedule). The arithmetic is Megatron's.

    samples of an iteration
    full  |              .________
          |        ______|
    START |_______|
          0           SAMPLES    consumed so far
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_lite.config.plain import shown

STEP = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBT]?):([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBT]?)",
    re.IGNORECASE,
)
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
MOST_STEPS = 10_000


def parse_steps(text: str) -> tuple[tuple[int, int], ...]:
    """Returns the steps of a text such as "0:16 2.4B:320 4.8B:624", in increasing order.

    Each step is (tokens, size): once the run has consumed so many tokens, an iteration takes `size`
    samples. Spaces or commas separate the steps. The suffixes K, M, B and T multiply a number by
    1e3, 1e6, 1e9 and 1e12.

    Raises ValueError for any other text, and unless the first step is at 0 tokens.
    """
    name = f"--step-batch-size-schedule {shown(repr(text))}"
    words = text.replace(",", " ").split()
    if len(words) > MOST_STEPS:
        raise ValueError(f"{name}: {len(words)} steps are too many, give at most {MOST_STEPS}")
    steps = []
    for word in words:
        found = STEP.fullmatch(word)
        if found is None:
            raise ValueError(
                f"{name}: {shown(repr(word))} is no TOKENS:SAMPLES; give steps such as "
                "'0:768 250B:1536'"
            )
        # This float product is rounded exactly as Megatron's.
        tokens, size = (
            int(float(number) * SUFFIXES[suffix.upper()])
            for number, suffix in (found.groups()[:2], found.groups()[2:])
        )
        if size < 1:
            raise ValueError(f"{name}: a batch of {size} samples; give at least 1")
        steps.append((tokens, size))
    steps.sort(key=lambda step: step[0])
    if not steps or steps[0][0] != 0:
        raise ValueError(f"{name}: the first batch has no size; begin with 0:SAMPLES")
    return tuple(steps)


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The batch size over a run, in samples over all ranks.

    full: the size at the end of the ramp. A constant batch has start = full.
    samples_per_microbatch: --micro-batch-size x data-parallel size, which divides every size.
    start, increment: the first size, and the number of samples that each step of the ramp adds.
    ramp_samples: the number of samples that are consumed while the batch grows. After it the size
        is `full`.
    steps: (samples, size) of --step-batch-size-schedule, in increasing order of consumed samples.
        An empty tuple: the size is constant or grows by the increment.
    """

    full: int
    samples_per_microbatch: int
    start: int
    increment: int = 0
    ramp_samples: int = 0
    steps: tuple[tuple[int, int], ...] = ()

    @classmethod
    def in_steps(
        cls, steps: tuple[tuple[int, int], ...], *, samples_per_microbatch: int
    ) -> BatchSchedule:
        """Returns the schedule of steps (samples, size), of which the first is at 0 samples."""
        return cls(
            full=steps[-1][1],
            samples_per_microbatch=samples_per_microbatch,
            start=steps[0][1],
            ramp_samples=steps[-1][0],
            steps=steps,
        )

    @classmethod
    def constant(cls, batch_size: int, *, samples_per_microbatch: int = 1) -> BatchSchedule:
        """Returns a schedule with the same batch size in every iteration."""
        return cls(full=batch_size, samples_per_microbatch=samples_per_microbatch, start=batch_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes that an iteration may have, in increasing order."""
        if self.steps:
            return tuple(sorted({size for _, size in self.steps}))
        return tuple(range(self.start, self.full, self.increment or 1)) + (self.full,)

    @property
    def largest(self) -> int:
        """The largest size that an iteration may have. Steps may end with a smaller one."""
        return self.sizes[-1]

    def at(self, consumed_samples: int) -> int:
        """Returns the batch size of the iteration that starts after `consumed_samples`."""
        if self.steps:
            return next(
                size for samples, size in reversed(self.steps) if consumed_samples >= samples
            )
        if self.start == self.full or consumed_samples > self.ramp_samples:
            return self.full
        increments = (self.full - self.start) // self.increment
        # This float division rounds exactly as Megatron's.
        return (
            self.start + int(consumed_samples / (self.ramp_samples / increments)) * self.increment
        )

    def sizes_from(self, consumed: int, *, num_iterations: int) -> tuple[int, ...]:
        """Returns the sizes of the iterations that begin after `consumed` samples.

        Each size comes once, in the order of the run. A short ramp may leave sizes out.

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
        # Within the ramp one iteration after the other; behind it every batch is full.
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
        if consumed + self.at(consumed) > samples:
            return iterations
        return iterations + (samples - consumed) // self.full
