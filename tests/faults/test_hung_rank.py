"""A rank that hangs ends the run on the others after the timeout, with the stacks of all threads
and its name."""

import os
import shlex
import signal
import threading

import pytest

from tests.support.commands import MOCK, SMALL_RUN
from tests.support.happenings import at, happens
from tests.support.limits import patiently
from tests.support.programs import program

RUN = [
    *SMALL_RUN,
    *MOCK,
    *shlex.split("--micro-batch-size 1 --train-iters 6 --eval-interval 3"),
    "--distributed-timeout-seconds-after-init",
]
TENSOR, PIPELINE = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]


def _stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.runs(ci=1)
@pytest.mark.parametrize(
    "layout, rank, place, where",
    [
        (TENSOR, 1, "backward", "iteration 3"),
        (PIPELINE, 1, "step", "iteration 3"),
        (TENSOR, 1, "evaluation", "iteration 3 (validation loss)"),
    ],
)
def test_a_stopped_rank_is_named_after_the_timeout(layout, rank, place, where):
    def check(limit):
        arguments = [*RUN, f"{limit:g}", *layout]
        with program(arguments, ranks=2, prepare=at(rank, place, _stopped, iteration=3)) as run:
            assert run.wait(1 - rank) == [1], run.everything()
            (message,) = run.messages()
            assert f"stops at {where}: no progress for more than {limit:g} s: " in message
            assert f"rank {rank} gives no sign of life" in message
            assert f"[rank {1 - rank}] stacks of all threads at {where}" in run.errors(1 - rank)
            assert "watch.py" in run.errors(1 - rank) and "loop.py" in run.errors(1 - rank)

    patiently(check, 2)


@pytest.mark.long
def test_a_rank_that_waits_outside_a_collective_is_named_and_writes_its_own_stack():
    """As when a file system does not answer: the process lives."""

    def hangs_here():
        threading.Event().wait()

    def check(limit):
        with program(
            [*RUN, f"{limit:g}", *TENSOR], ranks=2, prepare=at(1, "step", hangs_here, iteration=3)
        ) as run:
            run.ends(1, 1)
            (message,) = run.messages()
            assert (
                f"iteration 3: no progress for more than {limit:g} s: rank 1 is behind" in message
            )
            assert "in hangs_here" in run.errors(
                1
            ) and "[rank 0] stacks of all threads" in run.errors(0)

    patiently(check, 2)


@pytest.mark.long
def test_a_checkpoint_and_a_first_iteration_may_take_longer_than_the_timeout(tmp_path):
    """On all ranks alike; the first iteration is under --distributed-timeout-minutes."""

    def check(limit):
        def waits():
            threading.Event().wait(limit + 4.0)  # the verdict takes SILENT_S

        def prepare(rank):
            happens("step", waits, iteration=1)
            happens("saving", waits, iteration=6)

        save = str(tmp_path / f"{limit:g}")
        with program(
            [*RUN, f"{limit:g}", *TENSOR, "--async-save", "--save-interval", "6", "--save", save],
            ranks=2,
            prepare=prepare,
        ) as run:
            run.ends(0, 0)

    patiently(check, 2)
