"""What torchrun makes of signals: the whole program under it, as a user starts it."""

import os
import re
import select
import shlex
import signal
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed import run as torchrun

from tests.support.commands import MOCK, ROOT, SMALL_RUN
from tests.support.limits import HANG_S
from tests.support.programs import program
from tests.support.runs import step_bytes

pytestmark = pytest.mark.long
RUN = [
    *SMALL_RUN,
    *MOCK,
    *shlex.split("--tensor-model-parallel-size 2 --exit-signal-handler --log-interval 1"),
]


@contextmanager
def _launched(*arguments, launcher=""):
    """Starts torchrun, and waits for its fifth iteration. Yields its run, and handles of the ranks.

    It is a fork of this process, so that it need not import torch again.
    """
    words = "--standalone --local-addr 127.0.0.1 --nproc-per-node 2"
    line = [*shlex.split(f"{words} {launcher}"), str(ROOT / "pretrain_gpt.py"), *RUN, *arguments]
    with program(line, ranks=1, rank_0_owns_store=True, main=torchrun.main) as run:
        (pid,), deadline = run.pids, time.monotonic() + HANG_S
        while not re.search(r"^ +5/\d", run.output(0), re.MULTILINE):
            has_ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            assert not has_ended and time.monotonic() < deadline, run.everything()
            time.sleep(0.01)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ranks = [os.pidfd_open(int(child)) for child in children]
        try:
            yield run, ranks
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
                os.close(rank)


def test_a_signal_to_the_launcher_saves(tmp_path):
    """torchrun treats SIGTERM alike, which it handles without the flag. test_signals.py has runs
    that go on from there."""
    flags = ["--train-iters", "60", "--save", str(tmp_path)]
    with _launched(*flags, launcher="--signals-to-handle SIGTERM,SIGUSR1") as (run, _):
        run.send(0, signal.SIGUSR1)
        run.wait()
        printed = run.output(0)
    stopped = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert f"exiting at iteration {stopped}: SIGUSR1 (--exit-signal-handler)" in printed
    assert stopped < 60 and step_bytes(tmp_path, stopped)


def test_ranks_whose_launcher_died_of_a_signal_that_it_does_not_handle_end():
    """SIGUSR1 without --signals-to-handle: torchrun dies at once and tells nobody."""
    with _launched("--train-iters", "100000") as (run, ranks):
        assert len(ranks) == 2
        run.send(0, signal.SIGUSR1)
        run.ends(-signal.SIGUSR1)
        for rank in ranks:
            assert select.select([rank], [], [], HANG_S)[0]
        assert "torchrun on rank 0's node is gone" in run.errors(0)
