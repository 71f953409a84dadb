"""Saves a run's steps under --save.

A Saver holds the directory of --save, has at most one save under way, and logs each step once it
is durable. With --async-save training goes on as soon as the tensors are copied, and one thread of
each rank writes them. While that thread writes, the ranks agree after every iteration whether all
of them have finished or any has failed. Therefore either all ranks go on, or all raise.

A failed save is no reason to lose the run: it is tried again, reported, and the run goes on to its
next save. Only a run whose last save has failed ends with an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist

from megatron_lite.checkpointing.directory import Claim
from megatron_lite.checkpointing.snapshot import Snapshot
from megatron_lite.checkpointing.write import SaveFailed, StepWriter
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState

FAILED, WRITING, DONE = -1.0, 0.0, 1.0
Say = Callable[[str], None]


class Saver:
    """Saves the steps of one run, which went on from iteration `started_at`.

    Use it as a context manager. At the end of the block it waits for a save under way and releases
    the directory.
    """

    def __init__(
        self, options: CheckpointConfig, parallel: ParallelState, claim: Claim, *, started_at: int
    ) -> None:
        self._options, self._parallel, self._claim = options, parallel, claim
        self._writer = StepWriter(options, parallel, claim, started_at=started_at)
        self._threads = (
            ThreadPoolExecutor(1, thread_name_prefix="save") if options.async_save else None
        )
        self._under_way: tuple[int, Future[list[str]]] | None = None
        self.failure: SaveFailed | None = None  # of the last save; None if it is durable

    @property
    def warnings(self) -> list[str]:
        """Lines for the log: a warning if the file system keeps no locks."""
        directory = self._claim.directory
        if directory is None or directory.lock.is_kept_by_system:
            return []
        line = "this file system keeps no locks, so a second job in it is not refused"
        return [f"warning: --save {directory.root}: {line}"]

    @property
    def copies(self) -> bool:
        """Tells whether a snapshot must copy its tensors, because training goes on during the
        write."""
        return self._threads is not None

    def save(self, snapshot: Snapshot, say: Say) -> None:
        """Writes the snapshot, or starts the thread's write with --async-save.

        Waits for the save before it first. Every rank must call this. Raises InputError on every
        rank if the lock was lost. `failure` says whether a rank could not write this snapshot; with
        --async-save only once `poll` or `wait` has logged it.
        """
        self.wait(say)
        write = partial(self._writer.write, snapshot)
        if self._threads is None:
            self._finish(snapshot.iteration, write, say)
        else:
            self._under_way = snapshot.iteration, self._threads.submit(write)

    def poll(self, say: Say) -> None:
        """Logs the save under way if every rank is done or any has failed.

        Every rank must call this after every iteration. It issues one all-reduce of one number
        between CPUs while a save is under way, and no collective otherwise.
        """
        if self._under_way is None:
            return
        # The minimum over ranks is FAILED if any has failed, else WRITING if any still writes.
        state = torch.tensor(_state(self._under_way[1]))
        if all_reduce_(state, self._parallel.world_group, dist.ReduceOp.MIN).item() != WRITING:
            self.wait(say)

    def wait(self, say: Say) -> None:
        """Returns once no save is under way. Raises InputError on every rank if the lock was
        lost."""
        if self._under_way is not None:
            (iteration, future), self._under_way = self._under_way, None
            self._finish(iteration, future.result, say)

    def check(self) -> None:
        """Raises InputError on every rank if the last save has failed."""
        if self.failure is not None:
            kind = InputError if self._parallel.rank == 0 else PeerError
            raise kind(str(self.failure)) from self.failure

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._under_way is not None:
                self.wait(lambda line: None)
                self.check()
        except Exception as failure:
            if error is None:
                raise
            if self._parallel.rank == 0:
                print(f"the save under way has failed too: {failure}", file=sys.stderr, flush=True)
        finally:
            if self._threads is not None:
                self._threads.shutdown()
            self._claim.release()

    def _finish(self, iteration: int, written: Callable[[], list[str]], say: Say) -> None:
        """Logs a save once it is durable or has failed."""
        try:
            notices = written()
        except SaveFailed as failure:
            self.failure = failure
            say(f"warning: {failure}. The run goes on, and its next save is tried as usual")
            return
        self.failure = None
        say(
            f"  successfully saved checkpoint from iteration {iteration:7d} to {self._options.save}"
        )
        for notice in notices:
            say(notice)


def _state(write: Future[list[str]]) -> float:
    if not write.done():
        return WRITING
    return DONE if write.exception() is None else FAILED
