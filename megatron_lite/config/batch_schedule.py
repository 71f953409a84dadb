"""The global batch size as a pure function of the samples consumed so far.

The size is constant, or it grows in equal steps (--rampup-batch-size START INCREMENT SAMPLES), or
it changes at given numbers of tokens (--step-batch-size-schedule). The arithmetic is Megatron's.

    samples of an iteration
    full  |              .________
          |        ______|
    START |_______|
          0           SAMPLES    consumed so far
"""

import bisect
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .checks import quoted

STEP = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBT]?):([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBT]?)",
    re.IGNORECASE,
)
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
MOST_STEPS = 10_000
Steps = tuple[tuple[int, int], ...]
ENDLESS = 2**63  # iterations


def parse_steps(text: str) -> Steps:
    """Returns the steps of a text such as "0:16 2.4B:320 4.8B:624", in increasing order.

    Each step is (tokens, size): once the run has consumed so many tokens, an iteration takes `size`
    samples. Spaces or commas separate the steps. The suffixes K, M, B and T multiply a number by
    1e3, 1e6, 1e9 and 1e12.

    Raises ValueError for any other text, and unless the first step is at 0 tokens.
    """
    name = f"--step-batch-size-schedule {quoted(text)}"
    words = text.replace(",", " ").split()
    if len(words) > MOST_STEPS:
        raise ValueError(f"{name}: {len(words)} steps are too many, give at most {MOST_STEPS}")
    steps = []
    for word in words:
        found = STEP.fullmatch(word)
        if found is None:
            raise ValueError(
                f"{name}: {quoted(word)} is no TOKENS:SAMPLES; give steps such as '0:768 250B:1536'"
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


def ramp_steps(start: int, increment: int, ramp_samples: int, full: int) -> Steps:
    """Returns (samples, size) of each step of --rampup-batch-size."""
    number = (full - start) // increment

    def steps_done(consumed: int) -> int:
        # This float division rounds exactly as Megatron's.
        return number if consumed > ramp_samples else int(consumed / (ramp_samples / number))

    begin = range(ramp_samples + 2)
    return tuple(
        (bisect.bisect_left(begin, done, key=steps_done), start + done * increment)
        for done in range(number + 1)
    )


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The batch size over a run, in samples over all ranks.

    steps: (samples, size): the size of the iterations that begin after so many samples, in
        increasing order. The first is at 0 samples. A constant batch has one step.
    samples_per_microbatch: --micro-batch-size x data-parallel size, which divides every size.
    """

    steps: Steps
    samples_per_microbatch: int = 1

    @property
    def full(self) -> int:
        """The size at the end of the schedule."""
        return self.steps[-1][1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes that an iteration may have, in increasing order."""
        return tuple(sorted({size for _, size in self.steps}))

    def at(self, consumed_samples: int) -> int:
        """Returns the batch size of the iteration that starts after `consumed_samples`."""
        return self.steps[bisect.bisect_right(self.steps, (consumed_samples, ENDLESS)) - 1][1]

    def _spans(
        self, consumed: int, iterations: int = ENDLESS, samples: int = ENDLESS
    ) -> Iterator[tuple[int, int]]:
        """Yields (size, number of iterations with it) from `consumed` samples on, until so many
        iterations have run, or so many samples leave too few for another one."""
        for (_, size), (end, _) in itertools.pairwise([*self.steps, (ENDLESS, 0)]):
            if consumed < end:
                number = min(-(-(end - consumed) // size), iterations, (samples - consumed) // size)
                if number > 0:
                    yield size, number
                consumed += number * size
                iterations -= number
                if consumed < end:
                    return

    def sizes_from(self, consumed: int, *, num_iterations: int) -> tuple[int, ...]:
        """Returns the sizes of the iterations that begin after `consumed` samples.

        Each size comes once, in the order of the run. A short ramp may leave sizes out.

        num_iterations: the number of these iterations.
        """
        return tuple(dict.fromkeys(size for size, _ in self._spans(consumed, num_iterations)))

    def num_microbatches(self, batch_size: int) -> int:
        """Returns the number of micro-batches that each rank runs for a batch of this size."""
        return batch_size // self.samples_per_microbatch

    def consumed_after(self, iterations: int, *, consumed: int = 0) -> int:
        """Returns the number of samples consumed after so many iterations.

        consumed: the number of samples consumed before the first of them.
        """
        return consumed + sum(map(math.prod, self._spans(consumed, iterations)))

    def iterations_within(self, samples: int, *, consumed: int = 0) -> int:
        """Returns the number of whole iterations that fit between `consumed` and `samples` samples.

        The samples that are left over are fewer than the next batch.
        """
        return sum(number for _, number in self._spans(consumed, samples=samples))
