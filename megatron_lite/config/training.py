"""The settings of training itself: its length, its batches, its precision and its guards."""

import itertools

from .batch_schedule import MOST_STEPS, BatchSchedule, Steps, parse_steps, ramp_steps
from .checks import quoted
from .setting import (
    ContradictionError,
    Settings,
    count,
    required,
    resolve,
    setting,
    several,
    switch,
)
from .units import parse_bytes

LANGUAGE_MODEL_SEED = 1234
WHOLE_STEP = "full_iteration"
GRAPH_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")


class TrainingConfig(Settings):
    """The length of the run, its batch sizes, its precision, and the rules that stop it.

    rampup_batch_size: (start, increment, samples) of a batch size that grows to global_batch_size.
        An empty tuple: the batch size is constant.
    step_batch_size_schedule: steps such as "0:16 2.4B:320": the numbers of consumed tokens at which
        the batch gets another size. None: no steps. The last size is the global batch size.
    gradient_accumulation_fusion: whether the matmul of a weight's gradient adds to the float32 sum.
        NVIDIA apex's kernel does so on CUDA if apex is installed, and torch's addmm does so for
        float32 weights.
    memory_limit: an amount such as 4GiB. A rank that allocates more stops the run, as if its
        device had no more memory. None: no limit but the device's.
    allow_predicted_out_of_memory: whether to start a run whose predicted peak exceeds the memory.
    loss_chunk_size: how many tokens of a micro-batch have logits at a time. 0: all tokens have
        logits at once, and the logits are kept for backward. None: the default of the run
        (RunConfig.loss_chunk_size, to be read instead).
    calculate_per_token_loss: whether each token that counts has the same weight in the gradients
        of a step. If not, each micro-batch has the same weight (training/loss_mask.py).
    max_skipped_updates: the number of skipped updates in a row that stops the run. None: 10 spikes
        in a row stop the run, and so does the first update that is not finite, under
        check_for_nan_in_loss_and_grad. An overflow above the smallest loss scale never does.
    skip_update_on_spike: K. A loss above K times its running mean is a spike, and its update is
        skipped (optim/loss_scale.py).
    """

    micro_batch_size: int = required("samples of one forward pass on one rank", least=1)
    global_batch_size: int | None = count(
        "samples of one iteration over all ranks; derived: one micro-batch per replica",
        multiple_of="micro_batch_size",
    )
    rampup_batch_size: tuple[int, ...] = several(
        "START INCREMENT SAMPLES: a batch that grows from START to --global-batch-size by "
        "INCREMENT at a time, while SAMPLES are consumed",
        nargs=3,
        least=1,
        needs="global_batch_size",
    )
    step_batch_size_schedule: str | None = setting(
        "TOKENS:SAMPLES ..: the batch size from each number of consumed tokens on, such as "
        "'0:768 250B:1536'; the last one is --global-batch-size",
        excludes="rampup_batch_size",
    )
    train_iters: int | None = setting(
        "length of the run in iterations; or --train-samples",
        least=0,
        excludes="train_samples",
        why="both give the length of the run",
    )
    train_samples: int | None = count("length of the run in samples")
    seed: int = setting(
        "seed of initial weights, data order and dropout", LANGUAGE_MODEL_SEED, least=0, below=2**32
    )
    bf16: bool = switch(
        "weights and activations in bfloat16, master weights in float32; --model assumes it",
        excludes="fp16",
        why="weights have one precision",
    )
    fp16: bool = switch(
        "weights and activations in float16, master weights in float32, and the loss scaled"
    )
    gradient_accumulation_fusion: bool = setting(
        "let autograd add up the gradients of linear weights, not NVIDIA apex's kernel or the "
        "backward of the layers (docs/performance.md)",
        True,
        name="--no-gradient-accumulation-fusion",
    )
    memory_limit: str | None = setting(
        "stop with advice if a rank allocates more than this, such as 4GiB, as if its device had "
        "no more"
    )
    allow_predicted_out_of_memory: bool = switch(
        "start a run also if the predicted peak of a step exceeds the memory of the machine"
    )
    loss_chunk_size: int | None = setting(
        "tokens of a micro-batch that have logits at a time; 0: all of them, and their logits are "
        "kept. In float32 forward computes the gradients too, and the default is 512. In 16 bits "
        "and under FSDP2 backward computes the logits again, and the default is 0. In 16 bits the "
        "gradient of the output weight is then a sum of rounded parts",
        least=0,
    )
    calculate_per_token_loss: bool = switch(
        "give each token that counts the same weight in the gradients, not each micro-batch; only "
        "--eod-mask-loss makes a difference between them",
        without="eod_mask_loss",
    )
    eval_interval: int | None = count(
        "iterations between validations; the end of the run has one in any case",
        unless="eval_iters=0",
    )
    eval_iters: int = setting("global batches of one validation; 0 for none at all", 100, least=0)
    eval_global_batch_size: int | None = count(
        "samples of a batch of a validation; none: the full batch of training",
        unless="eval_iters=0",
    )
    exit_interval: int | None = count("save and stop when the iteration is a multiple of it")
    exit_duration_in_mins: int | None = count(
        "save and stop after the iteration that ends later than this"
    )
    exit_signal_handler: bool = switch(
        "save and stop after the iteration or the batch of an evaluation in which any rank gets "
        "SIGTERM, SIGUSR1, SIGUSR2 or --exit-signal"
    )
    exit_signal: str = setting(
        "another signal that --exit-signal-handler waits for",
        "SIGTERM",
        choices="SIGTERM SIGINT SIGHUP SIGUSR1 SIGUSR2",
        needs="exit_signal_handler",
        why="without it a signal ends the run at once",
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        "go on after a NaN", True, name="--no-check-for-nan-in-loss-and-grad"
    )
    max_skipped_updates: int | None = count(
        "stop after so many skipped updates in a row; derived: after 1 of a NaN, and "
        "after 10 of a spike"
    )
    skip_update_on_spike: float | None = setting(
        "skip the update where the loss is above so many times its running mean",
        above=1,
        why="a spike is a loss above so many times its running mean",
    )
    check_weight_hash_across_dp_replicas_interval: int | None = count(
        "iterations between comparisons of the weights that several ranks hold alike; also before "
        "each checkpoint"
    )
    torch_compile: bool | None = setting(
        "compile norms, activations, rotary embedding, dropout and the loss with torch's compiler; "
        "with --activation-memory-budget each layer as a whole, at one rank per layer; derived: on "
        "CUDA"
    )
    deterministic_mode: bool = switch("only algorithms that give the same bits every time")
    cuda_graph_impl: str = setting(
        "full_iteration: from --cuda-graph-warmup-steps on, launch each step on a GPU as one CUDA "
        "graph, forward, backward and update, which local and transformer_engine mean here too "
        "(docs/performance.md)",
        "none",
        choices=f"none {WHOLE_STEP}",
        megatron=dict.fromkeys(("local", "transformer_engine"), WHOLE_STEP),
        excludes="recompute_verify timing_log_level>0 log_straggler use_torch_fsdp2 "
        "overlap_param_gather optimizer=muon reset_attention_mask optimizer_cpu_offload "
        "moe_router_load_balancing_type=sinkhorn",
        why="a graph runs no Python, nothing that its step does not end, and reads no host memory",
    )
    cuda_graph_modules: tuple[str, ...] = several(
        "full_iteration: the same as --cuda-graph-impl full_iteration; Megatron's other modules "
        "are parts of that graph here",
        choices=(WHOLE_STEP, "full", *GRAPH_MODULES),
        without="cuda_graph_impl=full_iteration",
    )
    cuda_graph_warmup_steps: int = setting(
        "steps without a graph before the first one; fewer than 3 count as 3",
        3,
        least=0,
        without="cuda_graph_impl=full_iteration",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "exit_signal", self.exit_signal.upper())
        if WHOLE_STEP in self.cuda_graph_modules:
            object.__setattr__(self, "cuda_graph_impl", WHOLE_STEP)
        super().__post_init__()
        _ = self.memory_limit_bytes
        if text := self.step_batch_size_schedule:
            last = parse_steps(text)[-1][1]
            resolve(self, "global_batch_size", last)
            if self.global_batch_size != last:
                raise ContradictionError(
                    f"--step-batch-size-schedule {quoted(text)} ends with a batch of {last} "
                    f"samples, and --global-batch-size is {self.global_batch_size}: leave "
                    "--global-batch-size out",
                    "global_batch_size step_batch_size_schedule",
                )
        if self.rampup_batch_size:
            name = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
            if len(self.rampup_batch_size) != 3:
                raise ValueError(f"{name}: give START INCREMENT SAMPLES, three numbers")
            assert self.global_batch_size
            start, increment, _ = self.rampup_batch_size
            missing = self.global_batch_size - start
            if missing <= 0:
                raise ValueError(
                    f"{name}: the start must be below --global-batch-size {self.global_batch_size}"
                )
            if missing % increment:
                raise ValueError(
                    f"{name}: --global-batch-size {self.global_batch_size} - {start} = {missing} "
                    f"is not a multiple of the increment {increment}"
                )
            if missing // increment > MOST_STEPS:
                raise ValueError(f"{name}: more than {MOST_STEPS} steps; give a larger increment")

    @property
    def precision(self) -> str:
        """The format of weights and activations: "fp32", "bf16" or "fp16"."""
        if self.bf16:
            return "bf16"
        return "fp16" if self.fp16 else "fp32"

    @property
    def memory_limit_bytes(self) -> int | None:
        """The bytes of --memory-limit."""
        limit = self.memory_limit
        return parse_bytes("--memory-limit", limit, least=1) if limit else None

    def batch_size(self, data_parallel_size: int) -> int:
        """Returns the number of samples per iteration over all ranks.

        It is `--global-batch-size` if given, else one micro-batch per data-parallel rank.
        """
        return self.global_batch_size or self.micro_batch_size * data_parallel_size

    def num_microbatches(self, data_parallel_size: int) -> int:
        """Returns the number of micro-batches that one rank runs per iteration.

        Raises ValueError if the batch does not divide over ranks and micro-batches.
        """
        batch = self.batch_size(data_parallel_size)
        step = self.micro_batch_size * data_parallel_size
        if batch % step:
            raise ValueError(
                f"--global-batch-size {batch} is not divisible by --micro-batch-size "
                f"{self.micro_batch_size} x data-parallel size {data_parallel_size} = {step}"
            )
        return batch // step

    def most_microbatches(self, data_parallel_size: int) -> int:
        """Returns the largest number of micro-batches that one rank runs in an iteration.

        It decides how much memory a step needs. A --step-batch-size-schedule may end with a smaller
        batch.
        Raises ValueError if the batch does not divide over ranks and micro-batches.
        """
        number, text = self.num_microbatches(data_parallel_size), self.step_batch_size_schedule
        if text is None:
            return number
        largest = max(size for _, size in parse_steps(text))
        return largest // (self.micro_batch_size * data_parallel_size)

    def batch_schedule(
        self, data_parallel_size: int, *, seq_length: int | None = None
    ) -> BatchSchedule:
        """Returns the schedule of the batch size over the run.

        seq_length: the tokens of a sample. The steps of --step-batch-size-schedule count tokens;
            the other schedules do not need it.

        Raises ValueError if one of its sizes does not divide over ranks and micro-batches. Of
        --step-batch-size-schedule only the last size must: a run that continues with more ranks may
        have passed the smaller ones.
        """
        self.num_microbatches(data_parallel_size)
        full, step = self.batch_size(data_parallel_size), self.micro_batch_size * data_parallel_size
        steps: Steps = ((0, full),)
        if self.step_batch_size_schedule:
            assert seq_length
            steps = self.batch_steps(seq_length)
        elif self.rampup_batch_size:
            start, increment, samples = self.rampup_batch_size
            for what, size in (("start", start), ("increment", increment)):
                if size % step:
                    raise ValueError(
                        f"--rampup-batch-size {start} {increment} {samples}: the {what} {size} is "
                        f"not divisible by --micro-batch-size {self.micro_batch_size} x "
                        f"data-parallel size {data_parallel_size} = {step}"
                    )
            steps = ramp_steps(start, increment, samples, full)
        return BatchSchedule(steps=steps, samples_per_microbatch=step)

    def batch_steps(self, seq_length: int) -> Steps:
        """Returns (samples, size) of each step of --step-batch-size-schedule.

        Raises ValueError if two steps are at the same sample.
        """
        text = self.step_batch_size_schedule
        if text is None:
            return ()
        steps = tuple((tokens // seq_length, size) for tokens, size in parse_steps(text))
        for (samples, _), (following, _) in itertools.pairwise(steps):
            if samples == following:
                raise ValueError(
                    f"--step-batch-size-schedule {quoted(text)}: two steps are at sample "
                    f"{samples} of --seq-length {seq_length} tokens; give steps that are further "
                    "apart"
                )
        return steps

    def num_iterations(self, batches: BatchSchedule, *, done: int = 0, consumed: int = 0) -> int:
        """Returns the length of the run in iterations.

        done: the number of iterations that have run already.
        consumed: the number of samples that these iterations consumed.

        Raises ValueError if neither `--train-iters` nor `--train-samples` is given, or if the
        samples are too few for one iteration.
        """
        if self.train_samples:
            if self.train_samples < batches.steps[0][1]:
                raise ValueError(
                    f"--train-samples {self.train_samples} is less than the first batch of "
                    f"{batches.steps[0][1]} samples: give more, or smaller batches"
                )
            return done + batches.iterations_within(self.train_samples, consumed=consumed)
        if self.train_iters is None:
            raise ValueError(
                "the length of the run is not given: set --train-iters or --train-samples"
            )
        return self.train_iters
