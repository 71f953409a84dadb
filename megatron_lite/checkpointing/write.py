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
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.checkpointing.directory import Claim
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

# What becomes of an action. REFUSED: trying again is of no use, as after a lost lock. FAILED: the
# file system refused something. The lowest of all ranks counts.
REFUSED, FAILED, DONE = range(3)
LONGEST_REASON = 4000
PAUSES_S = (1.0,)  # between the tries of a save
PASSING = (OSError, SafetensorError)


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
        rows: dict[str, FileRow] = {}
        try:
            self._everywhere(snapshot, lambda: self._make_folder(temporary))
            for own in self._everywhere(snapshot, lambda: _write_files(temporary, snapshot)):
                rows |= rows_from_plain(own)
            published = self._everywhere(
                snapshot, lambda: self._publish(temporary, snapshot.iteration, rows)
            )
        except BaseException:
            if self._directory is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        notices: list[str] = published[0]
        return notices

    def _make_folder(self, temporary: Path) -> None:
        if self._directory is not None:
            self._directory.lock.check()
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)

    def _publish(self, temporary: Path, iteration: int, rows: dict[str, FileRow]) -> list[str]:
        """Gives the step its name, and deletes the steps that are not kept. Rank 0 does both.

        Returns notices for the log. A step that cannot be deleted is one of them, because the new
        step is already durable.
        """
        if self._directory is None:
            return []
        manifest = Manifest(iteration, rows, self._directory.lock.holder.start, self._started_at)
        write_synced(temporary / MANIFEST, manifest.to_json().encode())
        # The names of all files must be on the disk before the step gets its own name.
        sync(temporary)
        notices = self._directory.publish(
            temporary,
            iteration,
            leads_here=lambda step: step <= self._started_at or step in self._own,
        )
        self._own.add(iteration)
        try:
            self._directory.delete_old_steps(self._options, newest=iteration)
        except OSError as error:
            notices.append(
                f"warning: --save {self._root}: old checkpoints could not be tidied away ({error})"
            )
        return notices

    def _everywhere(self, snapshot: Snapshot, action: Callable[[], Any]) -> list[Any]:
        """Returns what the action returned on each rank, as JSON, once all ranks have finished it.

        If the action failed on any rank, for any reason, every rank raises. A rank that raised
        before the exchange would leave the others waiting in the all-gather.
        """
        fault = (
            f"--save {self._root}: the checkpoint of iteration {snapshot.iteration} could not be"
        )
        failure: Exception | None = None
        try:
            answer = (DONE, self._while_held(action))
        except Exception as error:
            failure = error
            kind, reason = REFUSED, str(error)
            if isinstance(error, PASSING):
                kind = FAILED
            elif not isinstance(error, InputError):
                rank = self._parallel.rank
                reason = f"{fault} written by rank {rank}: {type(error).__name__}: {error}"
            answer = (kind, reason[:LONGEST_REASON])
        texts = all_gather_bytes(json.dumps(answer).encode(), self._parallel.saver_group)
        answers = [parse_json(text, longest=None) for text in texts]
        # A refusal such as LockLost names the cause, so it comes first. If a later start has
        # removed the folder, the other ranks see only a missing file.
        kind, rank = min((kind, rank) for rank, (kind, _) in enumerate(answers))
        found = answers[rank][1]
        if kind == DONE:
            return [value for _, value in answers]
        if kind == FAILED:
            raise SaveFailed(
                f"{fault} written by rank {rank}: {found}. Earlier checkpoints are as they were"
            ) from failure
        if failure is not None and not isinstance(failure, (InputError, *PASSING)):
            raise failure
        # Whichever rank failed, only rank 0 prints the reason, so that the log has it once.
        raise (InputError if self._parallel.rank == 0 else PeerError)(found) from failure

    def _while_held(self, action: Callable[[], Any]) -> Any:
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


def _write_files(temporary: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Writes and syncs the files of this rank. Returns their rows of the manifest, as JSON."""
    for name, tensors in snapshot.tensors.items():
        _write_tensors(temporary / name, tensors)
    for name, content in snapshot.texts.items():
        write_synced(temporary / name, content)
    names = (*snapshot.tensors, *snapshot.texts)
    return rows_to_plain({name: row_of(temporary / name) for name in names})


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.touch()
    # save_file makes the file readable by its owner only. This is the mode that the umask allows.
    mode = path.stat().st_mode
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, str(path))
    path.chmod(mode)
    sync(path)
