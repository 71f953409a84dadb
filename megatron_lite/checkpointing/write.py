"""Writes the snapshots of all ranks as one durable step.

A step is written in this order: the tensor and text files, their checksums, the manifest, the
step's name, and the pointer. After that the steps that are not kept are deleted.

The code is the same in the training thread and in a background thread. The ranks exchange data
only over `parallel.saver_group`. No other code uses that group, so that these messages never mix
with those of training.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.directory import SaveDirectory, publish_step
from megatron_lite.checkpointing.lock import DirectoryLock
from megatron_lite.checkpointing.manifest import (
    MANIFEST,
    FileRow,
    Manifest,
    row_of,
    rows_from_plain,
    rows_to_plain,
)
from megatron_lite.checkpointing.origin import Origin, OwnSteps
from megatron_lite.checkpointing.points import Point
from megatron_lite.checkpointing.retention import delete_old_steps, supersede_other_courses
from megatron_lite.checkpointing.snapshot import Snapshot, TensorFile
from megatron_lite.checkpointing.step_files import write_synced
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.data.durable_files import sync_file, sync_folder
from megatron_lite.parallel.collectives import all_gather_bytes
from megatron_lite.parallel.state import ParallelState

Rows = dict[str, FileRow]
# The first byte of an answer. REFUSED: the action raised InputError. FAILED: the file system did.
# BROKEN: another exception, which ends the run.
DONE, FAILED, REFUSED, BROKEN = b"0", b"1", b"2", b"3"
LONGEST_REASON = 4000
PAUSES_S = (1.0,)  # between the tries of a save


class SaveFailed(InputError):
    """A rank could not write a step, and every rank raises this. The lock is still held, and the
    earlier steps are as they were, so that a later save may succeed."""


class StepWriter:
    """Writes the steps of one run.

    token: identifies this start in the names of its temporary folders.
    lock: the lock on the directory of --save, on rank 0; None on the other ranks.
    started_at: the iteration that the run went on from.
    course: the steps that led to that iteration.
    """

    def __init__(
        self,
        options: CheckpointConfig,
        parallel: ParallelState,
        *,
        token: str,
        lock: DirectoryLock | None,
        started_at: int,
        course: tuple[OwnSteps, ...] = (),
    ) -> None:
        assert options.save is not None
        self._options, self._parallel, self._root = options, parallel, Path(options.save)
        self._token, self._lock, self._started_at, self._course = token, lock, started_at, course
        self._own: set[int] = set()

    def write(self, snapshot: Snapshot) -> list[str]:
        """Returns notices for the log, once the step is durable and the pointer names it.

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
        temporary = self._root / f"iter_{snapshot.iteration:07d}.tmp-{self._token}"
        try:
            self._on_rank_0(snapshot, lambda: self._make_folder(temporary))
            answers = self._everywhere(snapshot, lambda: self._written(temporary, snapshot))
            points.reached(Point.LISTED)
            rows: Rows = {}
            for answer in answers:
                rows |= rows_from_plain(json.loads(answer))
            notices = json.loads(
                self._on_rank_0(
                    snapshot, lambda: self._publish(temporary, snapshot.iteration, rows)
                )
            )
            points.reached(Point.DONE)
            return notices
        except BaseException:
            if self._lock is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _make_folder(self, temporary: Path) -> bytes:
        assert self._lock is not None
        self._lock.check()
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        points.reached(Point.FOLDER)
        return b""

    def _written(self, temporary: Path, snapshot: Snapshot) -> bytes:
        try:
            return json.dumps(rows_to_plain(_write_files(temporary, snapshot))).encode()
        finally:
            if self._lock is not None:
                # A start that has taken the lock has also removed the folder. Its LockLost replaces
                # the less clear "no such file" of the write.
                self._lock.check()

    def _publish(self, temporary: Path, iteration: int, rows: Rows) -> bytes:
        assert self._lock is not None
        directory = SaveDirectory(self._root, self._lock)
        origin = Origin(self._lock.start, self._course)
        write_synced(temporary / MANIFEST, Manifest(iteration, rows, origin).to_json().encode())
        points.reached(Point.MANIFEST)
        # The names of all files must be on the disk before the step gets its own name.
        sync_folder(str(temporary))
        points.reached(Point.SYNCED)
        publish_step(directory, temporary, iteration)
        self._own.add(iteration)
        return json.dumps(self._tidy(directory, origin, iteration)).encode()

    def _tidy(self, directory: SaveDirectory, origin: Origin, iteration: int) -> list[str]:
        """Sets the steps of other courses aside and deletes the steps that are not kept.

        Returns notices for the log. An OSError becomes a notice, because the new step is already
        durable.
        """
        try:
            renamed = supersede_other_courses(
                directory, self._root, started_at=self._started_at, own=self._own, origin=origin
            )
            delete_old_steps(directory, self._root, self._options, newest=iteration)
            return [
                f"{self._root}: a step that does not lead to this run's is now {name}"
                for name in renamed
            ]
        except OSError as error:
            return [
                f"warning: --save {self._root}: old checkpoints could not be tidied away ({error})"
            ]

    def _on_rank_0(self, snapshot: Snapshot, action: Callable[[], bytes]) -> bytes:
        return self._everywhere(
            snapshot, lambda: self._locked(action) if self._parallel.rank == 0 else b""
        )[0]

    def _locked(self, action: Callable[[], bytes]) -> bytes:
        """Returns what the action returns.

        After an OSError it checks the lock: if a later start has removed the files that the action
        needs, LockLost names that cause.
        """
        assert self._lock is not None
        try:
            return action()
        except OSError:
            self._lock.check()
            raise

    def _everywhere(self, snapshot: Snapshot, action: Callable[[], bytes]) -> list[bytes]:
        """Returns what the action returned on each rank, once all ranks have finished it.

        If the action failed on any rank, for any reason, every rank raises. A rank that raised
        before the exchange would leave the others waiting in the all-gather.
        """
        failure: Exception | None = None
        try:
            answer = DONE + action()
        except Exception as error:
            failure = error
            passing = isinstance(error, (OSError, SafetensorError))
            kind = REFUSED if isinstance(error, InputError) else FAILED if passing else BROKEN
            answer = kind + str(error).encode()[:LONGEST_REASON]
        answers = all_gather_bytes(answer, self._parallel.saver_group)
        failed = [rank for rank, one in enumerate(answers) if not one.startswith(DONE)]
        if not failed:
            return [one[len(DONE) :] for one in answers]
        if failure is not None and not isinstance(failure, (OSError, InputError, SafetensorError)):
            raise failure
        # An InputError such as LockLost names the cause, so it comes first. If a later start has
        # removed the folder, the other ranks see only a missing file. A passing failure comes last.
        order = (REFUSED, BROKEN, FAILED)
        first = min(failed, key=lambda rank: (order.index(answers[rank][:1]), rank))
        reason = answers[first][1:].decode(errors="replace")
        if not answers[first].startswith(REFUSED):
            reason = (
                f"--save {self._root}: the checkpoint of iteration {snapshot.iteration} could not "
                f"be written by rank {first}: {reason}. Earlier checkpoints are as they were"
            )
        if answers[first].startswith(FAILED):
            raise SaveFailed(reason) from failure
        # Whichever rank failed, only rank 0 prints the reason, so that the log has it once.
        raise (InputError if self._parallel.rank == 0 else PeerError)(reason) from failure


def _write_files(temporary: Path, snapshot: Snapshot) -> Rows:
    """Writes and syncs the files of this rank. Returns the size and checksum of each."""
    rows = {}
    for file in snapshot.files:
        path = temporary / file.name
        _write_tensors(path, file)
        rows[file.name] = row_of(path)
        points.reached(Point(file.kind))
    texts = {name: text.encode() for name, text in snapshot.texts.items()}
    for name, content in (*texts.items(), *snapshot.tokenizer.items()):
        write_synced(temporary / name, content)
        rows[name] = row_of(temporary / name)
    points.reached(Point.TEXTS)
    return rows


def _write_tensors(path: Path, file: TensorFile) -> None:
    path.touch()
    # save_file makes the file readable by its owner only. This is the mode that the umask allows.
    mode = path.stat().st_mode
    save_file(
        {key: tensor.detach().cpu().contiguous() for key, tensor in file.tensors.items()}, str(path)
    )
    path.chmod(mode)
    with path.open("rb") as written:
        sync_file(written)
