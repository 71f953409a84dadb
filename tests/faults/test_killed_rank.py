"""A rank that is killed ends the run on all ranks, soon, with its name; resumed, the run ends with
the same bytes."""

import os
import shlex
import signal

import pytest

from megatron_lite.checkpointing import saver
from tests.support.commands import MOCK, SMALL_RUN
from tests.support.happenings import at
from tests.support.programs import completes, program
from tests.support.runs import rows, step_bytes

RUN = [
    *SMALL_RUN,
    *MOCK,
    *shlex.split(
        "--micro-batch-size 1 --train-iters 8 --eval-interval 4 --tensor-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --save-interval 3"
    ),
]


def _dies():
    os.kill(os.getpid(), signal.SIGKILL)


def _into(folder):
    return [*RUN, *f"--save {folder}/save --metrics-jsonl {folder}/rows".split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happens to: its checkpoints and its rows."""
    folder = tmp_path_factory.mktemp("whole")
    completes(*_into(folder))
    return folder


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize(
    "place, iteration", [("replay", 6), *(("forward", 5), ("backward", 5), ("evaluation", 4))]
)
def test_the_others_name_it_and_the_resumed_run_equals_an_uninterrupted_one(
    tmp_path, whole, place, iteration
):
    arguments = _into(tmp_path)
    with program(arguments, ranks=2, prepare=at(1, place, _dies, iteration=iteration)) as run:
        assert run.wait(1) == [-signal.SIGKILL]
        assert run.wait(0) == [1], run.everything()
        where = f"iteration {iteration}" + (" (validation loss)" if place == "evaluation" else "")
        assert run.messages() == [
            f"pretrain_gpt.py: [rank 0] stops at {where}: rank 1 is gone; "
            f"the newest checkpoint is {tmp_path}/save/iter_0000003"
        ]
        assert "terminate called" not in run.everything() and "Traceback" not in run.everything()
    completes(*arguments, "--load", str(tmp_path / "save"))
    assert step_bytes(tmp_path / "save", 8) == step_bytes(whole / "save", 8) != {}
    assert rows(tmp_path / "rows") == rows(whole / "rows")


@pytest.mark.runs
@pytest.mark.parametrize("more", [[], ["--async-save"]])
@pytest.mark.parametrize("victim, function", [(1, "checksum_of"), (1, "FileRow"), (0, "sync")])
def test_a_rank_that_dies_in_a_save_ends_the_others(tmp_path, victim, function, more):
    """In the middle of a rank's files, once every rank knows all files, and after the manifest."""

    def prepare(rank):
        if rank == victim:
            setattr(saver, function, lambda *_, **__: _dies())

    with program([*_into(tmp_path), *more], ranks=2, prepare=prepare) as run:
        assert run.wait(victim, 1 - victim) == [-signal.SIGKILL, 1], run.everything()
        assert f"rank {victim} is gone" in run.everything()


def test_a_rank_with_a_fault_of_its_own_says_it_alone():
    def fails():
        raise ArithmeticError("a fault of rank 1")

    with program(RUN, ranks=2, prepare=at(1, "backward", fails, iteration=2)) as run:
        run.ends(1, 1)
        assert "ArithmeticError: a fault of rank 1" in run.errors(1)
        assert "Traceback" not in run.errors(0) and len(run.messages()) <= 2
