"""The scalars of a run in TensorBoard and Weights & Biases, by Megatron's names.

Both packages are optional and loaded here, when a run needs them. W&B writes an offline run, which
`wandb sync` can upload later; the environment variable WANDB_MODE changes that.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpointing.directory import check_no_checkpoint
from megatron_lite.checkpointing.step_files import Progress
from megatron_lite.config.checks import InputError
from megatron_lite.config.invocation import module_of_extra
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.training.iteration_line import Interval, RunFacts, peak_gib

# The scalars that TensorBoard also gets over the consumed samples, as in Megatron.
BY_SAMPLES = (
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size"),
    *("grad-norm", "num-zeros", "params-norm"),
)


class TensorBoard:
    """Writes scalars to the folder of --tensorboard-dir, and some to its folder by_samples.

    start: the progress at the start. Points that an earlier run wrote past it are void.
    Raises InputError if the package is not installed, or if it cannot write in its folder.
    """

    name = "--tensorboard-dir"

    def __init__(self, folder: str, start: Progress) -> None:
        flag = f"{self.name} {folder}"
        check_no_checkpoint(Path(folder), flag)
        module_of_extra("tensorboard", "tensorboard", needed_by=flag)
        with _opening(flag):
            writer = import_module("torch.utils.tensorboard").SummaryWriter
            self._by_iteration = writer(folder, purge_step=start.iteration + 1)
            # A folder of its own: there the steps count samples, not iterations.
            self._by_samples = writer(
                os.path.join(folder, "by_samples"), purge_step=start.consumed_samples + 1
            )

    def write(
        self,
        iteration: int,
        consumed: int,
        scalars: Mapping[str, float],
        by_samples: Collection[str] = (),
    ) -> None:
        """Writes the points of an iteration, some of them also over the samples so far."""
        for name, value in scalars.items():
            self._by_iteration.add_scalar(name, value, iteration)
            if name in by_samples:
                self._by_samples.add_scalar(f"{name} vs samples", value, consumed)
        # A run that is killed loses no point, and a fault shows here.
        self._by_iteration.flush()
        self._by_samples.flush()

    def close(self) -> None:
        """Closes the files."""
        for writer in (self._by_iteration, self._by_samples):
            with suppress(Exception):  # whatever the package raises is no reason to fail
                writer.close()


class Wandb:
    """Writes scalars to a run of Weights & Biases.

    Raises InputError if the package is not installed, or if it cannot begin a run.
    """

    name = "--wandb-project"

    def __init__(self, config: RunConfig) -> None:
        logging = config.logging
        flag = f"{self.name} {logging.wandb_project}"
        wandb = module_of_extra("wandb", "wandb", needed_by=flag)
        folder = logging.wandb_save_dir or str(Path(config.checkpoint.save or ".") / "wandb")
        with _opening(flag):
            os.makedirs(folder, exist_ok=True)
            self._run: Any = wandb.init(
                project=logging.wandb_project,
                name=logging.wandb_exp_name,
                entity=logging.wandb_entity,
                dir=folder,
                config=dataclasses.asdict(config),
                mode=os.environ.get("WANDB_MODE", "offline"),
            )

    def write(
        self, iteration: int, consumed: int, scalars: Mapping[str, float], _: Collection[str] = ()
    ) -> None:
        """Writes the points of an iteration, and the samples so far."""
        self._run.log({**scalars, "samples vs steps": consumed}, step=iteration)

    def close(self) -> None:
        """Ends the run."""
        with suppress(Exception):  # as in TensorBoard.close
            self._run.finish(quiet=True)


@contextmanager
def _opening(flag: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InputError(f"{flag}: cannot be written ({error})") from error


def scalars_of(one: Interval, facts: RunFacts, config: LoggingConfig) -> dict[str, float | None]:
    """Returns the scalars of one iteration by Megatron's names; None if one is not asked for.

    The throughput and the peak of the memory need no flag, unlike in Megatron.
    """
    record = one.last
    scalars = {
        "learning-rate": record.learning_rate,
        "decoupled-learning-rate": record.decoupled_learning_rate,
        "batch-size": record.global_batch_size,
        "lm loss": record.lm_loss,
        "loss-scale": record.loss_scale if config.log_loss_scale_to_tensorboard else None,
        "world-size": facts.world_size if config.log_world_size_to_tensorboard else None,
        "grad-norm": record.grad_norm,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "load_balancing_loss": record.load_balancing_loss,
        "z_loss": record.z_loss,
        "expert-imbalance": record.expert_imbalance,
        "expert-rank-imbalance": record.expert_rank_imbalance,
        "throughput": one.teraflops,
        "tokens-per-second": record.tokens_per_second,
        "iteration-time": record.iteration_ms / 1000.0
        if config.log_timers_to_tensorboard
        else None,
        "mem-peak-gib": peak_gib(facts.device),
        **one.utilization,
    }
    if config.log_memory_to_tensorboard and facts.device.type == "cuda":
        stats = torch.cuda.memory_stats(facts.device)
        scalars |= {
            "mem-reserved-bytes": stats["reserved_bytes.all.current"],
            "mem-allocated-bytes": stats["allocated_bytes.all.current"],
            "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
            "mem-allocated-count": stats["allocation.all.current"],
        }
    return scalars
