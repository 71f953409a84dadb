"""A whole run as one frozen value: the rules across topics, and JSON both ways. Stored in every checkpoint."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.config.checks import flag
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.loss_scale import LossScaleConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.operators import GROUPS, IN_GROUPS, parse_entry
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.policy import Action, parse_policy, point_at
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.stages import stages
from megatron_lite.config.training import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    LrScheduleConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainingConfig,
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run needs to know. Rules that span two topics live here."""

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

    def __post_init__(self) -> None:
        model, tp_size = self.model, self.parallel.tensor_model_parallel_size
        divided = (("--num-attention-heads", model.num_attention_heads), ("--num-query-groups", model.query_groups),
                   ("--ffn-hidden-size", model.ffn_size))
        for name, value in divided:
            if value % tp_size:
                raise ValueError(f"{name} {value} is not divisible by --tensor-model-parallel-size {tp_size}")
        if self.parallel.context_parallel_size > 1:
            self._check_context_parallel()
        elif self.data.seq_length % self.parallel.sequence_parts:
            raise ValueError(f"--sequence-parallel splits --seq-length {self.data.seq_length} over "
                             f"--tensor-model-parallel-size {tp_size} ranks, which does not divide it")
        if self.data.seq_length > model.max_position_embeddings:
            raise ValueError(f"--seq-length {self.data.seq_length} is above --max-position-embeddings "
                             f"{model.max_position_embeddings}")
        if not self.training.fp16:
            for name in self.loss_scaling.changed():
                raise ValueError(f"{flag(name)} {getattr(self.loss_scaling, name)} needs --fp16: the loss of a float32 or --bf16 "
                                 "run is not scaled")
        stage_lengths = [stage.num_layers for stage in stages(self.parallel, model.num_layers)]
        self._check_recompute_policy(max(stage_lengths), len(stage_lengths))
        self._check_pipeline()
        self._check_compiler()
        self._check_data_parallel()
        by_samples = self.training.train_samples is not None
        schedule = self.lr_schedule
        if by_samples and (schedule.lr_decay_iters or schedule.lr_warmup_iters or schedule.lr_wsd_decay_iters):
            raise ValueError("--train-samples counts the learning-rate schedule in samples: use --lr-decay-samples, "
                             "--lr-warmup-samples and --lr-wsd-decay-samples")
        if not by_samples and (schedule.lr_decay_samples or schedule.lr_warmup_samples or schedule.lr_wsd_decay_samples):
            raise ValueError("--train-iters counts the learning-rate schedule in iterations: use --lr-decay-iters, "
                             "--lr-warmup-iters and --lr-wsd-decay-iters")

    def check_complete_for_training(self) -> None:
        """ValueError where training would lack its length, learning rate or data: a run to load or sample from may."""
        missing = []
        if self.training.train_iters is None and self.training.train_samples is None:
            missing.append("the length of the run: set --train-iters or --train-samples")
        if self.lr_schedule.lr is None:
            missing.append("the learning rate: set --lr")
        if not self.data.data_path and not self.data.mock_data:
            missing.append("something to train on: give --data-path PREFIX or --mock-data")
        if missing:
            raise ValueError("training needs " + "; and ".join(missing))

    def recompute_warnings(self) -> list[str]:
        """One line for each recompute setting that is legal and does nothing, or less than it says."""
        recompute, warnings = self.recompute, []
        actions = [rule.action for rule in recompute.policy.rules]
        modules = {region for action in actions for region in action.regions}
        # The device is not known yet: with dropout a CPU has no flash kernel, and under auto the region may be worth it.
        if "core_attn" in modules and (self.model.attention_backend == "flash" or not self.model.builds_scores("cpu")):
            warnings.append("--recompute-modules core_attn saves next to nothing under --attention-backend "
                            f"{self.model.attention_backend}: flash attention rebuilds its scores in backward by itself")
        if any({"activation", "mlp"} <= set(action.regions) for action in actions):
            warnings.append("--recompute-modules activation adds nothing to mlp, which it is a part of")
        warnings += self._operators_without_effect({parse_entry(text).name for action in actions for text in action.ops})
        has_tail = any(action.unit or action.ops for action in actions) or "core_attn" in modules or "mlp" in modules
        if not recompute.recompute_tail_skip and not has_tail:
            warnings.append("--no-recompute-tail-skip has no effect: nothing is recomputed that ends in a matmul")
        if recompute.recompute_verify and has_tail and recompute.recompute_tail_skip:
            warnings.append("--recompute-verify turns the tail skip off: it compares the whole of every replay")
        if recompute.activation_memory_budget is not None and self.model.hidden_dropout + self.model.attention_dropout > 0.0:
            warnings.append("--activation-memory-budget is a share of what each compiled graph keeps, and every dropout ends a "
                            "graph")
        count = recompute.recompute_num_layers
        longest = max(stage.num_layers for stage in stages(self.parallel, self.model.num_layers))
        if recompute.recompute_method == "block" and count is not None and count > longest:
            warnings.append(f"--recompute-num-layers {count} is more than the {longest} layers of a stage: all of them are "
                            "recomputed")
        return warnings

    def _operators_without_effect(self, names: set[str]) -> list[str]:
        reasons = {
            "attention": "attention is unfused and builds its scores" if self.model.attention_backend == "unfused" else
                         "--attention-dropout draws random numbers, so that attention has to run again"
                         if self.model.attention_dropout > 0.0 else "",
            "collective": self._no_collective(),
            "max": "no layer of this model computes one",
        }
        own = "megatron_lite.context_parallel_attention.default"
        kernels = set(GROUPS["attention"]) - {own}
        if self.parallel.context_parallel_size > 1:
            reasons |= dict.fromkeys(kernels, f"over context-parallel ranks attention is one operator, {own}")
        else:
            reasons[own] = "--context-parallel-size is 1"
        return [f"--recompute-policy ops({name}) keeps nothing: {reason}" for name, reason in reasons.items()
                if reason and name in names]

    def _no_collective(self) -> str:
        parallel = self.parallel
        if parallel.tensor_model_parallel_size > 1 or (parallel.context_parallel_size > 1
                                                       and self.model.attention_backend == "unfused"):
            return ""
        if parallel.context_parallel_size > 1:
            return "--tensor-model-parallel-size is 1, and what context-parallel ranks exchange is part of their attention"
        return "--tensor-model-parallel-size is 1"

    def _check_recompute_policy(self, num_layers: int, num_stages: int) -> None:
        given = self.recompute.recompute_policy
        where = "" if num_stages == 1 else " of a stage"
        for rule in self.recompute.policy.rules:
            beyond = max((layers.last or layers.first for layers in rule.layers), default=0)
            if given is not None and beyond >= num_layers:
                raise ValueError(point_at(given, parse_policy(given).rules[self.recompute.policy.rules.index(rule)].position,
                                          f"layer {beyond} does not exist: the layers{where} are 0 to {num_layers - 1}"))
            for entry in map(parse_entry, rule.action.ops):
                if not IN_GROUPS.issuperset(entry.operators):
                    raise ValueError(f"--recompute-policy '{rule}': how many bytes {entry.name} would keep cannot be told before "
                                     f"the run; {', '.join(GROUPS)} name operators of which it can, and so do their members")
            if rule.store.startswith("split"):
                self._check_split("--distribute-saved-activations" if given is None else f"--recompute-policy '{rule}'")

    def _check_pipeline(self) -> None:
        flag = "--num-microbatches-with-partial-activation-checkpoints"
        in_pipeline = self.parallel.pipeline_model_parallel_size > 1
        if self.recompute.num_microbatches_with_partial_activation_checkpoints is not None:
            if not in_pipeline:
                raise ValueError(f"{flag} needs --pipeline-model-parallel-size > 1 (got 1): one micro-batch is in flight at a "
                                 "time")
            if all(rule.action == Action() for rule in self.recompute.policy.rules):
                raise ValueError(f"{flag} says which micro-batches keep what the others recompute, and nothing is recomputed: "
                                 "give --recompute-granularity or --recompute-policy too")
        if in_pipeline and self.logging.memory_timeline is not None:
            raise ValueError("--memory-timeline records the forward and backward of one micro-batch, which a pipeline mixes with "
                             "those of others: give --pipeline-model-parallel-size 1")

    def _check_context_parallel(self) -> None:
        size, parts = self.parallel.context_parallel_size, self.parallel.sequence_parts
        if self.data.seq_length % parts:
            shards = f" x --tensor-model-parallel-size {parts // (2 * size)}" if self.parallel.sequence_parallel else ""
            under = ", which --sequence-parallel splits again" if shards else ""
            raise ValueError(f"--seq-length {self.data.seq_length} is not divisible by 2 x --context-parallel-size "
                             f"{size}{shards} = {parts}: each rank holds two chunks of the sequence{under}")
        if self.model.attention_dropout > 0.0 and self.model.attention_backend != "unfused":
            raise ValueError(f"--context-parallel-size {size} has no flash attention with --attention-dropout "
                             f"{self.model.attention_dropout}: give --attention-dropout 0, or --attention-backend unfused, which "
                             "builds the scores")

    def _check_compiler(self) -> None:
        budget = self.recompute.activation_memory_budget
        if not self.training.torch_compile:
            if budget is not None:
                raise ValueError(f"--activation-memory-budget {budget} is a setting of torch's compiler: give --torch-compile "
                                 "too")
            return
        if any(rule.action != Action() or rule.store != "device" for rule in self.recompute.policy.rules):
            raise ValueError("--torch-compile decides itself what compiled layers recompute: give --activation-memory-budget "
                             "instead of a recompute policy, or leave --torch-compile out")
        for axis in ("tensor_model_parallel_size", "context_parallel_size"):
            if (size := getattr(self.parallel, axis)) > 1:
                raise ValueError(f"--torch-compile needs {flag(axis)} 1 (got {size}): every collective would end a compiled "
                                 "graph")

    def _check_data_parallel(self) -> None:
        if self.data_parallel.overlap_param_gather and self.training.torch_compile:
            raise ValueError("--overlap-param-gather cannot go with --torch-compile: each module's wait for its weights would "
                             "end a compiled graph. Leave one of them out")
        if self.data_parallel.grad_reduce_in_bf16 and not self.training.bf16:
            raise ValueError("--grad-reduce-in-bf16 needs --bf16: gradients of float32 weights are exchanged in float32")

    def _check_split(self, flag: str) -> None:
        tp_size = self.parallel.tensor_model_parallel_size
        if tp_size == 1:
            raise ValueError(f"{flag} needs --tensor-model-parallel-size > 1 (got 1)")
        if self.parallel.sequence_parallel:
            raise ValueError(f"{flag} has nothing to split under --sequence-parallel, where each rank's input is already 1/t: "
                             "leave one of them out")
        cp_size = self.parallel.context_parallel_size
        elements = self.data.seq_length // cp_size * self.training.micro_batch_size * self.model.hidden_size
        if elements % tp_size:
            share = f" / --context-parallel-size {cp_size}" if cp_size > 1 else ""
            raise ValueError(f"{flag} splits the {elements} elements of --seq-length{share} x --micro-batch-size x --hidden-size "
                             f"over --tensor-model-parallel-size {tp_size} ranks, which does not divide them")

    def to_json(self) -> str:
        """The run as indented JSON, one object per topic. `from_json` gives an equal value back."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Reads what `to_json` wrote. ValueError on text that is not JSON, unknown topics, unknown or ill-typed fields, and
        every broken rule."""
        return typing.cast(RunConfig, _from_plain(cls, json.loads(text), "run"))


def _from_plain(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected an object, got {type(values).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ValueError(f"{where}: unknown field {', '.join(unknown)} (known: {', '.join(sorted(hints))})")
    missing = sorted(f.name for f in dataclasses.fields(cls)
                     if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
    if missing:
        raise ValueError(f"{where}: missing field {', '.join(missing)}")
    return cls(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _from_plain(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ValueError(f"{where}: expected a list of {'strings' if kind is str else 'whole numbers'}, got {value!r}")
        return tuple(value)
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, bool) and bool not in allowed:
        raise ValueError(f"{where}: expected {hint}, got {value!r}")
    if isinstance(value, int) and not isinstance(value, bool) and float in allowed and int not in allowed:
        return float(value)
    if not isinstance(value, allowed):
        raise ValueError(f"{where}: expected {hint}, got {value!r}")
    return value
