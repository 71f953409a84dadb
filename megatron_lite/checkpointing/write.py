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
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.checkpointing.directory import Claim, SaveDirectory
from megatron_lite.checkpointing.manifest import (
    MANIFEST,
    FileRow,
    Manifest,
    row_of,
    rows_from_plain,
    rows_to_plain,
)
from megatron_lite.checkpointing.snapshot import Snapshot
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.plain import parse_json
from megatron_lite.data.durable_files import sync, write_synced
from megatron_lite.parallel.collectives import all_gather_bytes
from megatron_lite.parallel.state import ParallelState

Rows = dict[str, FileRow]
# The first byte of an answer. REFUSED: trying again is of no use, as after a lost lock. FAILED: the
# file system refused something.
DONE, REFUSED, FAILED = b"0", b"1", b"2"
LONGEST_REASON = 4000
PAUSES_S = (1.0,)  # between the tries of a save


class SaveFailed(InputError):
    """A rank could not write a step, and every rank raises this. The lock is still held, and the
    earlier steps are as they were, so that a later save may succeed."""


class StepWriter:
    """Writes the steps of one run, which went on from iteration `started_at`."""

    def __init__(
        self, options: CheckpointConfig, parallel: ParallelState, claim: Claim, *, started_at: int
    ) -> None:
        assert options.save is not None
        self._options, self._parallel, self._root = options, parallel, Path(options.save)
        self._token, self._directory, self._started_at = claim.token, claim.directory, started_at
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
        directory, nothing = self._directory, b""

        def make_folder() -> bytes:
            if directory is not None:
                directory.lock.check()
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            return nothing

        def write_files() -> bytes:
            return json.dumps(rows_to_plain(_write_files(temporary, snapshot))).encode()

        def publish() -> bytes:
            if directory is None:
                return nothing
            return json.dumps(
                self._publish(directory, temporary, snapshot.iteration, rows)
            ).encode()

        try:
            self._everywhere(snapshot, make_folder)
            rows: Rows = {}
            for answer in self._everywhere(snapshot, write_files):
                rows |= rows_from_plain(parse_json(answer, longest=None))
            notices: list[str] = parse_json(self._everywhere(snapshot, publish)[0], longest=None)
            return notices
        except BaseException:
            if directory is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _publish(
        self, directory: SaveDirectory, temporary: Path, iteration: int, rows: Rows
    ) -> list[str]:
        """Gives the step its name, and deletes the steps that are not kept.

        Returns notices for the log. A step that cannot be deleted is one of them, because the new
        step is already durable.
        """
        manifest = Manifest(iteration, rows, directory.lock.holder.start, self._started_at)
        write_synced(temporary / MANIFEST, manifest.to_json().encode())
        # The names of all files must be on the disk before the step gets its own name.
        sync(temporary)
        notices = directory.publish(
            temporary,
            iteration,
            leads_here=lambda step: step <= self._started_at or step in self._own,
        )
        self._own.add(iteration)
        try:
            directory.delete_old_steps(self._options, newest=iteration)
        except OSError as error:
            notices.append(
                f"warning: --save {self._root}: old checkpoints could not be tidied away ({error})"
            )
        return notices

    def _everywhere(self, snapshot: Snapshot, action: Callable[[], bytes]) -> list[bytes]:
        """Returns what the action returned on each rank, once all ranks have finished it.

        If the action failed on any rank, for any reason, every rank raises. A rank that raised
        before the exchange would leave the others waiting in the all-gather.
        """
        failure: Exception | None = None
        try:
            answer = DONE + self._while_held(action)
        except Exception as error:
            failure = error
            passing = isinstance(error, OSError | SafetensorError)
            reason = str(error)
            if not passing and not isinstance(error, InputError):
                reason = (
                    f"--save {self._root}: the checkpoint of iteration {snapshot.iteration} could "
                    f"not be written by rank {self._parallel.rank}: {type(error).__name__}: {error}"
                )
            answer = (FAILED if passing else REFUSED) + reason.encode()[:LONGEST_REASON]
        answers = all_gather_bytes(answer, self._parallel.saver_group)
        # A refusal such as LockLost names the cause, so it comes first. If a later start has
        # removed the folder, the other ranks see only a missing file.
        failed = [(one[:1], rank) for rank, one in enumerate(answers) if not one.startswith(DONE)]
        if not failed:
            return [one[1:] for one in answers]
        kind, rank = min(failed)
        reason = answers[rank][1:].decode(errors="replace")
        if kind == FAILED:
            raise SaveFailed(
                f"--save {self._root}: the checkpoint of iteration {snapshot.iteration} could not "
                f"be written by rank {rank}: {reason}. Earlier checkpoints are as they were"
            ) from failure
        if failure is not None and not isinstance(failure, OSError | InputError | SafetensorError):
            raise failure
        # Whichever rank failed, only rank 0 prints the reason, so that the log has it once.
        raise (InputError if self._parallel.rank == 0 else PeerError)(reason) from failure

    def _while_held(self, action: Callable[[], bytes]) -> bytes:
        """Returns what the action returns.

        After an error rank 0 checks the lock: if a later start has removed the files that the
        action needs, LockLost names that cause.
        """
        try:
            return action()
        except Exception:
            if self._directory is not None:
                self._directory.lock.check()
            raise


def _write_files(temporary: Path, snapshot: Snapshot) -> Rows:
    """Writes and syncs the files of this rank. Returns the size and checksum of each."""
    for name, tensors in snapshot.tensors.items():
        _write_tensors(temporary / name, tensors)
    for name, content in snapshot.texts.items():
        write_synced(temporary / name, content)
    return {name: row_of(temporary / name) for name in (*snapshot.tensors, *snapshot.texts)}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.touch()
    # save_file makes the file readable by its owner only. This is the mode that the umask allows.
    mode = path.stat().st_mode
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, str(path))
    path.chmod(mode)
    sync(path)
