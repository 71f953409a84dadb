"""From snapshots to a durable step: files, checksums, manifest, name, pointer, and what is not kept any more.

Runs in the training's own thread or in a background one, and is the same there: ranks talk over `parallel.saver_group` alone,
which nothing else uses, so that their messages never mix with training's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_lite.checkpointing import points
from megatron_lite.checkpointing.files import publish_step, write_synced
from megatron_lite.checkpointing.lock import DirectoryLock
from megatron_lite.checkpointing.manifest import MANIFEST, FileRow, Manifest, row_of, rows_from_plain, rows_to_plain
from megatron_lite.checkpointing.points import Point
from megatron_lite.checkpointing.retention import delete_old_steps, supersede_later_steps
from megatron_lite.checkpointing.snapshot import Snapshot, TensorFile
from megatron_lite.config.checks import InputError, PeerError
from megatron_lite.config.training import CheckpointConfig
from megatron_lite.data.files import sync_file, sync_folder
from megatron_lite.parallel.collectives import all_gather_bytes
from megatron_lite.parallel.state import ParallelState

Rows = dict[str, FileRow]
DONE, FAILED, REFUSED = b"0", b"1", b"2"  # the first byte of an answer
LONGEST_REASON = 4000


class StepWriter:
    """Writes the steps of one run. token: of its temporary folders. lock: rank 0's. started_at: the iteration it went on from."""

    def __init__(self, options: CheckpointConfig, parallel: ParallelState, *, token: str, lock: DirectoryLock | None,
                 started_at: int) -> None:
        assert options.save is not None
        self._options, self._parallel, self._root = options, parallel, Path(options.save)
        self._token, self._lock, self._started_at = token, lock, started_at
        self._own: set[int] = set()

    def write(self, snapshot: Snapshot) -> list[str]:
        """Returns once the step is durable and named by the pointer, with notices for the log. Every rank must call this.

        InputError on every rank where any could not write, or where the lock was lost; what was there before stays as it is.
        Three exchanges of a few bytes; one of them of the checksums.
        """
        temporary = self._root / f"iter_{snapshot.iteration:07d}.tmp-{self._token}"
        try:
            self._on_rank_0(snapshot, lambda: self._start(temporary))
            answers = self._everywhere(snapshot, lambda: self._written(temporary, snapshot))
            points.reached(Point.LISTED)
            rows: Rows = {}
            for answer in answers:
                rows |= rows_from_plain(json.loads(answer))
            notices = json.loads(self._on_rank_0(snapshot, lambda: self._publish(temporary, snapshot.iteration, rows)))
            points.reached(Point.DONE)
            return notices
        except BaseException:
            if self._lock is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _start(self, temporary: Path) -> bytes:
        assert self._lock is not None
        self._lock.check()
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        points.reached(Point.FOLDER)
        return b""

    def _written(self, temporary: Path, snapshot: Snapshot) -> bytes:
        try:
            return _rows_to_bytes(_write_files(temporary, snapshot))
        finally:
            if self._lock is not None:
                self._lock.check()  # whoever has taken it has removed the folder: that is what to say

    def _publish(self, temporary: Path, iteration: int, rows: Rows) -> bytes:
        assert self._lock is not None
        write_synced(temporary / MANIFEST, Manifest(iteration, rows).to_json().encode())
        points.reached(Point.MANIFEST)
        sync_folder(str(temporary))
        points.reached(Point.SYNCED)
        self._lock.check()
        publish_step(temporary, iteration)
        self._own.add(iteration)
        return json.dumps(self._tidy(iteration)).encode()

    def _tidy(self, iteration: int) -> list[str]:
        """Later steps of another course, and those that are not kept. The new step is durable whatever becomes of this."""
        assert self._lock is not None
        try:
            renamed = supersede_later_steps(self._root, started_at=self._started_at, own=self._own)
            self._lock.check()
            delete_old_steps(self._root, self._options, newest=iteration)
            return [f"{self._root}: a later step that this run does not go on from is now {name}" for name in renamed]
        except OSError as error:
            return [f"warning: --save {self._root}: old checkpoints could not be tidied away ({error})"]

    def _on_rank_0(self, snapshot: Snapshot, action: Callable[[], bytes]) -> bytes:
        return self._everywhere(snapshot, action if self._parallel.rank == 0 else lambda: b"")[0]

    def _everywhere(self, snapshot: Snapshot, action: Callable[[], bytes]) -> list[bytes]:
        """What the action returned on each rank, once all have done it. Where it failed on any, for any reason, all raise."""
        failure: Exception | None = None
        try:
            answer = DONE + action()
        except Exception as error:
            failure = error
            answer = (REFUSED if isinstance(error, InputError) else FAILED) + str(error).encode()[:LONGEST_REASON]
        answers = all_gather_bytes(answer, self._parallel.saver_group)
        failed = [rank for rank, one in enumerate(answers) if not one.startswith(DONE)]
        if not failed:
            return [one[len(DONE):] for one in answers]
        if failure is not None and not isinstance(failure, (OSError, InputError, SafetensorError)):
            raise failure
        first = min(failed, key=lambda rank: (not answers[rank].startswith(REFUSED), rank))
        reason = answers[first][1:].decode(errors="replace")
        if answers[first].startswith(FAILED):
            reason = (f"--save {self._root}: the checkpoint of iteration {snapshot.iteration} could not be written by rank "
                      f"{first}: {reason}. Earlier checkpoints are as they were")
        # Said once, by rank 0, whoever has failed.
        raise (InputError if self._parallel.rank == 0 else PeerError)(reason) from failure


def _write_files(temporary: Path, snapshot: Snapshot) -> Rows:
    """This rank's, synced."""
    rows = {}
    for file in snapshot.files:
        path = temporary / file.name
        _write_tensors(path, file)
        rows[file.name] = row_of(path)
        points.reached(Point(file.kind))
    for name, text in snapshot.texts.items():
        write_synced(temporary / name, text.encode())
        rows[name] = row_of(temporary / name)
    points.reached(Point.TEXTS)
    return rows


def _write_tensors(path: Path, file: TensorFile) -> None:
    path.touch()
    mode = path.stat().st_mode  # what the umask allows; save_file would make it readable by its owner alone
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in file.tensors.items()}, str(path))
    path.chmod(mode)
    with path.open("rb") as written:
        sync_file(written)


def _rows_to_bytes(rows: Rows) -> bytes:
    return json.dumps(rows_to_plain(rows)).encode()


