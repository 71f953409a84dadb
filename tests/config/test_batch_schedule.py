"""The batch size by consumed samples: Megatron's rule, and what follows from it for the length of a
run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.batch_schedule import BatchSchedule, parse_steps
from megatron_lite.config.training import TrainingConfig


def ramp(start, increment, samples, full, **sizes):
    """sizes: micro_batch_size and dp_size, where they are not 1."""
    return TrainingConfig(
        micro_batch_size=sizes.get("micro_batch_size", 1),
        global_batch_size=full,
        rampup_batch_size=(start, increment, samples),
    ).batch_schedule(sizes.get("dp_size", 1))


@given(
    step=st.integers(1, 6),
    start=st.integers(1, 9),
    increment=st.integers(1, 9),
    number=st.integers(1, 9),
    samples=st.integers(1, 700),
    more=st.integers(0, 500),
)
def test_every_batch_of_a_ramp_is_that_of_megatrons_formula(
    step, start, increment, number, samples, more
):
    """That of RampupBatchsizeNumMicroBatchesCalculator, for ramps that are shorter and longer than
    their steps; and Megatron's length of a run in samples."""
    sizes = (start * step, increment * step, samples, (start + increment * number) * step)
    schedule = ramp(*sizes, dp_size=step)
    for consumed in range(0, samples + 2 * schedule.full):
        steps = number if consumed > samples else int(consumed / (samples / number))
        size = schedule.at(consumed)
        assert size == (start + steps * increment) * step
        assert schedule.num_microbatches(size) * step == size
    length = samples + schedule.full + more
    iterations = consumed = 0
    while consumed <= samples:  # Megatron's update_train_iters
        consumed += schedule.at(consumed)
        iterations += 1
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=schedule.full, train_samples=length
    )
    assert training.num_iterations(schedule) == iterations + (length - consumed) // schedule.full


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((6, 4, 9, 14), "--global-batch-size 14 is not divisible by"),
        ((6, 5, 9, 16), "--rampup-batch-size 6 5 9: the start 6 is not divisible by"),
        ((4, 6, 9, 16), "--rampup-batch-size 4 6 9: the increment 6 is not divisible by"),
    ],
)
def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(sizes, message):
    with pytest.raises(ValueError) as fault:
        ramp(*sizes, micro_batch_size=2, dp_size=2)
    assert f"{message} --micro-batch-size 2 x data-parallel size 2" in str(fault.value)
    assert ramp(*sizes).sizes[0] == sizes[0]


def test_a_run_shorter_than_its_first_batch_is_refused():
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=8, rampup_batch_size=(4, 4, 9), train_samples=3
    )
    with pytest.raises(ValueError, match="--train-samples 3 is less than the first batch of 4"):
        training.num_iterations(training.batch_schedule(1))


def test_a_schedule_of_any_size_is_computed_at_once():
    """A crafted configuration keeps nobody busy."""
    with pytest.raises(ValueError, match="--rampup-batch-size 1 1 9: more than 10000 steps"):
        ramp(1, 1, 9, 2**40)
    schedule = ramp(1, 2**40 - 1, 2**47, 2**40)
    assert schedule.consumed_after(2**47) == 2**47
    assert schedule.iterations_within(2**47 + 2**40) == 2**47 + 1


@st.composite
def steps(draw):
    """Sizes that grow and shrink, at samples that no batch needs to begin with."""
    samples = sorted(draw(st.sets(st.integers(1, 300), max_size=5)))
    sizes = [draw(st.integers(1, 20)) for _ in range(len(samples) + 1)]
    return BatchSchedule(steps=tuple(zip((0, *samples), sizes, strict=True)))


@given(steps(), st.integers(0, 400), st.integers(0, 60), st.integers(0, 1000))
def test_a_schedule_in_steps_is_that_of_a_loop_over_samples(
    schedule, consumed, iterations, samples
):
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


def test_the_steps_of_nvidias_175b_example():
    text = "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=1536, step_batch_size_schedule=text
    )
    sizes = (16, 320, 624, 928, 1232, 1536)
    assert parse_steps(text.replace(" ", ", ")) == tuple(
        (number * 2_400_000_000, size) for number, size in enumerate(sizes)
    )
    schedule = training.batch_schedule(8, seq_length=2048)
    assert schedule.steps[1] == (1_171_875, 320)
    assert [*map(schedule.at, (0, 1_171_874, 1_171_875, 10**9))] == [16, 16, 320, 1536]
    assert training == TrainingConfig(micro_batch_size=1, step_batch_size_schedule=text)


def test_two_steps_at_one_sample_are_refused():
    training = TrainingConfig(micro_batch_size=1, step_batch_size_schedule="0:4 100:8 101:12")
    with pytest.raises(ValueError, match="two steps are at sample 25 of --seq-length 4 tokens"):
        training.batch_schedule(1, seq_length=4)
    assert training.batch_schedule(1, seq_length=1).sizes == (4, 8, 12)
