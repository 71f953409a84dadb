"""The configuration of a whole run as one frozen value, with the rules that span several topics.

Every checkpoint stores it as JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .batch_schedule import BatchSchedule
from .checkpoint_settings import CheckpointConfig
from .checks import LARGEST_TEXT, Values, parse_json
from .data_settings import DataConfig, TokenizerConfig
from .layer_pattern import reach
from .logging_settings import LoggingConfig, ProfilingConfig
from .megatron_flags import RETIRED_FIELDS
from .model import ModelConfig
from .optimizer_settings import LossScaleConfig, LrScheduleConfig, OptimizerConfig
from .parallel import DataParallelConfig, ParallelConfig, no_flash_across_ranks
from .policy import GROUPS, IN_GROUPS, LayerAction, check_policy_reaches, parse_entry
from .recompute import RecomputeConfig
from .setting import ContradictionError, check_relations, from_plain
from .stages import Stage, most_in_flight, stages
from .training import TrainingConfig

DEFAULT_LOSS_TOKENS = 512


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
        check_relations([getattr(self, one.name) for one in dataclasses.fields(self)])
        parallel, seq_length = self.parallel, self.data.seq_length
        tp_size = parallel.tensor_model_parallel_size
        if self.model.query_groups % tp_size:
            raise ValueError(
                f"--num-query-groups {self.model.query_groups} is not divisible by "
                f"--tensor-model-parallel-size {tp_size}: each rank holds whole groups"
            )
        if seq_length % parallel.sequence_parts:
            # A context-parallel rank holds two spans of the sequence, one from each end: a causal
            # mask then gives all ranks equal work (parallel/sequence_spans.py).
            cp_size = parallel.context_parallel_size
            parts = [f"2 x --context-parallel-size {cp_size}"] * (cp_size > 1)
            shards = f"--tensor-model-parallel-size {tp_size} (--sequence-parallel)"
            parts += [shards] * parallel.sequence_parallel
            raise ValueError(
                f"--seq-length {seq_length} is not divisible by {' x '.join(parts)} = "
                f"{parallel.sequence_parts}: each rank holds an equal part of the sequence"
            )
        self.training.batch_steps(seq_length)
        self._check_experts()
        self._check_context_parallel()
        self._check_recompute_policy()
        self._check_pipeline()
        self._check_compiler()
        self._check_graphs()

    def _check_experts(self) -> None:
        """Raises ValueError for ranks that cannot share experts as asked. Without experts the
        number of ranks that share one is left out."""
        parallel = self.parallel
        tp_size, own = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
        if own and not self.model.num_experts:
            object.__setattr__(
                self, "parallel", replace(parallel, expert_tensor_parallel_size=None)
            )
        elif own and tp_size % own:
            raise ValueError(
                f"--expert-tensor-parallel-size {own} must divide --tensor-model-parallel-size "
                f"{tp_size}: some of the tensor-parallel ranks, or all, share an expert"
            )
        elif parallel.spreads_experts and tp_size > 1 and not parallel.sequence_parallel:
            raise ContradictionError(
                f"--expert-model-parallel-size {parallel.expert_model_parallel_size} and "
                f"--expert-tensor-parallel-size {parallel.expert_tensor_parallel} with "
                f"--tensor-model-parallel-size {tp_size} need --sequence-parallel: otherwise all "
                "tensor-parallel ranks would send the same tokens",
                "expert_model_parallel_size expert_tensor_parallel_size",
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
        data = self.data
        if not (data.data_path or data.mock_data or data.data_args_path or data.is_per_split):
            missing.append("something to train on: give --data-path PREFIX or --mock-data")
        if missing:
            raise ValueError("training needs " + "; and ".join(missing))

    def batch_schedule(self, data_parallel_size: int) -> BatchSchedule:
        """Returns the schedule of the batch size over the run.

        Raises ValueError if one of its sizes does not divide over ranks and micro-batches.
        """
        return self.training.batch_schedule(data_parallel_size, seq_length=self.data.seq_length)

    def most_in_flight(self, num_microbatches: int, rank: int = 0) -> int:
        """Returns the largest number of forwards that wait for their backward at once.

        It is reached on the first pipeline rank. Each of the forwards is one of a virtual stage.
        """
        size = self.parallel.pipeline_model_parallel_size
        return most_in_flight(
            size=size,
            rank=rank,
            num_microbatches=num_microbatches,
            num_chunks=len(self.stage_lengths()) // size,
        )

    def shards(self, dp_cp_size: int) -> int:
        """Returns over how many of `dp_cp_size` ranks states are shared out; 1: each holds all."""
        instances = self.parallel.num_distributed_optimizer_instances
        return dp_cp_size // instances if self.data_parallel.shares_out else 1

    def stages(self) -> tuple[Stage, ...]:
        """Returns all virtual stages, in the order of the model."""
        return stages(self.parallel, self.model.num_layers)

    def stages_of_rank(self, rank: int) -> tuple[Stage, ...]:
        """Returns the stages of one pipeline rank, in the order of the model."""
        return tuple(stage for stage in self.stages() if stage.rank == rank)

    def stage_lengths(self) -> list[int]:
        """Returns the number of layers of each virtual stage, in the order of the model."""
        return [stage.num_layers for stage in self.stages()]

    def _check_recompute_policy(self) -> None:
        given, parallel = self.recompute.recompute_policy, self.parallel
        parts = parallel.context_parallel_size
        parts *= parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        if given and not self.recompute.is_to_be_chosen:
            check_policy_reaches(self.recompute.policy, self.stage_lengths())
        for rule in self.recompute.policy.rules:
            for entry in map(parse_entry, rule.action.ops):
                if not IN_GROUPS.issuperset(entry.operators):
                    raise ValueError(
                        f"--recompute-policy '{rule}': how many bytes {entry.name} would keep "
                        f"cannot be told before the run; {', '.join(GROUPS)} name operators of "
                        "which it can, and so do their members"
                    )
                if self.data.reset_attention_mask and entry.every > 1 and "attention" in entry.name:
                    raise ValueError(
                        f"--recompute-policy '{rule}': --reset-attention-mask may attend each "
                        "document by a call of its own, so results of attention are kept all or "
                        f"not at all (got every {entry.every}th): leave out /{entry.every}"
                    )
            sequence = f"the {self.data.seq_length // parts} rows that a rank has of a sequence"
            if self.data.seq_length // parts % rule.action.tiles:
                raise ValueError(
                    f"--recompute-policy '{rule}': {rule.action.tiles} tiles of the MLP do not "
                    f"divide {sequence}: give a divisor of them"
                )
            if rule.store.startswith("split"):
                self._check_split(
                    f"--recompute-policy '{rule}'" if given else "--distribute-saved-activations"
                )

    def _check_pipeline(self) -> None:
        size = self.parallel.pipeline_model_parallel_size
        num_kept = self.recompute.num_microbatches_with_partial_activation_checkpoints
        # 2p micro-batches reach the largest number in flight, at any number of virtual stages.
        most = self.most_in_flight(2 * size)
        name = "--num-microbatches-with-partial-activation-checkpoints"
        if num_kept and not self.recomputes:
            raise ContradictionError(
                f"{name} says which micro-batches keep what the others recompute, and nothing is "
                "recomputed: give --recompute-granularity or --recompute-policy too",
                "num_microbatches_with_partial_activation_checkpoints",
            )
        if num_kept and num_kept >= most:
            raise ValueError(
                f"{name} {num_kept}: at most {most} forwards are in flight at once, so nothing "
                f"would be recomputed: give at most {most - 1}, or leave the recomputation out"
            )

    @property
    def recomputes(self) -> bool:
        """Tells whether any layer rebuilds anything, in backward."""
        return any(rule.action != LayerAction() for rule in self.recompute.policy.rules)

    def _check_context_parallel(self) -> None:
        model, size = self.model, self.parallel.context_parallel_size
        hindrance = no_flash_across_ranks(model.attention_dropout, self.data.reset_attention_mask)
        limit = reach(model.window_size, self.data.seq_length)
        if hindrance is None and limit is not None:
            # which keys of another rank a window reaches differs from rank to rank
            hindrance = f"--window-size {limit},0"
        kinds, exchanges = self.parallel.cp_comm_type, self.parallel.exchanges
        if isinstance(kinds, tuple) and len(kinds) != model.num_layers:
            raise ValueError(
                f"--cp-comm-type has {len(kinds)} values: give one for all layers, or one for each "
                f"of --num-layers {model.num_layers}"
            )
        if size > 1 and "a2a" in exchanges:
            ranks = size * self.parallel.tensor_model_parallel_size
            if model.query_groups % ranks:
                raise ValueError(
                    f"--cp-comm-type a2a gives each rank whole heads: --num-query-groups "
                    f"{model.query_groups} must be divisible by --tensor-model-parallel-size x "
                    f"--context-parallel-size = {ranks}; p2p and allgather need no such size"
                )
        is_split = size > 1 and exchanges != {"a2a"}
        if is_split and hindrance and not model.always_unfused:
            raise ValueError(
                f"--context-parallel-size {size} has no flash attention with {hindrance}: leave it "
                "out (--attention-dropout 0), or give --cp-comm-type a2a, or --attention-backend "
                "unfused, which builds the scores"
            )

    def _check_compiler(self) -> None:
        """Raises ValueError for settings that do not go with --torch-compile.

        Alone, it compiles the norms, activations, rotary embedding and dropout of every layout, and
        the recompute policy decides what is kept. With --activation-memory-budget, it compiles each
        layer as a whole, and the compiler decides.
        """
        recompute = self.recompute
        is_on_device = all(rule.store == "device" for rule in recompute.policy.rules)
        if self.compiles_layers and (
            recompute.is_to_be_chosen or self.recomputes or not is_on_device
        ):
            raise ContradictionError(
                "--activation-memory-budget lets the compiler decide what layers recompute: give "
                "it instead of --recompute-policy or --recompute-granularity. --torch-compile "
                "without it goes with every policy",
                "activation_memory_budget recompute_policy recompute_granularity "
                "cpu_offloading_num_layers fine_grained_activation_offloading",
            )

    def _check_graphs(self) -> None:
        """Raises ValueError for a policy, or experts, that a CUDA graph cannot follow."""
        model, impl = self.model, self.training.cuda_graph_impl
        factor, is_padded = model.moe_expert_capacity_factor, model.moe_pad_expert_input_to_capacity
        if impl != "none" and factor and not is_padded:
            raise ContradictionError(
                f"--cuda-graph-impl {impl} excludes --moe-expert-capacity-factor {factor}: the "
                "host waits for the number of rows. --moe-pad-expert-input-to-capacity fixes it",
                "cuda_graph_impl moe_expert_capacity_factor",
            )
        is_on_device = all("host" not in rule.store for rule in self.recompute.policy.rules)
        if impl != "none" and not is_on_device:
            raise ContradictionError(
                f"--cuda-graph-impl {impl} excludes tensors in host "
                "memory: a graph cannot wait for their copies. Leave one of them out "
                "(--cuda-graph-impl none, or a --recompute-policy without @host)",
                "cuda_graph_impl recompute_policy cpu_offloading_num_layers "
                "fine_grained_activation_offloading",
            )

    def uses_compiler(self, device: str) -> bool:
        """Tells whether torch's compiler makes the kernels of the loss, and of norms, activations,
        rotary embedding and dropout or of whole layers (`compiles_layers`).

        device: "cpu" or "cuda", which decides if no flag does.
        """
        asked = self.training.torch_compile
        return device == "cuda" if asked is None else asked

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
        is_long = tokens > DEFAULT_LOSS_TOKENS
        return DEFAULT_LOSS_TOKENS if is_long and self._can_be_in_one_pass else None

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

    def _check_split(self, flag: str) -> None:
        tp_size, cp_size = (
            self.parallel.tensor_model_parallel_size,
            self.parallel.context_parallel_size,
        )
        if tp_size == 1:
            raise ContradictionError(
                f"{flag} needs --tensor-model-parallel-size > 1 (got 1)",
                "distribute_saved_activations",
            )
        if self.parallel.sequence_parallel:
            raise ContradictionError(
                f"{flag} has nothing to split under --sequence-parallel, where each rank's input "
                "is already 1/t: leave one of them out",
                "sequence_parallel distribute_saved_activations",
            )
        tokens = self.data.seq_length // cp_size * self.training.micro_batch_size
        elements = tokens * self.model.hidden_size
        if elements % tp_size:
            raise ValueError(
                f"{flag} splits the {elements} elements of --seq-length / --context-parallel-size "
                f"{cp_size} x --micro-batch-size x --hidden-size over --tensor-model-parallel-size "
                f"{tp_size} ranks, which does not divide them"
            )

    @property
    def values(self) -> Values:
        """The values of all fields of all topics, by field."""
        topics = dataclasses.asdict(self).values()
        return {name: value for topic in topics for name, value in topic.items()}

    def with_fields(self, values: Mapping[str, Any]) -> RunConfig:
        """Returns the run with other values, by field. Raises ValueError if training refuses it."""
        changed = {
            name: replace(topic, **own)
            for name, topic in vars(self).items()
            if (own := {field: values[field] for field in values.keys() & vars(topic).keys()})
        }
        return replace(self, **changed)

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
        if len(text) > LARGEST_TEXT:
            raise ValueError(f"longer than {LARGEST_TEXT} characters, which no run is")
        return from_plain(cls, parse_json(text), "run", RETIRED_FIELDS)
