"""Weights & Biases, offline: `--wandb-project` writes a run that `wandb sync` can upload later.

The environment variable WANDB_MODE changes the mode; without it the program opens no connection.
The package wandb is optional: `pip install -e '.[wandb]'`.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.config.extras import install_advice
from megatron_lite.config.run import RunConfig


class WandbRun:
    """One run of Weights & Biases. A fault of the package does not end the run.

    Raises InputError if the package is not installed or the run cannot be begun.
    """

    def __init__(self, config: RunConfig) -> None:
        logging = config.logging
        folder = logging.wandb_save_dir or str(Path(config.checkpoint.save or ".") / "wandb")
        try:
            import wandb
        except ImportError as error:
            raise InputError(
                f"--wandb-project {logging.wandb_project} needs the package wandb, which is not "
                f"installed: {install_advice('wandb')}, or leave the flag out"
            ) from error
        self._lost = False
        try:
            os.makedirs(folder, exist_ok=True)
            self._run: Any = wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_exp_name,
                entity=logging.wandb_entity,
                dir=folder,
                config=dataclasses.asdict(config),
                mode=os.environ.get("WANDB_MODE", "offline"),
            )
        except Exception as error:
            raise InputError(
                f"--wandb-project {logging.wandb_project}: no run can be begun in {folder} "
                f"({error})"
            ) from error

    def log(self, scalars: dict[str, float], iteration: int) -> str | None:
        """Writes the scalars of an iteration. Returns a warning after the first fault."""
        try:
            self._run.log(scalars, step=iteration)
        except Exception as error:  # whatever the package raises is no reason to stop training
            if not self._lost:
                self._lost = True
                return f"warning: --wandb-project: iteration {iteration} is not written ({error})"
        return None

    def close(self) -> None:
        """Ends the run."""
        try:
            self._run.finish(quiet=True)
        except Exception:  # as in `log`
            self._lost = True
