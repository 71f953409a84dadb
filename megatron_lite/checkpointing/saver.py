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
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_lite.checkpointing.lock import DirectoryLock, Holder
from megatron_lite.checkpointing.origin import OwnSteps
from megatron_lite.checkpointing.retention import remove_leftovers
from megatron_lite.checkpointing.snapshot import Snapshot
from megatron_lite.checkpointing.start import origin_of
from megatron_lite.checkpointing.step_files import LATEST, saved_steps, step_directory
from megatron_lite.checkpointing.write import SaveFailed, StepWriter
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.parallel.collectives import all_gather_bytes, all_reduce_
from megatron_lite.parallel.state import ParallelState

FAILED, WRITING, DONE = -1.0, 0.0, 1.0
Say = Callable[[str], None]


class Claim(NamedTuple):
    """This run's hold on the directory of --save.

    token: identifies this start in the names of its temporary files; the same on every rank.
    lock: the lock on the directory; None on ranks other than 0, and if the run saves nothing.
    """

    token: str = ""
    lock: DirectoryLock | None = None

    def release(self) -> None:
        """Releases the lock, so that another run can take the directory."""
        if self.lock is not None:
            self.lock.release()


def claim_directory(options: CheckpointConfig, parallel: ParallelState) -> Claim:
    """Takes the lock on the directory of --save. Every rank must call this.

    Call it before any other work and before a step in the directory is chosen. Raises InputError if
    the directory cannot be written, if another run uses it, or if it holds checkpoints of another
    run. In the last case the checkpoints of both runs would mix.
    """
    if options.save is None:
        return Claim()
    root = Path(options.save)

    def take() -> DirectoryLock | None:
        if parallel.rank != 0:
            return None
        root.mkdir(parents=True, exist_ok=True)
        starts = [
            origin.start
            for step in saved_steps(root)
            if (origin := origin_of(step_directory(root, step))) is not None
        ]
        lock = DirectoryLock(root, Holder.this_process(), after_start=max(starts, default=0))
        try:
            # A run that does not continue from this directory must find no checkpoint in it. The
            # check needs the lock: without it, another run could still save a step.
            if not options.continues and (saved_steps(root) or (root / LATEST).exists()):
                there = (
                    ", ".join(step_directory(root, step).name for step in saved_steps(root)[-1:])
                    or LATEST
                )
                raise InputError(
                    f"--save {root} holds a checkpoint already ({there}): continue from it with "
                    f"--load {root}, or choose an empty directory"
                )
            remove_leftovers(root, lock.token)
        except BaseException:
            lock.release()
            raise
        return lock

    lock = parallel.together(f"--save {root} cannot be written", take)
    token = all_gather_bytes(b"" if lock is None else lock.token.encode(), parallel.world_group)[
        0
    ].decode()
    return Claim(token, lock)


class _UnderWay(NamedTuple):
    iteration: int
    future: Future[list[str]]


class Saver:
    """Saves the steps of one run. Use it as a context manager.

    At the end of the block it waits for a save under way and releases the directory.
    """

    def __init__(
        self,
        options: CheckpointConfig,
        parallel: ParallelState,
        claim: Claim,
        *,
        started_at: int,
        course: tuple[OwnSteps, ...] = (),
    ) -> None:
        self._options, self._parallel, self._claim = options, parallel, claim
        self._writer: StepWriter | None = None
        if options.save is not None:
            self._writer = StepWriter(
                options,
                parallel,
                token=claim.token,
                lock=claim.lock,
                started_at=started_at,
                course=course,
            )
        self._threads = (
            ThreadPoolExecutor(1, thread_name_prefix="save") if options.async_save else None
        )
        self._under_way: _UnderWay | None = None
        self.failure: SaveFailed | None = None  # of the last save; None if it is durable

    @property
    def notices(self) -> list[str]:
        """Lines for the log: a warning if the file system keeps no locks."""
        if self._claim.lock is None or self._claim.lock.is_kept_by_system:
            return []
        return [
            (
                f"warning: --save {self._options.save}: this file system keeps no locks, so a "
                "second job in it is not refused"
            )
        ]

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
        assert self._writer is not None
        writer = self._writer
        self.wait(say)
        if self._threads is None:
            self._finish(snapshot.iteration, lambda: writer.write(snapshot), say)
        else:
            self._under_way = _UnderWay(
                snapshot.iteration, self._threads.submit(writer.write, snapshot)
            )

    def poll(self, say: Say) -> None:
        """Logs the save under way if every rank is done or any has failed.

        Every rank must call this after every iteration. It issues one all-reduce of one number
        between CPUs while a save is under way, and no collective otherwise.
        """
        if self._under_way is None:
            return
        # The minimum over ranks is FAILED if any has failed, else WRITING if any still writes.
        state = torch.tensor(_state(self._under_way.future))
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
