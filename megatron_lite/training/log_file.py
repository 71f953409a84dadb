"""The path of the log file, which has all lines, Megatron's table and its iteration lines."""

from __future__ import annotations

import os
from typing import NamedTuple

from megatron_lite.config.logging_settings import LOG_FILE
from megatron_lite.config.run import RunConfig


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
