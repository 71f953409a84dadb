"""The scalars of a run in TensorBoard and Weights & Biases, by Megatron's names.

Both packages are optional and loaded here, when a run needs them. W&B writes an offline run, which
`wandb sync` can upload later; the environment variable WANDB_MODE changes that.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpointing.directory import check_no_checkpoint
from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import module_of_extra
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.training.iteration_line import (
    LogExtras,
    RunFacts,
    full_batch_ms,
    peak_gib,
    teraflops,
    utilization,
)
from megatron_lite.training.metrics import IterationRecord

# The scalars that TensorBoard also gets over the consumed samples, as in Megatron.
BY_SAMPLES = (
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size"),
    *("grad-norm", "num-zeros", "params-norm"),
)


class Scalars:
    """Writes the scalars of one run to TensorBoard's folder and to W&B, if the run has them.

    start: the progress at the start. Points that an earlier run wrote past it are void.
    A fault of a package does not end the run: it gives one warning.
    Raises InputError if a package is not installed, or if it cannot write in its folder.
    """

    def __init__(self, config: RunConfig, start: Progress) -> None:
        self._lost: set[str] = set()
        self._writers: list[Any] = []
        self._wandb: Any = None
        folder, project = config.logging.tensorboard_dir, config.logging.wandb_project
        if folder is not None:
            flag = f"--tensorboard-dir {folder}"
            check_no_checkpoint(Path(folder), flag)
            module_of_extra("tensorboard", "tensorboard", needed_by=flag)
            torch_writer = _opened(flag, partial(import_module, "torch.utils.tensorboard"))
            # A folder of its own: there the steps count samples, not iterations.
            by_samples = os.path.join(folder, "by_samples")
            for path, done in ((folder, start.iteration), (by_samples, start.consumed_samples)):
                open_ = partial(torch_writer.SummaryWriter, path, purge_step=done + 1)
                self._writers.append(_opened(flag, open_))
        if project:
            flag = f"--wandb-project {project}"
            wandb = module_of_extra("wandb", "wandb", needed_by=flag)
            self._wandb = _opened(flag, partial(_wandb_run, wandb, config))

    def write(
        self,
        scalars: Mapping[str, float | None],
        *,
        iteration: int,
        consumed: int,
        by_samples: Collection[str] = (),
    ) -> Iterator[str]:
        """Writes the scalars that are not None. Yields a warning for the first fault of a package.

        consumed: the samples so far.
        by_samples: those that TensorBoard also gets over the consumed samples.
        """
        known = {name: value for name, value in scalars.items() if value is not None}

        def to_tensorboard() -> None:
            by_iteration, over_samples = self._writers
            for name, value in known.items():
                by_iteration.add_scalar(name, value, iteration)
                if name in by_samples:
                    over_samples.add_scalar(f"{name} vs samples", value, consumed)
            for writer in self._writers:
                writer.flush()  # a run that is killed loses no point, and a fault shows here

        def to_wandb() -> None:
            self._wandb.log({**known, "samples vs steps": consumed}, step=iteration)

        for flag, used, send in (
            ("--tensorboard-dir", self._writers, to_tensorboard),
            ("--wandb-project", self._wandb, to_wandb),
        ):
            try:
                if used:
                    send()
            except Exception as error:  # whatever the package raises is no reason to stop training
                if flag not in self._lost:
                    self._lost.add(flag)
                    yield f"warning: {flag}: iteration {iteration} is not written ({error})"

    def close(self) -> None:
        """Closes the files and W&B's run."""
        for writer in self._writers:
            with suppress(Exception):  # as in `write`
                writer.close()
        with suppress(Exception):
            if self._wandb is not None:
                self._wandb.finish(quiet=True)


def _opened(flag: str, open_: Callable[[], Any]) -> Any:
    try:
        return open_()
    except Exception as error:
        raise InputError(f"{flag}: cannot be written ({error})") from error


def _wandb_run(wandb: Any, config: RunConfig) -> Any:
    logging = config.logging
    folder = logging.wandb_save_dir or str(Path(config.checkpoint.save or ".") / "wandb")
    os.makedirs(folder, exist_ok=True)
    return wandb.init(
        project=logging.wandb_project,
        name=logging.wandb_exp_name,
        entity=logging.wandb_entity,
        dir=folder,
        config=dataclasses.asdict(config),
        mode=os.environ.get("WANDB_MODE", "offline"),
    )


def scalars_of(
    record: IterationRecord, extras: LogExtras, facts: RunFacts, config: LoggingConfig
) -> dict[str, float | None]:
    """Returns the scalars of an iteration by Megatron's names; None if one is not asked for.

    The throughput and the peak of the memory need no flag, unlike in Megatron.
    """
    return {
        "learning-rate": record.learning_rate,
        "decoupled-learning-rate": record.decoupled_learning_rate,
        "batch-size": record.global_batch_size,
        "lm loss": record.lm_loss,
        "loss-scale": record.loss_scale if config.log_loss_scale_to_tensorboard else None,
        "world-size": facts.world_size if config.log_world_size_to_tensorboard else None,
        "grad-norm": record.grad_norm,
        "num-zeros": extras.num_zeros,
        "params-norm": extras.params_norm,
        "throughput": teraflops(full_batch_ms([record], facts), facts),
        "tokens-per-second": record.tokens_per_second,
        "iteration-time": record.iteration_ms / 1000.0
        if config.log_timers_to_tensorboard
        else None,
        "mem-peak-gib": peak_gib(facts.device),
        **(memory_scalars(facts.device) if config.log_memory_to_tensorboard else {}),
        **utilization([record], facts),
    }


def memory_scalars(device: torch.device) -> dict[str, float | None]:
    """Returns Megatron's figures of CUDA's allocator; none on a CPU, which has no allocator."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }
