"""What torchrun makes of signals: the whole program under it, as a user starts it."""

import os
import re
import select
import shlex
import signal
import sys
import time
from contextlib import contextmanager, suppress

import pytest
from torch.distributed import run as torchrun

from tests.support.commands import MOCK, ROOT, SMALL_RUN
from tests.support.forks import children_of
from tests.support.limits import HANG_S
from tests.support.programs import program
from tests.support.runs import rows, step_bytes

pytestmark = pytest.mark.long
FLAGS = shlex.split("--exit-signal-handler --log-interval 1 --distributed-backend gloo")


@contextmanager
def _launched(main, *words):
    """Starts a launcher by main(words) in a fork, and waits for its first iteration.

    Yields its run, and handles of its ranks.
    """
    with program([*words, *FLAGS], ranks=1, rank_0_owns_store=True, main=main) as run:
        (pid,), deadline = run.pids, time.monotonic() + HANG_S
        while not re.search(r"^ +1/\d", run.output(0), re.MULTILINE):
            has_ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            assert not has_ended and time.monotonic() < deadline, run.everything()
            time.sleep(0.01)
        ranks = [os.pidfd_open(child) for child in children_of(pid)]
        try:
            yield run, ranks
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
                os.close(rank)


def _example(words):
    """Runs a script from another folder, under a torchrun that passes SIGUSR1 on."""
    os.environ.update(VENV=sys.prefix, PET_SIGNALS_TO_HANDLE="SIGTERM,SIGUSR1")
    os.chdir("/")
    os.execvp("bash", ["bash", *words])


def test_an_example_trains_as_it_is_and_a_signal_to_its_launcher_saves(tmp_path):
    """torchrun treats SIGTERM alike, which it handles without a flag. test_signals.py has runs that
    go on from there."""
    flags = f"--train-iters 60 --save {tmp_path} --metrics-jsonl {tmp_path}/rows"
    script = str(ROOT / "examples" / "recompute" / "selective_pointwise.sh")
    with _launched(_example, script, *flags.split()) as (run, _):
        run.send(0, signal.SIGUSR1)
        run.wait()
        printed = run.output(0)
    stopped = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert f"exiting at iteration {stopped}: SIGUSR1 (--exit-signal-handler)" in printed
    assert stopped < 60 and step_bytes(tmp_path, stopped)
    assert [row["iteration"] for row in rows(tmp_path / "rows")] == list(range(1, stopped + 1))


def test_ranks_whose_launcher_died_of_a_signal_that_it_does_not_handle_end():
    """SIGUSR1 without --signals-to-handle: torchrun dies at once and tells nobody."""
    words = "--standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    more = "--tensor-model-parallel-size 2 --train-iters 100000"
    line = [*words.split(), str(ROOT / "pretrain_gpt.py"), *SMALL_RUN, *MOCK, *more.split()]
    with _launched(torchrun.main, *line) as (run, ranks):
        assert len(ranks) == 2
        run.send(0, signal.SIGUSR1)
        run.ends(-signal.SIGUSR1)
        for rank in ranks:
            assert select.select([rank], [], [], HANG_S)[0]
        assert "torchrun on rank 0's node is gone" in run.errors(0)
