"""The configuration of a whole run as one frozen value, with the rules that span several topics.

Every checkpoint stores it as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field

from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.checks import flag
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.layer_pattern import reach
from megatron_lite.config.logging_settings import LoggingConfig, ProfilingConfig
from megatron_lite.config.megatron_flags import RETIRED_FIELDS
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.operators import GROUPS, IN_GROUPS, parse_entry
from megatron_lite.config.optimizer_settings import (
    LossScaleConfig,
    LrScheduleConfig,
    OptimizerConfig,
)
from megatron_lite.config.parallel import DataParallelConfig, ParallelConfig, no_flash_across_ranks
from megatron_lite.config.plain import check_sizes, from_plain, parse_json
from megatron_lite.config.policy import LayerAction, check_policy_reaches
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.stages import most_in_flight, stages
from megatron_lite.config.training import TrainingConfig

DEFAULT_LOSS_TOKENS = 512


def default_chunk_size(tokens: int, *, in_one_pass: bool) -> int | None:
    """Returns the default for a micro-batch of so many tokens on a rank. None: no chunks.

    in_one_pass: whether forward can compute the gradients too.
    """
    return DEFAULT_LOSS_TOKENS if in_one_pass and tokens > DEFAULT_LOSS_TOKENS else None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a run, one field per topic.

    Each topic checks its own fields. Rules that involve two topics are checked here.
    """

    model: ModelConfig
    training: TrainingConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss_scaling: LossScaleConfig = field(default_factory=LossScaleConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)

    def __post_init__(self) -> None:
        model, tp_size = self.model, self.parallel.tensor_model_parallel_size
        # Each tensor-parallel rank holds whole heads and groups, and an equal part of the MLP.
        divided = (
            ("--num-attention-heads", model.num_attention_heads),
            ("--num-query-groups", model.query_groups),
            ("--ffn-hidden-size", model.ffn_size),
        )
        for name, value in divided:
            if value % tp_size:
                raise ValueError(
                    f"{name} {value} is not divisible by --tensor-model-parallel-size {tp_size}"
                )
        if self.parallel.context_parallel_size > 1:
            self._check_context_parallel()
        elif self.data.seq_length % self.parallel.sequence_parts:
            raise ValueError(
                f"--sequence-parallel splits --seq-length {self.data.seq_length} over "
                f"--tensor-model-parallel-size {tp_size} ranks, which does not divide it"
            )
        if self.data.seq_length > model.max_position_embeddings:
            raise ValueError(
                f"--seq-length {self.data.seq_length} is above --max-position-embeddings "
                f"{model.max_position_embeddings}"
            )
        self.training.batch_steps(self.data.seq_length)
        self._check_recompute_policy()
        self._check_pipeline()
        self._check_compiler()
        self._check_data_parallel()
        self._check_folders()
        by_samples = self.training.train_samples is not None
        schedule = self.lr_schedule
        if by_samples and (
            schedule.lr_decay_iters or schedule.lr_warmup_iters or schedule.lr_wsd_decay_iters
        ):
            raise ValueError(
                "--train-samples counts the learning-rate schedule in samples: use "
                "--lr-decay-samples, --lr-warmup-samples and --lr-wsd-decay-samples"
            )
        if not by_samples and (
            schedule.lr_decay_samples or schedule.lr_warmup_samples or schedule.lr_wsd_decay_samples
        ):
            raise ValueError(
                "--train-iters counts the learning-rate schedule in iterations: use "
                "--lr-decay-iters, --lr-warmup-iters and --lr-wsd-decay-iters"
            )

    def _check_folders(self) -> None:
        """Raises ValueError if a log has no folder to go to."""
        logging, save = self.logging, self.checkpoint.save
        profiling = self.profiling
        if (
            profiling.profile
            and profiling.use_pytorch_profiler
            and logging.tensorboard_dir is None
            and save is None
        ):
            raise ValueError(
                "--use-pytorch-profiler writes its traces under --tensorboard-dir or --save: give "
                "one of them"
            )
        if logging.wandb_project and logging.wandb_save_dir is None and save is None:
            raise ValueError(
                f"--wandb-project {logging.wandb_project} writes under --wandb-save-dir or --save: "
                "give one of them"
            )

    def check_complete_for_training(self) -> None:
        """Raises ValueError if the length of the run, the learning rate or the data is missing.

        Only training needs them. A run that is loaded to generate text may leave them out.
        """
        missing = []
        if self.training.train_iters is None and self.training.train_samples is None:
            missing.append("the length of the run: set --train-iters or --train-samples")
        if self.lr_schedule.lr is None:
            missing.append("the learning rate: set --lr")
        if not self.data.has_source:
            missing.append("something to train on: give --data-path PREFIX or --mock-data")
        if missing:
            raise ValueError("training needs " + "; and ".join(missing))

    def batch_schedule(self, data_parallel_size: int) -> BatchSchedule:
        """Returns the schedule of the batch size over the run.

        Raises ValueError if one of its sizes does not divide over ranks and micro-batches.
        """
        return self.training.batch_schedule(data_parallel_size, seq_length=self.data.seq_length)

    def most_in_flight(self, num_microbatches: int) -> int:
        """Returns the largest number of forwards that wait for their backward at once.

        It is reached on the first pipeline rank. Each of the forwards is one of a virtual stage.
        """
        size = self.parallel.pipeline_model_parallel_size
        return most_in_flight(
            size=size,
            rank=0,
            num_microbatches=num_microbatches,
            num_chunks=len(self.stage_lengths()) // size,
        )

    def stage_lengths(self) -> list[int]:
        """Returns the number of layers of each virtual stage, in the order of the model."""
        return [stage.num_layers for stage in stages(self.parallel, self.model.num_layers)]

    def _check_recompute_policy(self) -> None:
        given = self.recompute.recompute_policy
        stage_lengths = self.stage_lengths()
        if given is not None and not self.recompute.is_to_be_chosen:
            check_policy_reaches(self.recompute.policy, stage_lengths)
        for rule in self.recompute.policy.rules:
            for entry in map(parse_entry, rule.action.ops):
                if not IN_GROUPS.issuperset(entry.operators):
                    raise ValueError(
                        f"--recompute-policy '{rule}': how many bytes {entry.name} would keep "
                        f"cannot be told before the run; {', '.join(GROUPS)} name operators of "
                        "which it can, and so do their members"
                    )
            if rule.store.startswith("split"):
                self._check_split(
                    "--distribute-saved-activations"
                    if given is None
                    else f"--recompute-policy '{rule}'"
                )

    def _check_pipeline(self) -> None:
        flag = "--num-microbatches-with-partial-activation-checkpoints"
        in_pipeline = self.parallel.pipeline_model_parallel_size > 1
        if self.recompute.num_microbatches_with_partial_activation_checkpoints is not None:
            if not in_pipeline:
                raise ValueError(
                    f"{flag} needs --pipeline-model-parallel-size > 1 (got 1): one micro-batch is "
                    "in flight at a time"
                )
            if all(rule.action == LayerAction() for rule in self.recompute.policy.rules):
                raise ValueError(
                    f"{flag} says which micro-batches keep what the others recompute, and nothing "
                    "is recomputed: give --recompute-granularity or --recompute-policy too"
                )
            # 2p micro-batches reach the largest number in flight, at any number of virtual stages.
            most = self.most_in_flight(2 * self.parallel.pipeline_model_parallel_size)
            num_kept = self.recompute.num_microbatches_with_partial_activation_checkpoints
            if num_kept >= most:
                raise ValueError(
                    f"{flag} {num_kept}: at most {most} forwards are in flight at once, on the "
                    "first pipeline rank, so every micro-batch would keep everything and nothing "
                    f"would be recomputed: give at most {most - 1}, or leave the recomputation out"
                )
        if in_pipeline and self.logging.memory_timeline is not None:
            raise ValueError(
                "--memory-timeline records the forward and backward of one micro-batch, which a "
                "pipeline mixes with those of others: give --pipeline-model-parallel-size 1"
            )

    def _check_context_parallel(self) -> None:
        # A rank holds two spans of the sequence, one from each end: a causal mask then gives all
        # ranks equal work (parallel/sequence_spans.py).
        size, parts = self.parallel.context_parallel_size, self.parallel.sequence_parts
        if self.data.seq_length % parts:
            shards = (
                f" x --tensor-model-parallel-size {parts // (2 * size)}"
                if self.parallel.sequence_parallel
                else ""
            )
            under = ", which --sequence-parallel splits again" if shards else ""
            raise ValueError(
                f"--seq-length {self.data.seq_length} is not divisible by 2 x "
                f"--context-parallel-size {size}{shards} = {parts}: each rank holds two chunks of "
                f"the sequence{under}"
            )
        hindrance = no_flash_across_ranks(
            self.model.attention_dropout, self.data.reset_attention_mask
        )
        if hindrance is not None and not self.model.always_unfused:
            without = "--attention-dropout 0, or " if self.model.attention_dropout > 0.0 else ""
            raise ValueError(
                f"--context-parallel-size {size} has no flash attention with {hindrance}: give "
                f"{without}--attention-backend unfused, which builds the scores"
            )
        limit = reach(self.model.window_size, self.data.seq_length)
        if limit is not None and not self.model.always_unfused:
            raise ValueError(
                f"--context-parallel-size {size} has no flash attention with --window-size "
                f"{limit},0: which keys of another rank a window reaches differs from rank to "
                "rank, and so would the work. Give --attention-backend unfused, which builds the "
                "scores"
            )

    def _check_compiler(self) -> None:
        """Raises ValueError for settings that do not go with --torch-compile.

        Alone, it compiles the norms, activations, rotary embedding and dropout of every layout, and
        the recompute policy decides what is kept. With --activation-memory-budget, it compiles each
        layer as a whole, and the compiler decides.
        """
        budget = self.recompute.activation_memory_budget
        if not self.training.torch_compile:
            if budget is not None:
                raise ValueError(
                    f"--activation-memory-budget {budget} is a setting of torch's compiler: give "
                    "--torch-compile too"
                )
            return
        if self.model.norm_impl == "apex":
            raise ValueError(
                "--norm-impl apex cannot go with --torch-compile, which compiles norms of its own. "
                "Leave one of them out"
            )
        if self.logging.log_peak_memory:
            raise ValueError(
                "--log-peak-memory has no prediction to compare with under --torch-compile: the "
                "temporaries of compiled code are not known. Leave one of them out"
            )
        if budget is not None:
            self._check_compiled_layers()

    def _check_compiled_layers(self) -> None:
        """Raises ValueError for settings that the compiler of whole layers decides."""
        flags = "--torch-compile --activation-memory-budget"
        if self.recompute.recompute_verify:
            raise ValueError(
                f"--recompute-verify has nothing to compare under {flags}, whose compiled "
                "layers decide themselves what they keep and recompute: leave one of them out"
            )
        if self.recompute.is_to_be_chosen or any(
            rule.action != LayerAction() or rule.store != "device"
            for rule in self.recompute.policy.rules
        ):
            raise ValueError(
                "--activation-memory-budget lets the compiler decide what layers recompute: give "
                "it instead of a recompute policy, or leave it out. --torch-compile without it "
                "goes with every policy"
            )
        for axis in ("tensor_model_parallel_size", "context_parallel_size"):
            if (size := getattr(self.parallel, axis)) > 1:
                raise ValueError(
                    f"--activation-memory-budget needs {flag(axis)} 1 (got {size}): every "
                    "collective would end a graph of a compiled layer. Leave it out: "
                    "--torch-compile alone goes with every layout"
                )
        if self.data_parallel.overlap_param_gather:
            raise ValueError(
                "--overlap-param-gather cannot go with --activation-memory-budget: each module's "
                "wait for its weights would end a compiled graph. Leave one of them out"
            )

    @property
    def compiles_kernels(self) -> bool:
        """Tells whether norms, activations, rotary embedding and dropout are compiled, and
        nothing else.

        What layers keep and recompute is then the policy's choice, as without the compiler.
        """
        return self.training.torch_compile and not self.compiles_layers

    @property
    def compiles_layers(self) -> bool:
        """Tells whether each layer is one graph of the compiler, which decides what the layer
        keeps."""
        return self.recompute.activation_memory_budget is not None

    @property
    def loss_chunk_size(self) -> int | None:
        """The number of tokens of a micro-batch that have logits at a time.

        None: all tokens have logits at once, and the logits are kept for backward. In one pass,
        chunks save the memory of the logits and take about the same time. In two passes backward
        computes the logits again, so a user has to ask for them.
        """
        chosen = self.training.loss_chunk_size
        if chosen is not None:
            return chosen or None
        sequence = self.data.seq_length // self.parallel.context_parallel_size
        tokens = sequence * self.training.micro_batch_size
        return default_chunk_size(tokens, in_one_pass=self._can_be_in_one_pass)

    @property
    def loss_in_one_pass(self) -> bool:
        """Whether training computes the gradients of a loss chunk right after its losses.

        The logits of a chunk are then computed once. If not, backward computes them again. An
        evaluation computes losses only.
        """
        return self.loss_chunk_size is not None and self._can_be_in_one_pass

    @property
    def _can_be_in_one_pass(self) -> bool:
        """Tells whether forward can compute the gradients of a loss chunk right after its losses.

        It cannot with:

        - 16-bit weights: their losses may be scaled, and their gradients are rounded to 16 bits.
        - --use-torch-fsdp2: no rank has a sum of the whole output weight's gradient.
        - --no-gradient-accumulation-fusion: autograd adds to the sum, in backward.
        - layers that are graphs of the compiler: what it keeps is not predicted.
        """
        return (
            self.training.precision == "fp32"
            and self.training.gradient_accumulation_fusion
            and not self.data_parallel.use_torch_fsdp2
            and not self.compiles_layers
        )

    def _check_data_parallel(self) -> None:
        if self.data_parallel.grad_reduce_in_bf16 and not self.training.bf16:
            raise ValueError(
                "--grad-reduce-in-bf16 needs --bf16: gradients of float32 weights are "
                "exchanged in float32"
            )

    def _check_split(self, flag: str) -> None:
        tp_size = self.parallel.tensor_model_parallel_size
        if tp_size == 1:
            raise ValueError(f"{flag} needs --tensor-model-parallel-size > 1 (got 1)")
        if self.parallel.sequence_parallel:
            raise ValueError(
                f"{flag} has nothing to split under --sequence-parallel, where each rank's input "
                "is already 1/t: leave one of them out"
            )
        cp_size = self.parallel.context_parallel_size
        elements = (
            self.data.seq_length
            // cp_size
            * self.training.micro_batch_size
            * self.model.hidden_size
        )
        if elements % tp_size:
            divisor = f" / --context-parallel-size {cp_size}" if cp_size > 1 else ""
            raise ValueError(
                f"{flag} splits the {elements} elements of --seq-length{divisor} x "
                f"--micro-batch-size x --hidden-size over --tensor-model-parallel-size {tp_size} "
                "ranks, which does not divide them"
            )

    def to_json(self) -> str:
        """Returns the run as indented JSON, one object per topic.

        `from_json` returns an equal value from this text.
        """
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Returns the run that `to_json` wrote.

        Raises ValueError if the text is not JSON, if a topic or field is unknown, if a value has
        the wrong type, or if a rule is broken.
        """
        values = parse_json(text)
        check_sizes(values)
        return typing.cast(RunConfig, from_plain(cls, values, "run", RETIRED_FIELDS))
