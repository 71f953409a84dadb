"""Runs the program on several ranks without a launcher.

Each rank is a fork of the test and runs `pretrain_gpt.main` to its exit status.

    with program(arguments, ranks=2, prepare=prepare) as run:
        run.wait(0, 1)
        run.statuses, run.errors(0)

`prepare(rank)` runs first in each rank. A test uses it to patch the function that shall fail. When
a rank dies, nothing ends the other ranks, as under srun without --kill-on-bad-exit. The test sees
statuses and output, as a user's shell does. This file imports once the modules that torch imports
late. In each rank these imports would take longer than a short run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import _dynamo  # noqa: F401
from torch.distributed import fsdp  # noqa: F401

import pretrain_gpt
from megatron_lite.supervision import watch
from tests.support.forks import start_fork
from tests.support.limits import HANG_S
from tests.support.ports import free_port


class Program:
    """The ranks of a program that runs.

    statuses: the exit status by rank, of the ranks for which `wait` was called. A negative status
        is the signal that killed the rank.
    """

    def __init__(self, folder, pids):
        self.pids, self.statuses = pids, {}
        self._folder, self._pidfds = folder, [os.pidfd_open(pid) for pid in pids]

    def send(self, rank, number):
        """Sends a signal to a rank."""
        signal.pidfd_send_signal(self._pidfds[rank], number)

    def wait(self, *ranks, timeout=HANG_S):
        """Waits until the ranks, by default all, have ended. Returns their statuses.

        Raises AssertionError, with the output of all ranks, if one does not end in time.
        """
        deadline = time.monotonic() + timeout
        for rank in ranks or range(len(self.pids)):
            while rank not in self.statuses:
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
                else:
                    assert time.monotonic() < deadline, (
                        f"rank {rank} has not ended in {timeout:g} s:\n{self.everything()}"
                    )
                    time.sleep(0.01)
        return [self.statuses[rank] for rank in ranks or range(len(self.pids))]

    def ends(self, *statuses):
        """Waits for all ranks, which must end with these statuses."""
        assert self.wait() == [*statuses], self.everything()

    def close(self):
        """Closes the handles of the ranks, which have ended."""
        for pidfd in self._pidfds:
            os.close(pidfd)

    def output(self, rank):
        """Returns a rank's stdout."""
        return (self._folder / f"{rank}.out").read_text()

    def errors(self, rank):
        """Returns a rank's stderr."""
        return (self._folder / f"{rank}.err").read_text()

    def everything(self):
        """Returns the output of all ranks, for the message of a failing test."""
        outputs = [self.output(rank) for rank in range(len(self.pids))]
        return "".join(
            f"--- rank {rank}\n{text}{self.errors(rank)}" for rank, text in enumerate(outputs)
        )

    def messages(self):
        """Returns the lines of all ranks in which the program states why it ends."""
        return [
            line
            for rank in range(len(self.pids))
            for line in self.errors(rank).splitlines()
            if line.startswith("pretrain_gpt.py: ")
        ]


@contextlib.contextmanager
def program(arguments, *, ranks, prepare=lambda rank: None, rank_0_owns_store=False, main=None):
    """Starts the program. No rank outlives the block.

    arguments: the arguments of all ranks, or a function of the rank.
    rank_0_owns_store: whether rank 0 has the run's store, as under srun. By default a process
        beside the ranks has it, as torchrun's agent does.
    main: the main function of another program than pretrain_gpt.py.
    """
    launch = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    with contextlib.ExitStack() as stack:
        if rank_0_owns_store:
            port = free_port()
        else:
            port = stack.enter_context(_agent_store())
            launch["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        launch["MASTER_PORT"] = str(port)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="program_")))
        run = Program(
            folder,
            [
                _start(
                    rank,
                    arguments(rank) if callable(arguments) else arguments,
                    {**launch, "RANK": str(rank)},
                    prepare,
                    main or pretrain_gpt.main,
                    folder,
                )
                for rank in range(ranks)
            ],
        )
        try:
            yield run
        finally:
            for rank in set(range(ranks)) - set(run.statuses):
                run.send(rank, signal.SIGKILL)
            run.wait()
            run.close()


@contextlib.contextmanager
def _agent_store():
    """Runs a store in a process of its own, as torchrun's agent does. Yields its port.

    In the test's process, the store's threads could hold a lock of the C library, such as the name
    resolver's, at the moment of a fork. The forked rank would wait for that lock for ever.
    """
    (port, write_port), (alive, keep_alive) = os.pipe(), os.pipe()

    def serve():
        os.close(keep_alive)
        store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=HANG_S),
        )
        os.write(write_port, str(store.port).encode())
        os.read(alive, 1)  # returns once the test and its ranks have ended

    pid = start_fork(serve)
    try:
        os.close(write_port)
        os.close(alive)
        yield int(os.read(port, 16))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(port)
        os.close(keep_alive)


def run_program(*arguments, ranks=1, prepare=lambda rank: None, main=None):
    """Runs the program to its end. Returns the first status that is not 0, if any, and the output.

    The ranks' outputs follow each other.
    """
    with program(list(arguments), ranks=ranks, prepare=prepare, main=main) as run:
        status = next(filter(None, run.wait()), 0)
        outputs, errors = ("".join(map(text, range(ranks))) for text in (run.output, run.errors))
        return subprocess.CompletedProcess(arguments, status, outputs, errors)


def _start(rank, arguments, variables, prepare, main, folder):
    for kind in ("out", "err"):
        (folder / f"{rank}.{kind}").touch()

    def run():
        torch.set_num_threads(1)  # as in ranks.py
        os.environ.update(variables)
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        watch.BEAT_S, watch.SILENT_S, watch.STORE_S, watch.GRACE_S = 0.1, 2.0, 1.0, 2.0
        prepare(rank)
        return main(arguments)

    return start_fork(run)


def completes(*arguments):
    """Runs the program on two ranks, and asserts that both end well. Returns rank 0's stdout."""
    with program(list(arguments), ranks=2) as run:
        run.ends(0, 0)
        return run.output(0)
