"""The log file of a run: all lines, with Megatron's table of arguments and iteration lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.config.run import RunConfig
from megatron_lite.training.appended import AppendedFile


class LogFilePath(NamedTuple):
    """The path of the log file, and the flag that decides it."""

    path: str
    flag: str


def log_file_path(config: RunConfig) -> LogFilePath | None:
    """Returns the path of the log file: --log-file, else train.log in the folder of the run.

    That is the folder of --save, or else of --tensorboard-dir. Without either the run writes no
    log file, and the result is None.
    """
    if config.logging.log_file is not None:
        return LogFilePath(config.logging.log_file, "--log-file")
    for folder, flag in (
        (config.checkpoint.save, "--save"),
        (config.logging.tensorboard_dir, "--tensorboard-dir"),
    ):
        if folder is not None:
            return LogFilePath(os.path.join(folder, LOG_FILE), flag)
    return None


class LogFile:
    """Appends lines to a file, each at once. On a full disk lines are lost, and the run goes on.

    Raises InputError if the file cannot be opened.
    """

    def __init__(self, name: LogFilePath) -> None:
        path = Path(name.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = AppendedFile(path, name=f"the log file {path}")
        except OSError as error:
            raise InputError(
                f"{name.flag}: the log file {path} cannot be written ({error.strerror}): choose "
                "another one with --log-file"
            ) from error

    def line(self, text: str) -> str | None:
        """Writes one line. Returns a warning if it is the first that could not be written."""
        return self._file.append(f"{text}\n".encode(errors="replace"), what="a line")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
