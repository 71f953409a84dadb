"""The topics training, learning rate, data, tokenizer, checkpoint and logging of a run.

Each topic is one frozen class.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.checks import (
    flag,
    require_at_least,
    require_not_empty,
    require_one_of,
    require_within,
    resolve,
)

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
TOKENIZER_TYPES = ("NullTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer")
LANGUAGE_MODEL_SEED = 1234
EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The length of the run, its batch sizes, its precision, and the rules that stop it.

    rampup_batch_size: (start, increment, samples) of a batch size that grows to global_batch_size.
        An empty tuple: the batch size is constant.
    gradient_accumulation_fusion: whether NVIDIA apex's kernel sums weight gradients on CUDA, if
        apex is installed.
    loss_chunk_size: how many tokens of a micro-batch have logits at a time. None: all tokens have
        logits at once, and the logits are kept for backward.
    max_skipped_updates: the number of skipped updates in a row that stops the run. None: 10 spikes
        in a row stop the run, and so does the first update that is not finite, under
        check_for_nan_in_loss_and_grad. An overflow above the smallest loss scale never does.
    skip_update_on_spike: K. A loss above K times its running mean is a spike, and its update is
        skipped (optim/spike.py).
    """

    micro_batch_size: int
    global_batch_size: int | None = None
    rampup_batch_size: tuple[int, ...] = ()
    train_iters: int | None = None
    train_samples: int | None = None
    seed: int = LANGUAGE_MODEL_SEED
    bf16: bool = False
    fp16: bool = False
    gradient_accumulation_fusion: bool = True
    loss_chunk_size: int | None = None
    eval_interval: int | None = None
    eval_iters: int = 100
    exit_interval: int | None = None
    exit_duration_in_mins: int | None = None
    exit_signal_handler: bool = False
    exit_signal: str = "SIGTERM"
    check_for_nan_in_loss_and_grad: bool = True
    max_skipped_updates: int | None = None
    skip_update_on_spike: float | None = None
    check_weight_hash_across_dp_replicas_interval: int | None = None
    torch_compile: bool = False
    deterministic_mode: bool = False

    def __post_init__(self) -> None:
        require_at_least(
            self,
            1,
            "micro_batch_size",
            "global_batch_size",
            "train_samples",
            "eval_interval",
            "exit_interval",
            "exit_duration_in_mins",
            "loss_chunk_size",
            "max_skipped_updates",
            "check_weight_hash_across_dp_replicas_interval",
        )
        if self.skip_update_on_spike is not None and not 1.0 < self.skip_update_on_spike < math.inf:
            raise ValueError(
                "--skip-update-on-spike must be above 1 and finite (got "
                f"{self.skip_update_on_spike}): a spike is a loss above so many times its running "
                "mean"
            )
        object.__setattr__(self, "exit_signal", self.exit_signal.upper())
        require_one_of(self, "exit_signal", EXIT_SIGNALS)
        if self.exit_signal != "SIGTERM" and not self.exit_signal_handler:
            raise ValueError(f"--exit-signal {self.exit_signal} needs --exit-signal-handler")
        require_at_least(self, 0, "eval_iters", "train_iters")
        require_within(self, 0, 2**32, "seed")
        if self.fp16 and self.bf16:
            raise ValueError("--fp16 and --bf16 are two precisions: set one")
        if self.train_iters is not None and self.train_samples is not None:
            raise ValueError(
                "--train-iters and --train-samples both give the length of the run: set one"
            )
        if self.global_batch_size is not None and self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is not divisible by "
                f"--micro-batch-size {self.micro_batch_size}"
            )
        if self.train_samples is not None and self.global_batch_size is None:
            raise ValueError(
                "--train-samples needs --global-batch-size: the number of iterations follows "
                "from both"
            )
        # argparse gives a list, and `from_json` a tuple: both must make equal values.
        object.__setattr__(self, "rampup_batch_size", tuple(self.rampup_batch_size))
        if self.rampup_batch_size:
            self._check_rampup()

    def _check_rampup(self) -> None:
        name = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1:
            raise ValueError(f"{name}: give START INCREMENT SAMPLES, three numbers of at least 1")
        if self.global_batch_size is None:
            raise ValueError(f"{name} needs --global-batch-size, the batch at the end of the ramp")
        start, increment, _ = self.rampup_batch_size
        missing = self.global_batch_size - start
        if missing <= 0:
            raise ValueError(
                f"{name}: the start must be below --global-batch-size {self.global_batch_size}"
            )
        if missing % increment:
            raise ValueError(
                f"{name}: --global-batch-size {self.global_batch_size} - {start} = {missing} is "
                f"not a multiple of the increment {increment}"
            )

    @property
    def precision(self) -> str:
        """The format of weights and activations: "fp32", "bf16" or "fp16"."""
        if self.bf16:
            return "bf16"
        return "fp16" if self.fp16 else "fp32"

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

    def batch_schedule(self, data_parallel_size: int) -> BatchSchedule:
        """Returns the schedule of the batch size over the run.

        Raises ValueError if one of its sizes does not divide over ranks and micro-batches.
        """
        self.num_microbatches(data_parallel_size)
        full, step = self.batch_size(data_parallel_size), self.micro_batch_size * data_parallel_size
        if not self.rampup_batch_size:
            return BatchSchedule.constant(full, samples_per_microbatch=step)
        start, increment, samples = self.rampup_batch_size
        for what, size in (("start", start), ("increment", increment)):
            if size % step:
                raise ValueError(
                    f"--rampup-batch-size {start} {increment} {samples}: the {what} {size} is not "
                    f"divisible by --micro-batch-size {self.micro_batch_size} x data-parallel size "
                    f"{data_parallel_size} = {step}"
                )
        return BatchSchedule(
            full=full,
            samples_per_microbatch=step,
            start=start,
            increment=increment,
            ramp_samples=samples,
        )

    def num_iterations(self, batches: BatchSchedule, *, done: int = 0, consumed: int = 0) -> int:
        """Returns the length of the run in iterations.

        done: the number of iterations that have run already.
        consumed: the number of samples that these iterations consumed.

        Raises ValueError if neither `--train-iters` nor `--train-samples` is given, or if the
        samples are too few for one iteration.
        """
        if self.train_samples is not None:
            if self.train_samples < batches.start:
                name = (
                    "start of --rampup-batch-size"
                    if self.rampup_batch_size
                    else "--global-batch-size"
                )
                raise ValueError(
                    f"--train-samples {self.train_samples} is less than one {name} "
                    f"({batches.start})"
                )
            return done + batches.iterations_within(self.train_samples, consumed=consumed)
        if self.train_iters is None:
            raise ValueError(
                "the length of the run is not given: set --train-iters or --train-samples"
            )
        return self.train_iters


@dataclass(frozen=True, kw_only=True)
class LrScheduleConfig:
    """The learning rate over the run.

    Lengths count samples if `--train-samples` gives the length of the run, else iterations. This
    is Megatron's rule.
    """

    lr: float | None = None
    min_lr: float = 0.0
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_fraction: float | None = None
    lr_warmup_init: float = 0.0
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None

    def __post_init__(self) -> None:
        require_one_of(self, "lr_decay_style", LR_DECAY_STYLES)
        require_one_of(self, "lr_wsd_decay_style", WSD_DECAY_STYLES)
        require_at_least(
            self, 0.0, "lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples"
        )
        require_at_least(
            self,
            1,
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
        )
        require_within(self, 0.0, 1.0, "lr_warmup_fraction")
        if self.lr is not None and self.min_lr > self.lr:
            raise ValueError(f"--min-lr {self.min_lr} is above --lr {self.lr}")
        if self.lr is not None and self.lr_warmup_init > self.lr:
            raise ValueError(f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}")
        if self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            raise ValueError(
                "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples: set one"
            )
        if (
            self.lr_decay_style == "WSD"
            and self.lr_wsd_decay_iters is None
            and self.lr_wsd_decay_samples is None
        ):
            raise ValueError(
                "--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples)"
            )
        if self.lr_decay_style != "WSD" and (self.lr_wsd_decay_iters or self.lr_wsd_decay_samples):
            raise ValueError(
                f"--lr-wsd-decay-iters needs --lr-decay-style WSD (got {self.lr_decay_style})"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a run: dataset prefixes with optional weights, split and sequence length."""

    seq_length: int
    data_path: tuple[str, ...] = ()
    mock_data: bool = False
    split: str = "969, 30, 1"
    data_cache_path: str | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 1, "seq_length")
        object.__setattr__(self, "data_path", tuple(self.data_path))
        if self.data_path and self.mock_data:
            raise ValueError("--data-path and --mock-data are two sources of data: set one")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer and the size of the vocabulary.

    tokenizer_type: None: GPT2BPETokenizer if one of its files is given, as in Megatron's
        pretrain_gpt.py, else NullTokenizer.
    vocab_size: None: the size is read from the tokenizer's files before the run starts.
    """

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128

    def __post_init__(self) -> None:
        require_at_least(self, 1, "vocab_size", "make_vocab_size_divisible_by")
        if self.tokenizer_type is None and self.tokenizer_model is not None:
            raise ValueError(
                f"--tokenizer-model needs --tokenizer-type ({', '.join(TOKENIZER_TYPES)})"
            )
        reads_bpe_files = self.vocab_file is not None or self.merge_file is not None
        resolve(self, "tokenizer_type", "GPT2BPETokenizer" if reads_bpe_files else "NullTokenizer")
        require_one_of(self, "tokenizer_type", TOKENIZER_TYPES)
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ValueError(
                "--tokenizer-type NullTokenizer needs --vocab-size (or choose a tokenizer with "
                "--tokenizer-type and its files)"
            )
        if self.tokenizer_type == "HuggingFaceTokenizer" and self.tokenizer_model is None:
            raise ValueError(
                "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model (a "
                "tokenizer.json or its folder)"
            )
        if self.tokenizer_type == "GPT2BPETokenizer" and (
            self.vocab_file is None or self.merge_file is None
        ):
            raise ValueError(
                "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file"
            )
        if self.tokenizer_type != "HuggingFaceTokenizer" and self.tokenizer_model is not None:
            raise ValueError(
                f"--tokenizer-type {self.tokenizer_type} does not read --tokenizer-model: "
                "leave it out"
            )
        if self.tokenizer_type != "GPT2BPETokenizer" and reads_bpe_files:
            raise ValueError(
                f"--tokenizer-type {self.tokenizer_type} does not read --vocab-file or "
                "--merge-file: leave them out"
            )

    @property
    def true_vocab_size(self) -> int:
        """V, the number of ids that the tokenizer can produce.

        NullTokenizer adds one id for end-of-document, as Megatron's does. Raises ValueError if the
        size of the vocabulary is not known yet.
        """
        if self.vocab_size is None:
            raise ValueError(
                f"the vocabulary of --tokenizer-type {self.tokenizer_type} is not known yet: "
                "set --vocab-size"
            )
        return self.vocab_size + 1 if self.tokenizer_type == "NullTokenizer" else self.vocab_size

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Returns V rounded up to a multiple of `make_vocab_size_divisible_by` x t.

        Each tensor-parallel rank then holds the same number of rows of the embedding.
        """
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.true_vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The directories of checkpoints, and the rule for which checkpoints stay.

    save_keep_last: K. The last K checkpoints stay.
    save_retain_interval: N. The checkpoints of iterations that are multiples of N stay. Without
        save_keep_last the last checkpoint stays too.
    async_save: whether training goes on while a checkpoint is written.

    If neither save_keep_last nor save_retain_interval is given, all checkpoints stay.
    """

    save: str | None = None
    save_interval: int | None = None
    save_retain_interval: int | None = None
    save_keep_last: int | None = None
    async_save: bool = False
    load: str | None = None
    allow_fresh_start: bool = False
    finetune: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    no_load_fallback: bool = False
    allow_changed_data: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, 1, "save_interval", "save_retain_interval", "save_keep_last")
        require_not_empty(self, "save", "load")
        for field in ("save_interval", "save_retain_interval", "save_keep_last"):
            if getattr(self, field) is not None and self.save is None:
                raise ValueError(f"{flag(field)} {getattr(self, field)} needs --save DIR")
        if self.async_save and self.save is None:
            raise ValueError("--async-save needs --save DIR")
        if self.save_interval is not None and (self.save_retain_interval or 0) % self.save_interval:
            raise ValueError(
                f"--save-retain-interval {self.save_retain_interval} is not a multiple of "
                f"--save-interval {self.save_interval}: most of the iterations that it would keep "
                "are not saved"
            )
        for field in (
            "allow_fresh_start",
            "finetune",
            "no_load_optim",
            "no_load_rng",
            "no_load_fallback",
            "allow_changed_data",
        ):
            if getattr(self, field) and self.load is None:
                raise ValueError(f"{flag(field)} needs --load DIR")

    @property
    def continues(self) -> bool:
        """Whether `--save` and `--load` are the same directory.

        Their real paths are compared, so symbolic links and relative paths are resolved.
        """
        return (
            self.save is not None
            and self.load is not None
            and os.path.realpath(self.save) == os.path.realpath(self.load)
        )


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The output of a run while it trains.

    peak_tflops_per_gpu: the peak that MFU and HFU divide by. None: a table gives it for the GPU's
        name.
    memory_timeline: the file for the memory of one micro-batch, operator by operator.
        tools/plot_memory.py draws it.
    log_straggler: whether the log names slow ranks (supervision/slow_rank.py).
    straggler_ratio: R. A rank is slow if it takes more than R times the median of its stage.
    straggler_minmax_count: the largest number of ranks that one log interval names.
    """

    log_interval: int = 100
    peak_tflops_per_gpu: float | None = None
    metrics_jsonl: str | None = None
    tensorboard_dir: str | None = None
    memory_timeline: str | None = None
    log_throughput: bool = False
    log_params_norm: bool = False
    log_num_zeros_in_grad: bool = False
    log_validation_ppl_to_tensorboard: bool = False
    log_timers_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_straggler: bool = False
    straggler_minmax_count: int = 1
    straggler_ratio: float = 1.2

    def __post_init__(self) -> None:
        require_at_least(self, 1, "log_interval", "straggler_minmax_count")
        if not 1.0 < self.straggler_ratio < math.inf:
            raise ValueError(
                f"--straggler-ratio must be above 1 and finite (got {self.straggler_ratio})"
            )
        require_not_empty(self, "metrics_jsonl", "tensorboard_dir", "memory_timeline")
        if self.peak_tflops_per_gpu is not None and not 0.0 < self.peak_tflops_per_gpu < math.inf:
            raise ValueError(
                f"--peak-tflops-per-gpu must be above 0 and finite (got {self.peak_tflops_per_gpu})"
            )
