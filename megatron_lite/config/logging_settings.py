"""The settings of the log and of the profilers, each as one frozen class."""

from functools import partial

from .setting import Settings, count, setting, several, switch

LOG_FILE = "train.log"  # its name in the folder of --save or --tensorboard-dir
_drawn = partial(setting, without="tensorboard_dir|wandb_project")
_of_nsight = partial(setting, without="profile", unless="use_pytorch_profiler")


class LoggingConfig(Settings):
    """The output of a run while it trains.

    log_style: what standard output has: short lines of at most 120 columns ("short"), or Megatron's
        table of arguments and iteration line ("megatron"). The log file always has the latter.
    log_file: the file to which the log is appended. None: train.log in the folder of --save, or
        else of --tensorboard-dir; without either there is no file.
    peak_tflops_per_gpu: the peak that MFU and HFU divide by. None: a table gives it for the GPU's
        name.
    log_peak_memory: whether a run on a CPU measures the peak of its second step, as a run on a GPU
        always does, or of the next one without --use-pytorch-profiler. It takes some seconds.
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
        (training/profiler.py).
    timing_log_option: whether the log shows the smallest and largest time of a rank ("minmax"), the
        largest ("max") or the times of all ranks ("all").
    straggler_minmax_count: the largest number of ranks that one log interval names.
    """

    log_interval: int = count("iterations between two lines", 100)
    log_style: str = setting(
        "standard output: short lines of at most 120 columns, or Megatron's table of arguments and "
        "iteration line, which the log file always has",
        "short",
        choices="short megatron",
    )
    log_file: str | None = setting(
        "file to which the whole log is appended; derived: train.log in the folder of --save, or "
        "else of --tensorboard-dir"
    )
    peak_tflops_per_gpu: float | None = setting(
        "dense peak in TFLOP/s, for MFU and HFU; derived from the GPU's name and dtype", above=0
    )
    metrics_jsonl: str | None = setting(
        "file for one JSON object per iteration, with full precision"
    )
    tensorboard_dir: str | None = setting("directory for TensorBoard")
    memory_timeline: str | None = setting(
        "file for the memory of one micro-batch, operator by operator, as JSON; "
        "python -m megatron_lite.tools.plot_memory draws it",
        excludes="pipeline_model_parallel_size>1",
        why="a pipeline mixes one micro-batch with others",
    )
    log_throughput: bool = switch(
        "TFLOP/s per GPU in Megatron's iteration line",
        without="log_style=megatron|log_file|save|tensorboard_dir",
    )
    log_peak_memory: bool = switch(
        "measure the peak of the second step on a CPU too, beside the predicted one; takes seconds"
    )
    machine: str | None = setting(
        "predict the time of a step for this machine: a name of tools/plan.py, or a JSON file of "
        "tools/calibrate.py; derived from the GPU's name"
    )
    log_params_norm: bool = switch("norm of all weights")
    log_num_zeros_in_grad: bool = switch("number of gradient elements that are zero")
    log_validation_ppl_to_tensorboard: bool = _drawn(
        "validation perplexity in TensorBoard", False, unless="eval_iters=0"
    )
    log_timers_to_tensorboard: bool = _drawn("iteration time in TensorBoard", False)
    log_memory_to_tensorboard: bool = _drawn(
        "all figures of the CUDA allocator in TensorBoard", False
    )
    log_world_size_to_tensorboard: bool = _drawn("number of ranks in TensorBoard", False)
    log_loss_scale_to_tensorboard: bool = _drawn(
        "no loss scale in TensorBoard",
        True,
        alias="--disable-log-loss-scale-to-tensorboard",
        name="--no-log-loss-scale-to-tensorboard",
    )
    tensorboard_log_interval: int = _drawn(
        "iterations between two points in TensorBoard and W&B", 1, least=1
    )
    wandb_project: str | None = setting(
        "project of an offline run of Weights & Biases, which gets the scalars of TensorBoard; "
        "needs the package wandb",
        needs="wandb_save_dir|save",
        why="it writes there",
    )
    wandb_exp_name: str | None = setting("its name", without="wandb_project")
    wandb_save_dir: str | None = setting(
        "its folder; derived: DIR/wandb of --save DIR", without="wandb_project"
    )
    wandb_entity: str | None = setting("its owner", without="wandb_project")
    timing_log_level: int = setting(
        "1: time the parts of a step; 2: and those of each micro-batch. Both wait for the GPU",
        0,
        choices=(0, 1, 2),
    )
    timing_log_option: str = setting(
        "times of the fastest and slowest rank, of the slowest, or of all",
        "minmax",
        choices="max minmax all",
        without="timing_log_level>0",
    )
    log_straggler: bool = switch(
        "name the slowest ranks, where they are slower than the others of their stage"
    )
    straggler_minmax_count: int = count("how many of them at most", 1, without="log_straggler")
    straggler_ratio: float = setting(
        "how many times the median's time a slow rank takes", 1.2, above=1, without="log_straggler"
    )


class ProfilingConfig(Settings):
    """The settings of what a run records about itself.

    profile_step_start, profile_step_end: S and E. The iterations S + 1 to E are profiled.
    profile_ranks: the global ranks that are profiled. An empty tuple: all ranks.
    use_pytorch_profiler: whether torch's profiler records. Otherwise the iterations are marked for
        NVIDIA's Nsight Systems, on CUDA only.
    record_shapes, nvtx_ranges: whether Nsight Systems sees each operator, with or without shapes.
    record_memory_history: whether CUDA's allocations are recorded and written to
        memory_snapshot_path, with the rank in the name, at each --log-interval.
    """

    profile: bool = switch(
        "profile some iterations, for Nsight Systems or with --use-pytorch-profiler"
    )
    profile_step_start: int = setting(
        "the iteration after which profiling begins", 10, least=0, without="profile"
    )
    profile_step_end: int = setting("the last iteration that is profiled", 12, without="profile")
    profile_ranks: tuple[int, ...] = several(
        "global ranks to profile; all if omitted", least=0, without="profile|record_memory_history"
    )
    use_pytorch_profiler: bool = switch(
        "write a Chrome trace of each rank to torch_profile/ under --tensorboard-dir, else --save",
        needs="tensorboard_dir|save",
        without="profile",
        why="it writes there",
    )
    pytorch_profiler_collect_shapes: bool = switch(
        "shapes of tensors in the trace", without="use_pytorch_profiler"
    )
    pytorch_profiler_collect_callstack: bool = switch(
        "Python's stack in the trace", without="use_pytorch_profiler"
    )
    record_shapes: bool = _of_nsight("operators with shapes for Nsight Systems", False)
    nvtx_ranges: bool = _of_nsight("operators for Nsight Systems", False)
    record_memory_history: bool = switch(
        "write CUDA's allocations to --memory-snapshot-path at each --log-interval"
    )
    memory_snapshot_path: str = setting(
        "file for them; _RANK is put before its last suffix",
        "snapshot.pickle",
        without="record_memory_history",
    )

    def check_rules(self) -> None:
        if self.profile and self.profile_step_end <= self.profile_step_start:
            raise ValueError(
                f"--profile-step-end {self.profile_step_end} must be above --profile-step-start "
                f"{self.profile_step_start}: the iterations between them are profiled"
            )

    def records(self, iteration: int) -> bool:
        """Returns whether a profiler records the iteration, counted from 1, on any rank."""
        return self.profile and self.profile_step_start < iteration <= self.profile_step_end

    def of_rank(self, rank: int) -> bool:
        """Returns whether a profiler records the global rank `rank`, if the run has a profiler."""
        return not self.profile_ranks or rank in self.profile_ranks
