"""Saves a run's steps under --save: holds the directory, keeps one save under way at most, and says when a step is durable.

With --async-save training goes on once the tensors are copied, and one thread of each rank writes. Whether it has succeeded is
agreed over ranks after every iteration as long as it writes: then all ranks go on, or all raise.
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

from megatron_lite.checkpointing.files import LATEST, saved_steps, step_directory
from megatron_lite.checkpointing.lock import DirectoryLock, Holder
from megatron_lite.checkpointing.retention import remove_leftovers
from megatron_lite.checkpointing.snapshot import Snapshot
from megatron_lite.checkpointing.write import StepWriter
from megatron_lite.config.checks import InputError
from megatron_lite.config.training import CheckpointConfig
from megatron_lite.parallel.collectives import all_gather_bytes, all_reduce_
from megatron_lite.parallel.state import ParallelState

FAILED, WRITING, DONE = -1.0, 0.0, 1.0
Say = Callable[[str], None]


class Claim(NamedTuple):
    """The directory of --save in the hands of this run. lock: rank 0's; None where nothing is saved."""

    token: str = ""
    lock: DirectoryLock | None = None

    def release(self) -> None:
        """Lets the next run in."""
        if self.lock is not None:
            self.lock.release()


def claim_directory(options: CheckpointConfig, parallel: ParallelState) -> Claim:
    """Takes the directory of --save, before any work is done and before a step in it is chosen.

    InputError where it cannot be written, is in use, or holds another run's checkpoints, with which this run's would mix.
    """
    if options.save is None:
        return Claim()
    root = Path(options.save)

    def take() -> DirectoryLock | None:
        if parallel.rank != 0:
            return None
        root.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(root, Holder.this_process())
        try:
            if not options.continues and (saved_steps(root) or (root / LATEST).exists()):
                there = ", ".join(step_directory(root, step).name for step in saved_steps(root)[-1:]) or LATEST
                raise InputError(f"--save {root} holds a checkpoint already ({there}): continue from it with --load {root}, or "
                                 "choose an empty directory")
            remove_leftovers(root)
        except BaseException:
            lock.release()
            raise
        return lock

    lock = parallel.together(f"--save {root} cannot be written", take)
    token = all_gather_bytes(b"" if lock is None else lock.token.encode(), parallel.world_group)[0].decode()
    return Claim(token, lock)


class _UnderWay(NamedTuple):
    iteration: int
    future: Future[list[str]]


class Saver:
    """Use as a context manager: waits for a save under way at the end, and lets go of the directory."""

    def __init__(self, options: CheckpointConfig, parallel: ParallelState, claim: Claim, *, started_at: int) -> None:
        self._options, self._parallel, self._claim = options, parallel, claim
        self._writer = None if options.save is None else StepWriter(options, parallel, token=claim.token, lock=claim.lock,
                                                                    started_at=started_at)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="save") if options.async_save else None
        self._under_way: _UnderWay | None = None

    @property
    def notices(self) -> list[str]:
        """For the log."""
        if self._claim.lock is None or self._claim.lock.is_kept_by_system:
            return []
        return [f"warning: --save {self._options.save}: this file system keeps no locks, so a second job in it is not refused"]

    @property
    def copies(self) -> bool:
        """Whether what is saved must be a copy, since training goes on."""
        return self._threads is not None

    def save(self, snapshot: Snapshot, say: Say) -> None:
        """Writes it, or has it written once the save before it is done. Every rank must call this.

        InputError on every rank where any could not write this one or the one before.
        """
        assert self._writer is not None
        self.wait(say)
        if self._threads is None:
            self._finished(snapshot.iteration, self._writer.write(snapshot), say)
        else:
            self._under_way = _UnderWay(snapshot.iteration, self._threads.submit(self._writer.write, snapshot))

    def poll(self, say: Say) -> None:
        """Says so where the save under way is done on every rank, raises where it has failed. Every rank must call this after
        every iteration. One all-reduce of one number between CPUs while a save is under way, else nothing."""
        if self._under_way is None:
            return
        future = self._under_way.future
        state = WRITING if not future.done() else DONE if future.exception() is None else FAILED
        if all_reduce_(torch.tensor(state), self._parallel.world_group, dist.ReduceOp.MIN).item() != WRITING:
            self.wait(say)

    def wait(self, say: Say) -> None:
        """Returns once no save is under way. InputError on every rank where it has failed."""
        if self._under_way is not None:
            (iteration, future), self._under_way = self._under_way, None
            self._finished(iteration, future.result(), say)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.wait(lambda line: None)
        except Exception as failure:
            if error is None:
                raise
            if self._parallel.rank == 0:
                print(f"the save under way has failed too: {failure}", file=sys.stderr, flush=True)
        finally:
            if self._threads is not None:
                self._threads.shutdown()
            self._claim.release()

    def _finished(self, iteration: int, notices: list[str], say: Say) -> None:
        say(f"  successfully saved checkpoint from iteration {iteration:7d} to {self._options.save}")
        for notice in notices:
            say(notice)

