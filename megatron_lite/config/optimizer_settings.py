"""The update of the weights: its rule, the learning rate and the loss scale.

A new update rule needs a name in OPTIMIZERS, fields in OptimizerConfig, a module beside
`optim/adam_update.py`, and an entry in `optim/optimizer.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from .setting import Settings, count, setting, share, switch

ADAM, MUON, SGD = OPTIMIZERS = ("adam", "muon", "sgd")
FLOAT32 = 4
FORMATS = {"fp32": FLOAT32, "bf16": 2, "fp16": 2}  # bytes of an element
# The most elements of a parameter that are read in another format, or copied to the host, at once.
PART = 2**24
WORDS = "embedding.word_embeddings.weight"
SMALL = 2**16  # below, one kernel for many parts is better than one for each

T = TypeVar("T")


def together(parts: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields the parts that few launches update together, with at most PART elements. size: the
    number of elements of a part."""
    found, total = list[T](), 0
    for part in parts:
        if found and total + size(part) > PART:
            yield found
            found, total = [], 0
        found.append(part)
        total += size(part)
    if found:
        yield found


PRECISION_AWARE = dict(needs="use_precision_aware_optimizer")
NO_FP8 = {"fp8": "is not built: give bf16 or fp16"}
NOT_SGD = "optimizer=adam/muon"
# The facts of a setting of Muon.
of_muon = partial(setting, needs="optimizer=muon", why="AdamW and SGD do not read it")


class OptimizerConfig(Settings):
    """The update rule, weight decay and gradient clipping.

    optimizer: "adam" is AdamW. "muon" updates the matrices of layers by Muon and all other weights
        by AdamW. "sgd" is torch's, whose weight decay is added to the gradient.
    muon_split_qkv: whether the query, key and value rows of linear_qkv are orthogonalized as three
        matrices, or else as one.
    muon_tp_mode: for a matrix that is split over TP ranks. "duplicated" gathers it and
        orthogonalizes the whole matrix on every rank. "blockwise" orthogonalizes each rank's part
        and issues no collective.
    muon_fp32_matmul_prec: the format of the Newton-Schulz iteration. "medium" is bfloat16, "high"
        is the format of the master weights.
    """

    optimizer: str = setting(
        "adam is AdamW; muon orthogonalizes the updates of layers' matrices, with AdamW for all "
        "other weights (docs/training.md); sgd has momentum",
        ADAM,
        choices=OPTIMIZERS,
    )
    sgd_momentum: float = share(
        "share of the last update that the next one takes up", 0.9, without="optimizer=sgd"
    )
    adam_beta1: float = share("decay of the gradient's mean", 0.9, without=NOT_SGD)
    adam_beta2: float = share("decay of the squared gradient's mean", 0.999, without=NOT_SGD)
    adam_eps: float = setting(
        "added to the denominator",
        1e-8,
        above=0,
        below=1,
        without=NOT_SGD,
        why="at 0 a weight without gradient becomes NaN",
    )
    weight_decay: float = setting("decoupled weight decay of matrices", 0.01, least=0.0)
    use_precision_aware_optimizer: bool = switch(
        "allow the formats below; an update computes in float32 and rounds once",
        needs="optimizer=adam use_distributed_optimizer",
    )
    main_grads_dtype: str = setting(
        "in what gradients are summed over micro-batches and ranks",
        "fp32",
        choices="fp32 bf16",
        needs="use_precision_aware_optimizer bf16",
    )
    main_params_dtype: str = setting(
        "format of main weights; fp16 with a scale",
        "fp32",
        choices="fp32 fp16",
        needs="use_precision_aware_optimizer bf16|fp16",
        why="float32 weights are their own main weights",
    )
    stochastic_rounding: bool = switch(
        "round main weights up or down at random, to themselves in the mean; --seed decides",
        needs="main_params_dtype=fp16",
        why="float32 main weights are not rounded",
    )
    exp_avg_dtype: str = setting(
        "format of AdamW's mean; fp16 with a scale",
        "fp32",
        choices=FORMATS,
        refused=NO_FP8,
        **PRECISION_AWARE,
    )
    exp_avg_sq_dtype: str = setting(
        "format of its mean square; fp16 with a scale",
        "fp32",
        choices=FORMATS,
        refused=NO_FP8,
        **PRECISION_AWARE,
    )
    optimizer_cpu_offload: bool = switch(
        "main weights, moments and update on the host, by torch's fused AdamW or SGD",
        excludes="use_torch_fsdp2",
        why="main weights stay on the device there",
    )
    optimizer_offload_fraction: float = setting(
        "share of the elements, by whole parameters, the largest first",
        1.0,
        least=0.0,
        most=1.0,
        without="optimizer_cpu_offload",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = switch(
        "copy gradients beside backward, and weights beside the update and the next forward",
        without="optimizer_cpu_offload",
    )
    clip_grad: float = setting("largest global gradient norm; 0 for no clipping", 1.0, least=0.0)
    muon_momentum: float = of_muon(
        "decay of the gradient's mean, which Muon orthogonalizes", 0.9, least=0.0, below=1.0
    )
    muon_nesterov: bool = of_muon(
        "orthogonalize the mean as it would be after the same gradient once more", False
    )
    muon_num_ns_steps: int = of_muon("Newton-Schulz iterations", 5, least=1, below=100)
    muon_scale_mode: str = of_muon(
        "by what the orthogonal matrix of m rows and n columns is multiplied: "
        "sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))",
        "spectral",
        choices="spectral unit_rms_norm shape_scaling",
    )
    muon_extra_scale_factor: float = of_muon(
        "a further factor; with spectral, 0.2 gives updates the size of AdamW's", 1.0, above=0
    )
    muon_coefficient_type: str = of_muon(
        "polynomials of the Newton-Schulz iterations",
        "quintic",
        choices="simple quintic polar_express",
    )
    muon_split_qkv: bool = of_muon(
        "orthogonalize linear_qkv as one matrix, not as three", True, name="--muon-no-split-qkv"
    )
    muon_tp_mode: str = of_muon(
        "a matrix that is split over tensor-parallel ranks is gathered and orthogonalized on "
        "each of them, or each orthogonalizes its own block",
        "duplicated",
        without="tensor_model_parallel_size>1",
        choices="duplicated blockwise",
        refused={
            "distributed": "is not built: give duplicated, which returns the same matrix on every "
            "rank, or blockwise, which sends nothing"
        },
    )
    muon_fp32_matmul_prec: str = of_muon(
        "Newton-Schulz in bfloat16 (medium) or in float32 (high)",
        "medium",
        choices="medium high",
        refused={"low": "is not built: give medium (bfloat16) or high (float32)"},
    )

    def state_bytes(self, *, of_matrix: bool) -> tuple[int, ...]:
        """Returns the bytes of each state that the update rule keeps for an element of a parameter.

        The master weight is not included.
        of_matrix: whether it is linear_qkv, linear_proj, linear_fc1 or linear_fc2 of a layer.
        """
        if self.optimizer == SGD:
            return (FLOAT32,) if self.sgd_momentum else ()
        if self.optimizer == MUON and of_matrix:
            return (FLOAT32,)
        return FORMATS[self.exp_avg_dtype], FORMATS[self.exp_avg_sq_dtype]

    def format_of(self, state: str) -> str:
        """Returns the format of a state of AdamW or SGD."""
        return {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}.get(
            state, "fp32"
        )

    @property
    def formats(self) -> tuple[str, str, str]:
        """The formats of both moments and of main weights."""
        return self.exp_avg_dtype, self.exp_avg_sq_dtype, self.main_params_dtype

    @property
    def is_rounded(self) -> bool:
        """Whether a gradient, a main weight or a moment has another format than float32."""
        return {self.main_grads_dtype, *self.formats} != {"fp32"}

    def on_host(self, pieces: Iterable[tuple[str, bool, int]]) -> list[bool]:
        """Returns which pieces of a rank have their main weight and states on the host.

        Those are the word embedding, of which two stages may have a copy that must stay equal, and
        then the largest, until they have the fraction of all elements. Muon's matrices stay on the
        device.
        pieces: (name, whether it is a matrix of a layer, elements).
        """
        movable = [
            (name == WORDS, 0 if of_matrix and self.optimizer == MUON else number)
            for name, of_matrix, number in pieces
        ]
        whole = sum(number for _, number in movable)
        left = self.optimizer_offload_fraction * whole * self.optimizer_cpu_offload
        found = [False] * len(movable)
        for place in sorted(range(len(movable)), key=movable.__getitem__, reverse=True):
            number = movable[place][1]
            found[place] = left > 0 and number > 0
            left -= number
        return found


LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
OF_SAMPLES = "train_samples"
ALIKE = "the length of the run and its learning rate count alike"
CONSTANT = "lr_decay_style=constant"
WARMUPS = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
NO_SCHEDULE = "finetune|no_load_optim: the schedule begins anew"
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


class LrScheduleConfig(Settings):
    """The learning rate over the run.

    Lengths count samples if `--train-samples` gives the length of the run, else iterations. This
    is Megatron's rule.

    decoupled_lr, decoupled_min_lr: the largest and the smallest learning rate of the word embedding
        and the output layer. None: the same as lr and min_lr.
    use_checkpoint_opt_param_scheduler: whether a run that continues takes the learning-rate
        schedule and the weight decay of its checkpoint instead of the flags.
    override_opt_param_scheduler: whether the log is silent about a schedule that differs from the
        checkpoint's. The flags decide in either case.
    """

    lr: float | None = setting("largest learning rate (needed to train)", least=0.0)
    min_lr: float = setting(
        "smallest learning rate, at the end of the decay",
        0.0,
        least=0.0,
        upto="lr",
        unless=CONSTANT,
    )
    lr_decay_style: str = setting("shape of the decay", "linear", choices=LR_DECAY_STYLES)
    lr_decay_iters: int | None = count(
        "iterations until --min-lr; derived: the whole run", excludes=OF_SAMPLES, why=ALIKE
    )
    lr_decay_samples: int | None = count(
        "the same in samples, with --train-samples", needs=OF_SAMPLES, why=ALIKE
    )
    lr_warmup_iters: int = setting(
        "iterations of linear warm-up", 0, least=0, excludes=OF_SAMPLES, why=ALIKE
    )
    lr_warmup_samples: int = setting(
        "the same in samples, with --train-samples", 0, least=0, needs=OF_SAMPLES, why=ALIKE
    )
    lr_warmup_fraction: float | None = share(
        "warm-up as a share of the decay's length", excludes="lr_warmup_iters lr_warmup_samples"
    )
    lr_warmup_init: float = setting(
        "learning rate at the start of the warm-up",
        0.0,
        least=0.0,
        upto="lr",
        # A schedule that is taken from a checkpoint begins at the flag's rate, too.
        without="|".join((*WARMUPS, "use_checkpoint_opt_param_scheduler")),
    )
    lr_wsd_decay_style: str = setting(
        "how WSD (warm-up, stable, decay) falls at its end",
        "exponential",
        choices=WSD_DECAY_STYLES,
        megatron={"1-sqrt": "minus_sqrt"},
        without="lr_decay_style=WSD",
    )
    lr_wsd_decay_iters: int | None = count(
        "iterations of WSD's decay, at the end",
        needs="lr_decay_style=WSD",
        excludes=OF_SAMPLES,
        why=ALIKE,
    )
    lr_wsd_decay_samples: int | None = count(
        "the same in samples, with --train-samples",
        needs=f"lr_decay_style=WSD {OF_SAMPLES}",
        why=ALIKE,
    )
    decoupled_lr: float | None = setting(
        "--lr of the word embedding and the output layer, if it differs", least=0.0
    )
    decoupled_min_lr: float | None = setting(
        "their --min-lr; derived: --min-lr",
        least=0.0,
        upto="decoupled_lr",
        without="decoupled_lr",
        unless=CONSTANT,
    )
    use_checkpoint_opt_param_scheduler: bool = switch(
        "a run that continues takes learning-rate schedule and weight decay from its checkpoint",
        alias="--use-checkpoint-opt-param-scheduler",
        name="--use-checkpoint-opt_param-scheduler",
        without="load",
        unless=NO_SCHEDULE,
    )
    override_opt_param_scheduler: bool = switch(
        "a run that continues takes them from the flags, which is the default, and the log does "
        "not list the differences",
        alias="--override-opt-param-scheduler",
        name="--override-opt_param-scheduler",
        excludes="use_checkpoint_opt_param_scheduler",
        without="load",
        unless=NO_SCHEDULE,
    )

    def check_rules(self) -> None:
        if (
            self.lr_decay_style == "WSD"
            and self.lr_wsd_decay_iters is None
            and self.lr_wsd_decay_samples is None
        ):
            raise ValueError(
                "--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples)"
            )


of_fp16 = partial(setting, without="fp16")
_dynamic = partial(of_fp16, unless="loss_scale: the scale is constant")


class LossScaleConfig(Settings):
    """The factor by which the loss of a float16 run is multiplied before backward.

    loss_scale: a constant scale. None: the scale is dynamic and follows the other fields
        (optim/loss_scale.py).
    initial_loss_scale, min_loss_scale: the first dynamic scale, and the smallest.
    loss_scale_window: the number of steps without overflow after which the scale doubles.
    hysteresis: the number of overflows before the scale is halved for the first time, or for the
        first time after it has doubled.
    """

    loss_scale: float | None = of_fp16(
        "a constant loss scale; else a dynamic one: halved after an overflow, which skips "
        "its step, and doubled after a window without",
        above=0,
    )
    initial_loss_scale: float = _dynamic("first dynamic scale", 2.0**32, above=0)
    min_loss_scale: float = _dynamic(
        "smallest dynamic scale: an overflow at it stops the run, unless "
        "--no-check-for-nan-in-loss-and-grad",
        1.0,
        above=0,
        upto="initial_loss_scale",
    )
    loss_scale_window: float = _dynamic(
        "steps without overflow after which the scale doubles", 1000.0, least=1
    )
    hysteresis: int = _dynamic(
        "overflows before the scale is halved for the first time, or after it has doubled",
        2,
        least=1,
    )

    def check_rules(self) -> None:
        if self.loss_scale_window % 1:
            raise ValueError(
                "--loss-scale-window counts steps: give a whole number (got "
                f"{self.loss_scale_window})"
            )
