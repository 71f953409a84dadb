"""A run whose batch grows: 2, 2, 4, 4, 6, 8, 8 .. samples.

`--dataloader-type cyclic` reads what Megatron's random sampler reads, from any point on.
"""

import itertools
import re

import pytest
import torch

from megatron_lite.config.checks import InputError
from megatron_lite.training.batches import cyclic_order, microbatch_indices
from tests.support.changes import with_settings
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, tiny_run, with_checkpoint

# 2 at 0 and 2, 4 at 4, 6 at 8, 8 from 12 on
RAMP = dict(global_batch_size=8, rampup_batch_size=(2, 2, 12))
SIZES = [2, 2, 4, 6, 8, 8, 8]
CONSUMED = [2, 4, 8, 14, 22, 30, 38]


def test_the_run_follows_the_ramp_and_its_learning_rate_the_samples(tmp_path, capsys):
    run_to_end(
        tiny_run(
            **RAMP,
            lr=1.0,
            lr_decay_style="linear",
            lr_warmup_samples=8,
            train_iters=None,
            train_samples=40,
            metrics=tmp_path / "m",
            log_interval=1,
            log_style="megatron",
        )
    )
    written = rows(tmp_path / "m")
    assert [row["global_batch_size"] for row in written] == SIZES
    assert [row["consumed_samples"] for row in written] == CONSUMED
    assert [row["learning_rate"] for row in written] == [
        0.0,
        2 / 8,
        4 / 8,
        1.0,
        *(1 - (n - 8) / 32 for n in (14, 22, 30)),
    ]
    printed = capsys.readouterr().out
    assert re.findall(r"iteration +(\d+)/ +7 .*global batch size: +(\d+) \|", printed) == [
        (str(number + 1), str(size)) for number, size in enumerate(SIZES)
    ]


def test_a_ramp_through_a_batch_the_interleaved_pipeline_cannot_take_is_refused(tmp_path):
    """A ramp over 2, 5 and 8 samples; its last iterations may come from a checkpoint behind it."""
    saving = tiny_run(
        **RAMP,
        pipeline_model_parallel_size=2,
        num_virtual_stages_per_pipeline_rank=2,
        num_layers=4,
        train_iters=3,
        save=str(tmp_path),
    )
    ramp = with_settings(saving, rampup_batch_size=(2, 3, 6), train_iters=5)

    def work(rank, world_size):
        with pytest.raises(InputError) as fault:
            run_to_end(with_checkpoint(ramp))
        run_to_end(saving)  # to 8 samples
        going_on = with_checkpoint(ramp, load=str(tmp_path))
        return str(fault.value), run_to_end(going_on).progress.consumed_samples

    for message, consumed in run_ranks(work, 2):
        assert message == (
            "--rampup-batch-size 2 3 6: a batch of 5 samples, which this run still has, is not "
            "divisible by --micro-batch-size 1 x data-parallel size 1 x "
            "--pipeline-model-parallel-size 2 (for virtual stages) = 2: give sizes that are "
            "multiples of 2"
        )
        assert consumed == 8 + 2 * 8


def test_a_batch_that_changes_in_steps_is_resumed_in_the_middle(tmp_path):
    """Batches of 2, 2, 6, 4 and 4 samples on two ranks, from the third of which a run goes on. A
    batch of 3 samples is refused unless it has passed."""
    length = tiny_run().data.seq_length
    text = f"0:2 {4 * length}:6 {10 * length}:4"
    later = text.replace("0:2", "0:3")

    def run(schedule, name, **settings):
        run_to_end(
            tiny_run(
                metrics=tmp_path / name,
                step_batch_size_schedule=schedule,
                train_iters=5,
                learning_rate=0.01,
                **settings,
            )
        )

    def work(rank, world_size):
        run(text, "whole")
        run(text, "parts", exit_interval=2, save=str(tmp_path / "saved"))
        run(later, "parts", load=str(tmp_path / "saved"))
        refused = "a batch of 3 samples, which this run still has, is not divisible by"
        with pytest.raises(InputError, match=refused):
            run(later, "refused")

    run_ranks(work, 2)
    whole = rows(tmp_path / "whole")
    assert [row["global_batch_size"] for row in whole] == [2, 2, 6, 4, 4]
    assert [row["consumed_samples"] for row in whole] == [2, 4, 10, 14, 18]
    assert rows(tmp_path / "parts") == whole


def walked(total, consumed, micro, rank, ranks, *, sharded):
    """The rule as a walk: each epoch lists this rank's samples, and cuts them into micro-batches.

    The walk goes on after an epoch with what a run reads that is resumed there.
    """
    step = micro * ranks
    whole = total - total % step
    while True:
        epoch, done = divmod(consumed, whole)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if sharded:
            size = total // step * micro
            order = torch.randperm(size, generator=generator).tolist()
            mine = [rank * size + number for number in order[done // ranks :]]
        else:
            order = torch.randperm(total // micro * micro, generator=generator).tolist()
            mine = order[done:][rank::ranks]
        for start in range(0, (whole - done) // ranks, micro):
            yield mine[start : start + micro]
        consumed = (epoch + 1) * whole


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(
    "total, micro, ranks", [(23, 2, 3), (24, 2, 3), (7, 1, 1), (50, 4, 2), (31, 2, 4)]
)
def test_every_rank_reads_what_the_walk_reads_from_every_point(total, micro, ranks, sharded):
    order, step = cyclic_order(total, sharded=sharded), micro * ranks
    for consumed in range(0, 4 * total, step):
        consumed -= consumed % step
        for rank in range(ranks):
            expected = list(
                itertools.islice(walked(total, consumed, micro, rank, ranks, sharded=sharded), 5)
            )
            assert [order(consumed, micro, rank, ranks, number) for number in range(5)] == expected
            # the same from a resume at each of the micro-batches
            assert [
                order(consumed + number * step, micro, rank, ranks, 0) for number in range(5)
            ] == expected


def test_a_resume_within_a_step_and_too_little_data_are_errors():
    order = cyclic_order(24, sharded=True)
    with pytest.raises(InputError, match=r"18 consumed samples are no multiple of .* 4 x 2 data-"):
        order(18, 4, 0, 2, 0)
    with pytest.raises(InputError, match="24 samples of the data are fewer"):
        order(0, 25, 0, 1, 0)


def test_a_rank_takes_contiguous_slices_of_each_step():
    for rank, expected in enumerate(([24, 25, 28, 29], [26, 27, 30, 31])):
        found = (microbatch_indices(24, 2, rank, 2, number) for number in (0, 1))
        assert [*itertools.chain(*found)] == expected
