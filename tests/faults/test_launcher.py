"""What torchrun makes of a killed rank and of signals: the whole program under it, as a user starts
it."""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.commands import MOCK, ROOT, SMALL_RUN, environment
from tests.support.limits import HANG_S
from tests.support.runs import step_bytes

pytestmark = pytest.mark.long
RUN = [
    *SMALL_RUN,
    *MOCK,
    *shlex.split("--tensor-model-parallel-size 2 --train-iters 60 --log-interval 1"),
]


@contextmanager
def _torchrun(tmp_path, *arguments, launcher=()):
    """Starts it, and waits for its fifth iteration. Output goes to tmp_path/log."""
    words = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node 2"
    line = [sys.executable, *shlex.split(words), *launcher, str(ROOT / "pretrain_gpt.py")]
    line += arguments
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            line,
            env=environment(),
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + HANG_S
        while not re.search(r"^ +5/\d", log.read_text(), re.MULTILINE):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        yield process
    finally:
        for pid in (*_workers(process), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _workers(process):
    """In rank order: torchrun starts them so."""
    try:
        return [
            int(pid)
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def test_a_signal_to_the_launcher_saves(tmp_path):
    """torchrun treats SIGTERM alike, which it handles without the flag. test_signals.py has runs
    that go on from there."""
    name, launcher = "SIGUSR1", ("--signals-to-handle", "SIGTERM,SIGUSR1")
    save = tmp_path / "save"
    arguments = [*RUN, "--exit-signal-handler", "--save", str(save)]
    with _torchrun(tmp_path, *arguments, launcher=launcher) as process:
        process.send_signal(signal.Signals[name])
        process.wait(timeout=HANG_S)
    log = (tmp_path / "log").read_text()
    stopped = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert f"exiting at iteration {stopped}: {name} (--exit-signal-handler)" in log and stopped < 60
    assert step_bytes(save, stopped)


def test_ranks_whose_launcher_died_of_a_signal_that_it_does_not_handle_end(tmp_path):
    """SIGUSR1 without --signals-to-handle: torchrun dies at once and tells nobody."""
    with _torchrun(tmp_path, *RUN, "--train-iters", "100000", "--exit-signal-handler") as process:
        workers = [os.pidfd_open(pid) for pid in _workers(process)]
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=HANG_S) == -signal.SIGUSR1
        for worker in workers:
            _wait_for_the_end_of(worker)
    assert "torchrun on rank 0's node is gone" in (tmp_path / "log").read_text()


def _wait_for_the_end_of(pidfd, timeout=HANG_S):
    assert select.select([pidfd], [], [], timeout)[0]
