"""The program on several ranks without a launcher: each is a fork of the test that runs `pretrain_gpt.main` to its exit status.

    with program(arguments, ranks=2, prepare=prepare) as run:
        run.wait(0, 1)
        run.statuses, run.errors(0)

`prepare(rank)` runs first in each rank: there a test patches what is to fail. Nobody ends the other ranks when one has died, as
under srun without --kill-on-bad-exit; as a user's shell would, the test looks at statuses and at what was written. What torch
imports late is imported here once: in each rank it would take longer than a short run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import _dynamo  # noqa: F401
from torch.distributed import fsdp  # noqa: F401

import pretrain_gpt
from megatron_lite.training import watch


class Program:
    """statuses: by rank, of those that were waited for; negative: the signal that killed it."""

    def __init__(self, folder: Path, pids: list[int]) -> None:
        self.pids, self.statuses = pids, dict[int, int]()
        self._folder, self._pidfds = folder, [os.pidfd_open(pid) for pid in pids]

    def send(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank."""
        signal.pidfd_send_signal(self._pidfds[rank], number)

    def wait(self, *ranks: int, timeout: float = 60.0) -> list[int]:
        """The statuses of ranks, all by default, once they have ended. AssertionError with what they wrote where they do not."""
        deadline = time.monotonic() + timeout
        for rank in ranks or range(len(self.pids)):
            while rank not in self.statuses:
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
                else:
                    assert time.monotonic() < deadline, f"rank {rank} has not ended in {timeout:g} s:\n{self.everything()}"
                    time.sleep(0.01)
        return [self.statuses[rank] for rank in ranks or range(len(self.pids))]

    def output(self, rank: int) -> str:
        """What a rank wrote to stdout."""
        return (self._folder / f"{rank}.out").read_text()

    def errors(self, rank: int) -> str:
        """What a rank wrote to stderr."""
        return (self._folder / f"{rank}.err").read_text()

    def everything(self) -> str:
        """What all ranks wrote, for a failing test."""
        outputs = [self.output(rank).rpartition("end of arguments")[2] for rank in range(len(self.pids))]
        return "".join(f"--- rank {rank}\n{text}{self.errors(rank)}" for rank, text in enumerate(outputs))

    def messages(self) -> list[str]:
        """The lines by which the program says why it ends, of all ranks."""
        return [line for rank in range(len(self.pids)) for line in self.errors(rank).splitlines()
                if line.startswith("pretrain_gpt.py: ")]

    def wait_for(self, happened: Callable[[], bool], timeout: float = 60.0) -> None:
        """Returns as soon as something has happened. AssertionError where it does not."""
        deadline = time.monotonic() + timeout
        while not happened():
            assert time.monotonic() < deadline, self.everything()
            time.sleep(0.01)


@contextlib.contextmanager
def program(arguments: list[str], *, ranks: int, prepare: Callable[[int], None] = lambda rank: None,
            rank_0_owns_store: bool = False) -> Iterator[Program]:
    """Starts it; no rank outlives the block. The run's store is the test's own, as torchrun's is torchrun's, or rank 0's, as
    under srun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    launch = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    if rank_0_owns_store:
        del store  # its port is free now
    else:
        launch["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with tempfile.TemporaryDirectory(prefix="program_") as name:
        folder = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        run = Program(folder, [_start(rank, arguments, {**launch, "RANK": str(rank)}, prepare, folder) for rank in range(ranks)])
        try:
            yield run
        finally:
            for rank in set(range(ranks)) - set(run.statuses):
                run.send(rank, signal.SIGKILL)
            run.wait()


def _start(rank: int, arguments: list[str], variables: dict[str, str], prepare: Callable[[int], None], folder: Path) -> int:
    for kind in ("out", "err"):
        (folder / f"{rank}.{kind}").touch()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.environ.update(variables)
        for number, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        watch.BEAT_S, watch.SILENT_S, watch.STORE_S, watch.GRACE_S = 0.1, 2.0, 1.0, 2.0
        prepare(rank)
        status = pretrain_gpt.main(arguments)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
