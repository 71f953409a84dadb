"""The batch size by consumed samples: Megatron's rule, and what follows from it for the length of a
run."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.batch_schedule import BatchSchedule, parse_steps
from megatron_lite.config.training import TrainingConfig


def ramp(
    start: int,
    increment: int,
    samples: int,
    full: int,
    *,
    micro_batch_size: int = 1,
    dp_size: int = 1,
) -> BatchSchedule:
    return TrainingConfig(
        micro_batch_size=micro_batch_size,
        global_batch_size=full,
        rampup_batch_size=(start, increment, samples),
    ).batch_schedule(dp_size)


@st.composite
def ramps(draw: st.DrawFn) -> BatchSchedule:
    """Sizes that are multiples of up to 6 samples, and every kind of ramp: shorter and longer than
    its steps."""
    step, start, increment = (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 9)),
    )
    full = start + increment * draw(st.integers(1, 9))
    return ramp(
        start * step, increment * step, draw(st.integers(1, 700)), full * step, dp_size=step
    )


@given(ramps())
@pytest.mark.filterwarnings("ignore")  # its imports warn of packages that it can do without
def test_every_batch_of_a_ramp_equals_megatron_core(schedule: BatchSchedule) -> None:
    calculator = pytest.importorskip(
        "megatron.core.num_microbatches_calculator"
    ).RampupBatchsizeNumMicroBatchesCalculator
    oracle = calculator(
        schedule.full,
        1,
        schedule.samples_per_microbatch,
        False,
        1,
        schedule.start,
        schedule.increment,
        schedule.ramp_samples,
    )
    for consumed in range(0, schedule.ramp_samples + 2 * schedule.full):
        oracle.update(consumed, consistency_check=True)
        size = schedule.at(consumed)
        assert (size, schedule.num_microbatches(size)) == (
            oracle.current_running_global_batch_size,
            oracle.num_micro_batches,
        )


@given(ramps(), st.integers(0, 900), st.integers(0, 60))
def test_the_sizes_that_a_run_still_has_are_those_of_its_iterations(
    schedule: BatchSchedule, consumed: int, iterations: int
) -> None:
    sizes, so_far = [], consumed
    for _ in range(iterations):
        sizes.append(schedule.at(so_far))
        so_far += sizes[-1]
    assert list(schedule.sizes_from(consumed, num_iterations=iterations)) == list(
        dict.fromkeys(sizes)
    )


@given(ramps(), st.integers(0, 60), st.integers(0, 1500), st.integers(0, 900))
def test_lengths_are_those_of_a_loop_over_iterations(
    schedule: BatchSchedule, iterations: int, samples: int, consumed: int
) -> None:
    after = list(
        itertools.accumulate(
            range(1600), lambda so_far, _: so_far + schedule.at(so_far), initial=consumed
        )
    )
    assert schedule.consumed_after(iterations, consumed=consumed) == after[iterations]
    assert schedule.iterations_within(samples, consumed=consumed) == sum(
        end <= samples for end in after[1:]
    )


def megatrons_iterations(training: TrainingConfig, schedule: BatchSchedule) -> int:
    """Megatron's update_train_iters for a ramp that ends before the run does."""
    args: Any = SimpleNamespace(samples=training.train_samples, ramp=schedule.ramp_samples)
    iterations = consumed = 0
    while consumed <= args.ramp:
        consumed += schedule.at(consumed)
        iterations += 1
    return iterations + (args.samples - consumed) // schedule.full


@given(ramps(), st.integers(0, 500))
def test_a_run_in_samples_has_as_many_iterations_as_in_megatron(
    schedule: BatchSchedule, more: int
) -> None:
    training = TrainingConfig(
        micro_batch_size=1,
        global_batch_size=schedule.full,
        train_samples=schedule.ramp_samples + schedule.full + more,
    )
    assert training.num_iterations(schedule) == megatrons_iterations(training, schedule)


@pytest.mark.parametrize(
    ("sizes", "dp_size", "message"),
    [
        (
            (6, 4, 9, 14),
            2,
            (
                "--global-batch-size 14 is not divisible by --micro-batch-size 2 x data-parallel "
                "size 2 = 4"
            ),
        ),
        (
            (6, 5, 9, 16),
            2,
            (
                "--rampup-batch-size 6 5 9: the start 6 is not divisible by --micro-batch-size 2 x "
                "data-parallel"
            ),
        ),
        (
            (4, 6, 9, 16),
            2,
            (
                "--rampup-batch-size 4 6 9: the increment 6 is not divisible by --micro-batch-size "
                "2 x data-parallel"
            ),
        ),
    ],
)
def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(
    sizes: tuple[int, int, int, int], dp_size: int, message: str
) -> None:
    with pytest.raises(ValueError) as fault:
        ramp(*sizes, micro_batch_size=2, dp_size=dp_size)
    assert message in str(fault.value)
    assert ramp(*sizes, micro_batch_size=1, dp_size=1).sizes[0] == sizes[0]


def test_a_run_shorter_than_its_first_batch_is_refused() -> None:
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=8, rampup_batch_size=(4, 4, 9), train_samples=3
    )
    with pytest.raises(
        ValueError, match=r"--train-samples 3 is less than one start of --rampup-batch-size \(4\)"
    ):
        training.num_iterations(training.batch_schedule(1))


@st.composite
def steps(draw: st.DrawFn) -> BatchSchedule:
    """Sizes that grow and shrink, at samples that no batch needs to begin with."""
    samples = sorted(draw(st.sets(st.integers(1, 300), max_size=5)))
    sizes = [draw(st.integers(1, 20)) for _ in range(len(samples) + 1)]
    return BatchSchedule.in_steps(
        tuple(zip((0, *samples), sizes, strict=True)), samples_per_microbatch=1
    )


@given(steps(), st.integers(0, 400), st.integers(0, 60), st.integers(0, 1000))
def test_a_schedule_in_steps_is_that_of_a_loop_over_samples(
    schedule: BatchSchedule, consumed: int, iterations: int, samples: int
) -> None:
    size_at, size = [], 0
    for sample in range(1800):
        size = dict(schedule.steps).get(sample, size)
        size_at.append(size)
    assert [schedule.at(sample) for sample in range(500)] == size_at[:500]
    after, sizes = consumed, []
    for _ in range(iterations):
        sizes.append(size_at[after])
        after += sizes[-1]
    assert schedule.consumed_after(iterations, consumed=consumed) == after
    assert schedule.sizes_from(consumed, num_iterations=iterations) == tuple(dict.fromkeys(sizes))
    within, after = 0, consumed
    while after + size_at[after] <= samples:
        within, after = within + 1, after + size_at[after]
    assert schedule.iterations_within(samples, consumed=consumed) == within
    assert schedule.largest == max(size for _, size in schedule.steps)


def test_the_steps_of_nvidias_175b_example() -> None:
    text = "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=1536, step_batch_size_schedule=text
    )
    assert parse_steps(text.replace(" ", ", ")) == (
        (0, 16),
        (2_400_000_000, 320),
        (4_800_000_000, 624),
        (7_200_000_000, 928),
        (9_600_000_000, 1232),
        (12_000_000_000, 1536),
    )
    schedule = training.batch_schedule(8, seq_length=2048)
    assert schedule.steps[1] == (1_171_875, 320)
    assert [schedule.at(samples) for samples in (0, 1_171_874, 1_171_875, 10**9)] == [
        16,
        16,
        320,
        1536,
    ]
    assert training == TrainingConfig(micro_batch_size=1, step_batch_size_schedule=text)


def test_two_steps_at_one_sample_are_refused() -> None:
    training = TrainingConfig(micro_batch_size=1, step_batch_size_schedule="0:4 100:8 101:12")
    with pytest.raises(ValueError, match="two steps are at sample 25 of --seq-length 4 tokens"):
        training.batch_schedule(1, seq_length=4)
    assert training.batch_schedule(1, seq_length=1).sizes == (4, 8, 12)
