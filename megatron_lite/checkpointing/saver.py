"""Saves a run's steps under --save.

A Saver holds the directory of --save, has at most one save under way, and logs each step once it is
durable. With --async-save training goes on as soon as the tensors are copied, and one thread of
each rank writes them. While that thread writes, the ranks agree after every iteration whether all
of them have finished or any has failed. Therefore either all ranks go on, or all raise.

A failed save is no reason to lose the run: it is tried again, reported, and the run goes on to its
next save. Only a run whose last save has failed ends with an error.

The snapshots of all ranks become one durable step in this order: the tensor and text files, their
checksums, the manifest, the step's name, and the pointer. After that the steps that are not kept
are deleted. That code is the same in the training thread and in a background thread. The ranks
exchange data only over `parallel.saver_group`. No other code uses that group, so that these
messages never mix with those of training.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.data.durable_files import checksum_of, sync, write_synced
from megatron_lite.parallel.collectives import all_reduce_, gather_values
from megatron_lite.parallel.messages import print_line
from megatron_lite.parallel.state import ParallelState

from .directory import SaveDirectory
from .metadata import MANIFEST, FileRow, Manifest
from .shards import write_tensors
from .state import Snapshot
from .step_files import step_directory

# What becomes of an action. REFUSED: trying again is of no use, as after a lost lock. FAILED: the
# file system refused something. The lowest of all ranks counts.
REFUSED, FAILED, DONE = range(3)
LONGEST_REASON = 4000
PAUSES_S = (1.0,)  # between the tries of a save
PASSING = (OSError, SafetensorError)


class SaveFailed(InputError):
    """A rank could not write a step, and every rank raises this. The lock is still held, and the
    earlier steps are as they were, so that a later save may succeed."""


class Saver:
    """Saves the steps of one run, which went on from iteration `started_at`.

    directory: of `claim_directory`.
    say: logs a line.
    published: is called with each step that is durable, by the thread that writes it.
    tokenizer: the contents of the tokenizer's files, which every step stores; rank 0 writes them.
    copies: whether a snapshot must copy its tensors, because training goes on during the write.
    Use it as a context manager. At the end of the block it waits for a save under way and releases
    the directory.
    """

    def __init__(
        self, options: CheckpointConfig, parallel: ParallelState, directory: SaveDirectory | None
    ) -> None:
        self._options, self._parallel = options, parallel
        self._directory, self._root = directory, Path(options.save or "")
        self.started_at, self._own = 0, set[int]()
        # Whichever rank failed, only rank 0 prints the reason, so that the log has it once.
        self._error = InputError if parallel.rank == 0 else PeerError
        self.copies = options.async_save
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="save")  # none until it is needed
        self._under_way: Future[list[str]] | None = None
        self.failure: SaveFailed | None = None  # of the last save; None if it is durable
        self.say = lambda line: None
        self.published: Callable[[Path], object] = lambda step: None
        self.tokenizer: Mapping[str, bytes] = {}

    @property
    def warnings(self) -> list[str]:
        """Lines for the log: a warning if the file system keeps no locks."""
        if not self._directory or self._directory.is_kept_by_system:
            return []
        line = "this file system keeps no locks, so a second job in it is not refused"
        return [f"warning: --save {self._root}: {line}"]

    def save(self, snapshot: Snapshot) -> None:
        """Writes the snapshot, or starts the thread's write with --async-save.

        Waits for the save before it first. Every rank must call this. Raises InputError on every
        rank if the lock was lost. `failure` says whether a rank could not write this snapshot; with
        --async-save only once `poll` or `wait` has logged it.
        """
        self.wait()
        if self.copies:
            self._under_way = self._threads.submit(self.write, snapshot)
        else:
            self._log(partial(self.write, snapshot))

    def poll(self) -> None:
        """Logs the save under way if every rank is done or any has failed.

        Every rank must call this after every iteration. It issues one all-reduce of one number
        between CPUs while a save is under way, and no collective otherwise.
        """
        write = self._under_way
        if not write:
            return
        # The minimum over ranks is -1 if any has failed, else 0 if any still writes.
        state = torch.tensor(float(write.done() and (-1 if write.exception() else 1)))
        if all_reduce_(state, self._parallel.world_group, dist.ReduceOp.MIN).item():
            self.wait()

    def wait(self) -> None:
        """Returns once no save is under way. Raises InputError on every rank if the lock was
        lost."""
        if self._under_way:
            write, self._under_way = self._under_way, None
            self._log(write.result)

    def finish(self) -> None:
        """Returns once the last save is durable. Raises InputError on every rank if it has
        failed."""
        self.wait()
        if self.failure:
            raise self._error(str(self.failure)) from self.failure

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._under_way:
                self.say = lambda line: None  # the log is closed
                self.finish()
        except Exception as failure:
            if error is None:
                raise
            if self._parallel.rank == 0:
                print_line(f"the save under way has failed too: {failure}", sys.stderr)
        finally:
            self._threads.shutdown()
            self.release()

    def release(self) -> None:
        """Releases the directory, so that another run can take it."""
        if self._directory:
            self._directory.release()

    def _log(self, written: Callable[[], list[str]]) -> None:
        """Logs a save once it is durable or has failed."""
        try:
            lines, self.failure = written(), None
        except SaveFailed as failure:
            self.failure = failure
            lines = [f"warning: {failure}. The next save is tried as usual"]
        for line in lines:
            self.say(line)

    def write(self, snapshot: Snapshot) -> list[str]:
        """Returns lines for the log, once the step is durable and the pointer names it.

        Every rank must call this. If any rank could not write, all ranks try again, and in the end
        raise SaveFailed. If the lock was lost, every rank raises InputError. The earlier steps stay
        as they are. A try issues three exchanges of a few bytes over `parallel.saver_group`; the
        second one carries the checksums of all files.
        """
        for pause in PAUSES_S:
            try:
                return self._write(snapshot)
            except SaveFailed:
                time.sleep(pause)
        return self._write(snapshot)

    def _write(self, snapshot: Snapshot) -> list[str]:
        iteration, directory = snapshot.iteration, self._directory
        rows: dict[str, FileRow] = {}

        def make_folder() -> str:
            """Returns its name on rank 0."""
            if not directory:
                return ""
            folder = directory.unfinished(iteration)
            directory.check()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            return folder.name

        def publish() -> list[str]:
            """Gives the step its name, and deletes the steps that are not kept. Rank 0 does both.

            Returns notices for the log. A step that cannot be deleted is one of them, because the
            new step is already durable.
            """
            if not directory:
                return []
            manifest = Manifest(iteration, rows, directory.holder.start, self.started_at)
            write_synced(temporary / MANIFEST, manifest.to_json().encode())
            # The names of all files must be on the disk before the step gets its own name.
            sync(temporary)
            notices = directory.publish(
                iteration, leads_here=lambda step: step <= self.started_at or step in self._own
            )
            self._own.add(iteration)
            try:
                directory.delete_old_steps(self._options, newest=iteration)
            except OSError as error:
                notices.append(
                    f"warning: --save {self._root}: old checkpoints could not be tidied away "
                    f"({error})"
                )
            return notices

        try:
            name, *_ = self._everywhere(snapshot, make_folder)
            temporary = self._root / name
            for own in self._everywhere(snapshot, lambda: _write_files(temporary, snapshot)):
                rows |= {name: FileRow(*row) for name, row in own.items()}
            notices, *_ = self._everywhere(snapshot, publish)
            self.published(step_directory(self._root, iteration))
            done = f"  successfully saved checkpoint from iteration {iteration:7d} to"
            return [f"{done} {self._options.save}", *notices]
        except BaseException:
            if directory:
                shutil.rmtree(directory.unfinished(iteration), ignore_errors=True)
            raise

    def _everywhere(self, snapshot: Snapshot, action: Callable[[], Any]) -> list[Any]:
        """Returns what the action returned on each rank, as JSON, once all ranks have finished it.

        If the action failed on any rank, for any reason, every rank raises. A rank that raised
        before the exchange would leave the others waiting in the all-gather.
        """
        fault = (
            f"--save {self._root}: the checkpoint of iteration {snapshot.iteration} could not be"
        )
        failure = None
        try:
            try:
                answer = (DONE, action())
            except Exception:
                # If a later start has removed the files that the action needs, LockLost names that
                # cause.
                if self._directory:
                    self._directory.check()
                raise
        except Exception as error:
            failure = error
            kind, reason = REFUSED, str(error)
            if isinstance(error, PASSING):
                kind = FAILED
            elif not isinstance(error, InputError):
                rank = self._parallel.rank
                reason = f"{fault} written by rank {rank}: {type(error).__name__}: {error}"
            answer = (kind, reason[:LONGEST_REASON])
        answers = gather_values(answer, self._parallel.saver_group)
        # A refusal such as LockLost names the cause, so it comes first. If a later start has
        # removed the folder, the other ranks see only a missing file.
        kind, rank = min((kind, rank) for rank, (kind, _) in enumerate(answers))
        found = answers[rank][1]
        if kind == DONE:
            return [value for _, value in answers]
        if kind == FAILED:
            is_there = self._root.is_dir()
            others = "Earlier checkpoints are as they were" if is_there else "The folder is gone"
            raise SaveFailed(f"{fault} written by rank {rank}: {found}. {others}") from failure
        if failure and not isinstance(failure, (InputError, *PASSING)):
            raise failure
        raise self._error(found) from failure


def _write_files(temporary: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Writes and syncs the files of this rank. Returns the size and the checksum of each."""
    for name, tensors in snapshot.tensors.items():
        write_tensors(temporary / name, tensors)
    for name, content in snapshot.texts.items():
        write_synced(temporary / name, content)
    names = (*snapshot.tensors, *snapshot.texts)
    return {name: checksum_of(temporary / name) for name in names}
