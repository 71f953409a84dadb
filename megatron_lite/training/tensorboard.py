"""TensorBoard's event files, written in the training's own thread.

torch's SummaryWriter hands events to a thread. On a full disk that thread ends with a traceback,
and the next scalar raises the error in training. Here each event is one write to an AppendedFile,
which loses the event and warns once.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from megatron_lite.config.checks import InputError
from megatron_lite.training.appended import AppendedFile
from megatron_lite.training.event_records import scalar_record, start_record, version_record


class ScalarFile:
    """The event file of one start of the run, in a folder.

    purge_step: TensorBoard drops the points of earlier starts from this step on.
    opening: a warning if the first event could not be written, else None.
    Raises InputError if the folder or the file cannot be created.
    """

    def __init__(self, folder: str, *, purge_step: int) -> None:
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
            f".{os.getpid()}.{time.monotonic_ns()}"
        )
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = AppendedFile(Path(folder) / name, name=f"--tensorboard-dir {folder}")
        except OSError as error:
            raise InputError(
                f"--tensorboard-dir {folder}: cannot be written ({error.strerror})"
            ) from error
        self.opening = self._append(version_record(time.time()), "its first event")
        self._append(start_record(time.time(), purge_step), "")

    def add_scalar(self, name: str, value: float, step: int) -> str | None:
        """Writes one point. Returns a warning if it is the first event of the file that could not
        be written."""
        return self._append(scalar_record(time.time(), step, name, float(value)), f"step {step}")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _append(self, record: bytes, what: str) -> str | None:
        return self._file.append(record, what=what)
