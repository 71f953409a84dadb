"""The settings of the log, as one frozen class."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_lite.config.checks import require_at_least, require_not_empty, require_one_of

TIMING_LOG_LEVELS = (0, 1, 2)
TIMING_LOG_OPTIONS = ("max", "minmax", "all")
LOG_STYLES = ("short", "megatron")
LOG_FILE = "train.log"  # its name in the folder of --save or --tensorboard-dir


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The output of a run while it trains.

    log_style: what standard output has: short lines of at most 120 columns ("short"), or Megatron's
        table of arguments and iteration line ("megatron"). The log file always has the latter.
    log_file: the file to which the log is appended. None: train.log in the folder of --save, or
        else of --tensorboard-dir; without either there is no file.
    peak_tflops_per_gpu: the peak that MFU and HFU divide by. None: a table gives it for the GPU's
        name.
    log_peak_memory: whether a run on a CPU measures the peak of its second step, as a run on a GPU
        always does. It takes some seconds.
    machine: the machine whose figures predict the time of a step: a name of plan/machines/ or a
        file of tools/calibrate.py. None: the GPU's name decides, and nothing is predicted on a CPU.
    memory_timeline: the file for the memory of one micro-batch, operator by operator.
        tools/plot_memory.py draws it.
    log_straggler: whether the log names slow ranks (supervision/slow_rank.py).
    straggler_ratio: R. A rank is slow if it takes more than R times the median of its stage.
    tensorboard_log_interval: TensorBoard and W&B get the figures of every so many iterations.
    wandb_project: the project of an offline run of Weights & Biases. None: there is none.
    wandb_save_dir: its folder. None: DIR/wandb of --save DIR.
    timing_log_level: 1 times the parts of a step, and 2 the parts of each micro-batch, too
        (training/timers.py).
    timing_log_option: whether the log shows the smallest and largest time of a rank ("minmax"), the
        largest ("max") or the times of all ranks ("all").
    straggler_minmax_count: the largest number of ranks that one log interval names.
    """

    log_interval: int = 100
    log_style: str = "short"
    log_file: str | None = None
    peak_tflops_per_gpu: float | None = None
    metrics_jsonl: str | None = None
    tensorboard_dir: str | None = None
    memory_timeline: str | None = None
    log_throughput: bool = False
    log_peak_memory: bool = False
    machine: str | None = None
    log_params_norm: bool = False
    log_num_zeros_in_grad: bool = False
    log_validation_ppl_to_tensorboard: bool = False
    log_timers_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_world_size_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    tensorboard_log_interval: int = 1
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    wandb_entity: str | None = None
    timing_log_level: int = 0
    timing_log_option: str = "minmax"
    log_straggler: bool = False
    straggler_minmax_count: int = 1
    straggler_ratio: float = 1.2

    def __post_init__(self) -> None:
        require_at_least(
            self, 1, "log_interval", "tensorboard_log_interval", "straggler_minmax_count"
        )
        if self.timing_log_level not in TIMING_LOG_LEVELS:
            raise ValueError(f"--timing-log-level must be 0, 1 or 2 (got {self.timing_log_level})")
        require_one_of(self, "timing_log_option", TIMING_LOG_OPTIONS)
        require_one_of(self, "log_style", LOG_STYLES)
        if self.wandb_project and self.wandb_exp_name == "":
            raise ValueError("--wandb-exp-name is empty: give the name of the experiment")
        if not 1.0 < self.straggler_ratio < math.inf:
            raise ValueError(
                f"--straggler-ratio must be above 1 and finite (got {self.straggler_ratio})"
            )
        require_not_empty(
            self, "log_file", "metrics_jsonl", "tensorboard_dir", "memory_timeline", "machine"
        )
        if self.peak_tflops_per_gpu is not None and not 0.0 < self.peak_tflops_per_gpu < math.inf:
            raise ValueError(
                f"--peak-tflops-per-gpu must be above 0 and finite (got {self.peak_tflops_per_gpu})"
            )
