"""Every rule of the config classes: what breaks it, what the message says, and the nearest values
that keep it."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.data_settings import DataConfig, TokenizerConfig
from megatron_lite.config.logging_settings import LoggingConfig
from megatron_lite.config.loss_scaling import LossScaleConfig
from megatron_lite.config.lr_schedule_settings import LrScheduleConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import OPTIMIZERS, OptimizerConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.profiling import ProfilingConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from tests.support.pairs import in_one_test

SMALLEST: dict[type, dict[str, Any]] = {
    ModelConfig: {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "max_position_embeddings": 8,
    },
    ParallelConfig: {},
    OptimizerConfig: {},
    LossScaleConfig: {},
    LrScheduleConfig: {},
    CheckpointConfig: {},
    LoggingConfig: {},
    ProfilingConfig: {},
    RecomputeConfig: {},
    TrainingConfig: {"micro_batch_size": 2},
    DataConfig: {"seq_length": 8},
    TokenizerConfig: {"vocab_size": 99},
}


def build(config_class: type, **changes: Any) -> Any:
    return config_class(**{**SMALLEST[config_class], **changes})


def run(**topics: dict[str, Any]) -> RunConfig:
    names = {
        "model": ModelConfig,
        "training": TrainingConfig,
        "data": DataConfig,
        "tokenizer": TokenizerConfig,
        "parallel": ParallelConfig,
        "lr_schedule": LrScheduleConfig,
    }
    return RunConfig(
        **{
            name: build(config_class, **topics.get(name, {}))
            for name, config_class in names.items()
        }
    )


INF, NAN = math.inf, math.nan
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 1}
# class, fields, values out of bounds or no choice, values next to them that are legal, and the
# settings that the fields need
BOUNDS: list[tuple[Any, ...]] = [
    (
        ModelConfig,
        "num_layers hidden_size num_attention_heads max_position_embeddings ffn_hidden_size "
        "kv_channels",
        (0, -4),
        (4,),
    ),
    (ModelConfig, "num_query_groups", (0,), (1,), {"group_query_attention": True}),
    (ModelConfig, "init_method_std norm_epsilon", (-0.1, NAN, INF), (0.0, 1.0)),
    (ModelConfig, "hidden_dropout attention_dropout", (1.0, -0.1), (0.0, 0.99)),
    (ModelConfig, "position_embedding_type", ("alibi",), ("none", "rope")),
    (ModelConfig, "normalization", ("rmsnorm",), ("RMSNorm",)),
    (ModelConfig, "attention_backend", ("fused",), ("unfused",)),
    (ModelConfig, "rotary_base", (0,), (1,), {"position_embedding_type": "rope"}),
    (ParallelConfig, "tensor_model_parallel_size distributed_timeout_minutes", (0,), (1, 3)),
    (ParallelConfig, "distributed_backend", ("mpi",), ("gloo",)),
    (TrainingConfig, "micro_batch_size", (0,), (1,)),
    (TrainingConfig, "global_batch_size train_samples", (0,), (2,)),
    (TrainingConfig, "train_iters eval_iters loss_chunk_size", (-1,), (0,)),
    (TrainingConfig, "seed", (-1, 2**32), (0, 2**32 - 1)),
    (TrainingConfig, "eval_interval exit_interval", (0,), (1,)),
    (TrainingConfig, "skip_update_on_spike", (1.0, INF), (1.1,)),
    (
        LossScaleConfig,
        "loss_scale initial_loss_scale min_loss_scale",
        (0.0, -1.0, INF, NAN),
        (2.0,),
    ),
    (LossScaleConfig, "loss_scale_window", (0.0, 1.5), (1.0, 2.0)),
    (LossScaleConfig, "hysteresis", (0,), (1,)),
    (OptimizerConfig, "optimizer", ("sgd",), OPTIMIZERS),
    (OptimizerConfig, "adam_beta1 adam_beta2", (1.0, NAN), (0.0, 0.999)),
    (OptimizerConfig, "adam_eps", (-1e-8, 0.0, 1.0), (1e-8,)),
    (OptimizerConfig, "weight_decay clip_grad", (-0.1,), (0.0,)),
    *(
        (OptimizerConfig, field, bad, good, {"optimizer": "muon"})
        for field, bad, good in (
            ("muon_momentum", (1.0,), (0.0,)),
            ("muon_num_ns_steps", (0, 100), (1, 99)),
            ("muon_scale_mode", ("none",), ("spectral", "shape_scaling")),
            ("muon_coefficient_type", ("cans",), ("simple",)),
            ("muon_tp_mode", ("distributed", "split"), ("duplicated", "blockwise")),
            ("muon_fp32_matmul_prec", ("low", "highest"), ("medium", "high")),
            ("muon_extra_scale_factor", (0.0, NAN), (0.1,)),
        )
    ),
    (LrScheduleConfig, "lr_decay_style", ("step",), ("constant",)),
    (LrScheduleConfig, "lr_wsd_decay_style", ("step",), ("cosine",)),
    (LrScheduleConfig, "lr min_lr lr_warmup_init lr_warmup_iters lr_warmup_samples", (-1,), (0,)),
    (LrScheduleConfig, "decoupled_lr", (-1.0,), (0.5,)),
    (LrScheduleConfig, "lr_decay_iters lr_decay_samples", (0,), (1,)),
    (LrScheduleConfig, "lr_wsd_decay_iters lr_wsd_decay_samples", (0,), (1,), WSD),
    (LrScheduleConfig, "lr_warmup_fraction", (1.0,), (0.0,)),
    (DataConfig, "seq_length", (0,), (1,)),
    (TokenizerConfig, "vocab_size make_vocab_size_divisible_by", (0,), (1,)),
    (TokenizerConfig, "tokenizer_type", ("BertTokenizer",), ("NullTokenizer",)),
    (TokenizerConfig, "tiktoken_pattern", ("v3",), ("v1", "v2")),
    (CheckpointConfig, "save_interval", (0,), (1,), {"save": "d"}),
    (CheckpointConfig, "save load", ("",), ("d",)),
    (LoggingConfig, "log_interval tensorboard_log_interval", (0,), (1,)),
    (LoggingConfig, "timing_log_level", (3,), (0, 2)),
    (LoggingConfig, "timing_log_option", ("min",), ("max", "all")),
    (ProfilingConfig, "profile_step_start", (-1,), (0,)),
    (ProfilingConfig, "memory_snapshot_path", ("",), ("s",)),
    (RecomputeConfig, "cpu_offloading_num_layers", (-1,), (0, 1)),
    (RecomputeConfig, "activation_memory_budget", (-0.1, 1.1), (0.0, 1.0)),
]

# class, values that break a rule between fields, a part of the message, values that keep it
ROPE = {"position_embedding_type": "rope"}
RAMP = {"rampup_batch_size": (4, 2, 9), "global_batch_size": 12}
STEPS = {"step_batch_size_schedule": "0:4 1K:8"}
FINE = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)}
HF, BPE = {"tokenizer_type": "HuggingFaceTokenizer"}, {"tokenizer_type": "GPT2BPETokenizer"}
TIK = {"tokenizer_type": "TikTokenizer", "tokenizer_model": "t"}
RULES: list[tuple[type, dict[str, Any], str, dict[str, Any]]] = [
    (ModelConfig, {"hidden_size": 18}, "not divisible by", {"hidden_size": 18, "kv_channels": 4}),
    (
        ModelConfig,
        {"group_query_attention": True, "num_query_groups": 3},
        "--num-attention-heads 4 is not divisible by",
        {"group_query_attention": True, "num_query_groups": 2},
    ),
    (
        ModelConfig,
        {"num_query_groups": 2},
        "needs --group-query-attention",
        {"num_query_groups": 2, "group_query_attention": True},
    ),
    (
        ModelConfig,
        {"swiglu": True, "squared_relu": True},
        "two activations",
        {"squared_relu": True},
    ),
    (ModelConfig, {"swiglu": True}, "set --ffn-hidden-size", {"swiglu": True, "hidden_size": 24}),
    *(
        (ModelConfig, {**ROPE, **bad}, message, {**ROPE, **good})
        for bad, message, good in (
            ({"rotary_percent": 0.25}, "gives 1 rotated channels", {"rotary_percent": 0.5}),
            ({"rotary_percent": 1.5}, "--rotary-percent 1.5", {"rotary_percent": 1.0}),
            ({"kv_channels": 3}, "it must be an even number", {"kv_channels": 6}),
        )
    ),
    (TrainingConfig, {"global_batch_size": 3}, "not divisible by", {"global_batch_size": 4}),
    (TrainingConfig, {"train_iters": 2, "train_samples": 8}, "set one", {"train_iters": 2}),
    *(
        (TrainingConfig, {**RAMP, "rampup_batch_size": ramp}, message, RAMP)
        for ramp, message in (
            ((4, 2), "--rampup-batch-size 4 2: give START INCREMENT SAMPLES"),
            ((4, 2, 0), "three numbers of at least 1"),
            ((0, 2, 9), "three numbers of at least 1"),
            ((4, -2, 9), "three numbers of at least 1"),
            ((12, 2, 9), "the start must be below --global-batch-size 12"),
            ((4, 3, 9), "12 - 4 = 8 is not a multiple of the increment 3"),
        )
    ),
    (TrainingConfig, {"rampup_batch_size": (4, 2, 9)}, "needs --global-batch-size", RAMP),
    *(
        (TrainingConfig, {"step_batch_size_schedule": text, **others}, message, STEPS)
        for text, others, message in (
            ("", {}, "begin with 0:SAMPLES"),
            ("1K:8", {}, "begin with 0:SAMPLES"),
            ("0:4 1K", {}, "'1K' is no TOKENS:SAMPLES; give steps such as"),
            ("0:4 1Q:8", {}, "'1Q:8' is no TOKENS:SAMPLES"),
            ("0:4 -1:8", {}, "'-1:8' is no TOKENS:SAMPLES"),
            ("0:0", {}, "a batch of 0 samples; give at least 1"),
            ("0:0.4", {}, "a batch of 0 samples; give at least 1"),
            (" ".join(["0:4"] * 10_001), {}, "10001 steps are too many, give at most 10000"),
            ("0:4 1K:8", {"global_batch_size": 4}, "leave --global-batch-size out"),
            ("0:4 1K:8", {"rampup_batch_size": (4, 2, 9)}, "are two schedules: set one"),
        )
    ),
    (
        LossScaleConfig,
        {"initial_loss_scale": 4.0, "min_loss_scale": 8.0},
        "--min-loss-scale 8.0 is above --initial-loss-scale",
        {"initial_loss_scale": 4.0, "min_loss_scale": 4.0},
    ),
    *(
        (
            OptimizerConfig,
            {field: value},
            f"{given} needs --optimizer muon (got adam)",
            {field: value, "optimizer": "muon"},
        )
        for field, value, given in (
            ("muon_momentum", 0.95, "--muon-momentum 0.95"),
            ("muon_nesterov", True, "--muon-nesterov"),
            ("muon_split_qkv", False, "--muon-no-split-qkv"),
            ("muon_tp_mode", "blockwise", "--muon-tp-mode blockwise"),
        )
    ),
    *(
        (LrScheduleConfig, bad, message, good)
        for bad, message, good in (
            (
                {"decoupled_lr": 0.1, "decoupled_min_lr": 0.2},
                "--decoupled-min-lr 0.2 is above --decoupled-lr 0.1",
                {"decoupled_lr": 0.1, "decoupled_min_lr": 0.1},
            ),
            (
                {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
                "that of the flags: set one",
                {"use_checkpoint_opt_param_scheduler": True},
            ),
            ({"lr": 1e-4, "min_lr": 1e-3}, "0.001 is above --lr", {"lr": 1e-4, "min_lr": 1e-4}),
            ({"lr": 1e-4, "lr_warmup_init": 1e-3}, "is above --lr", {"lr": 1e-4}),
            (
                {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3},
                "--lr-warmup-fraction excludes",
                {"lr_warmup_iters": 3},
            ),
            (
                {"lr_warmup_fraction": 0.1, "lr_warmup_samples": 3},
                "--lr-warmup-fraction excludes",
                {"lr_warmup_samples": 3},
            ),
            ({"lr_decay_style": "WSD"}, "needs --lr-wsd-decay-iters", WSD),
            ({"lr_wsd_decay_iters": 3}, "needs --lr-decay-style WSD (got linear)", WSD),
        )
    ),
    (DataConfig, {"data_path": ("a",), "mock_data": True}, "two sources", {"data_path": ("a",)}),
    *(
        (TokenizerConfig, bad, message, good)
        for bad, message, good in (
            ({"vocab_size": None}, "needs --vocab-size", {"vocab_size": 2}),
            ({"tokenizer_model": "m"}, "needs --tokenizer-type", {"tokenizer_model": "m", **HF}),
            (HF, "needs --tokenizer-model", {**HF, "tokenizer_model": "m", "vocab_size": None}),
            ({"tokenizer_type": "Llama2Tokenizer"}, "needs --tokenizer-model", {}),
            ({"tokenizer_type": "TikTokenizer"}, "needs --tokenizer-model", TIK),
            ({**TIK, "tokenizer_special_tokens": ("<s>",)}, "<unk> is missing; name it", TIK),
            ({**BPE, "vocab_file": "v"}, "needs --vocab-file and --merge-file", {}),
            ({"vocab_file": "v"}, "--merge-file", {"vocab_file": "v", "merge_file": "m"}),
        )
    ),
    (CheckpointConfig, {"save_keep_last": 5}, "--save-keep-last 5 needs --save DIR", {"save": "d"}),
    *(
        (CheckpointConfig, {field: True}, "needs --load DIR", {field: True, "load": "d"})
        for field in ("allow_fresh_start", "no_load_fallback", "allow_changed_data")
    ),
    (LoggingConfig, {"wandb_project": "p", "wandb_exp_name": ""}, "--wandb-exp-name is empty", {}),
    (ProfilingConfig, {"profile": True, "profile_step_start": 12}, "must be above", {}),
    (ProfilingConfig, {"profile_ranks": (0, -1)}, "--profile-ranks 0 -1: give numbers", {}),
    *(
        (RecomputeConfig, bad, message, FINE)
        for bad, message in (
            (
                {"cpu_offloading_num_layers": 1, "recompute_granularity": "selective"},
                "selective cannot go with --cpu-offloading-num-layers",
            ),
            (
                {**FINE, "recompute_policy": "*:full"},
                "*:full cannot go with --fine-grained-activation-offloading",
            ),
            ({**FINE, "cpu_offloading_num_layers": 1}, "two ways to say what goes to host memory"),
            ({**FINE, "offload_modules": ()}, "needs --offload-modules among attn_norm"),
            ({**FINE, "offload_modules": ("moe_act",)}, "(got moe_act): other parts are those"),
            ({**FINE, "offload_modules": ("attn_proj",)}, "attn_proj needs core_attn"),
        )
    ),
]

ACROSS_TOPICS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (
        {"parallel": {"tensor_model_parallel_size": 3}},
        "--num-attention-heads 4 is not divisible by --tensor-model-parallel-size 3",
        {"parallel": {"tensor_model_parallel_size": 2}},
    ),
    (
        {
            "parallel": {"tensor_model_parallel_size": 4},
            "model": {"group_query_attention": True, "num_query_groups": 2},
        },
        "--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4",
        {
            "parallel": {"tensor_model_parallel_size": 2},
            "model": {"group_query_attention": True, "num_query_groups": 2},
        },
    ),
    (
        {"parallel": {"tensor_model_parallel_size": 4}, "model": {"ffn_hidden_size": 6}},
        "--ffn-hidden-size 6 is not divisible by",
        {"parallel": {"tensor_model_parallel_size": 4}, "model": {"ffn_hidden_size": 8}},
    ),
    (
        {
            "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "data": {"seq_length": 7},
        },
        "--sequence-parallel splits --seq-length 7 over --tensor-model-parallel-size 2",
        {"parallel": {"tensor_model_parallel_size": 2}, "data": {"seq_length": 7}},
    ),
    (
        {"data": {"seq_length": 9}},
        "--seq-length 9 is above --max-position-embeddings 8",
        {"data": {"seq_length": 8}},
    ),
    *[
        (
            {
                "training": {"train_samples": 8, "global_batch_size": 2},
                "lr_schedule": {**wsd, f"{field}_iters": 3},
            },
            "--train-samples counts the learning-rate schedule in samples",
            {
                "training": {"train_samples": 8, "global_batch_size": 2},
                "lr_schedule": {**wsd, f"{field}_samples": 3},
            },
        )
        for field, wsd in (
            ("lr_decay", {}),
            ("lr_warmup", {}),
            ("lr_wsd_decay", {"lr_decay_style": "WSD"}),
        )
    ],
    *[
        (
            {"training": {"train_iters": 8}, "lr_schedule": {**wsd, f"{field}_samples": 3}},
            "--train-iters counts the learning-rate schedule in iterations",
            {"training": {"train_iters": 8}, "lr_schedule": {**wsd, f"{field}_iters": 3}},
        )
        for field, wsd in (
            ("lr_decay", {}),
            ("lr_warmup", {}),
            ("lr_wsd_decay", {"lr_decay_style": "WSD"}),
        )
    ],
]


@in_one_test("row", BOUNDS)
def test_a_value_out_of_bounds_is_named_with_its_flag(row: tuple[Any, ...]) -> None:
    config_class, fields, bad, good, needs = (*row, {})[:5]
    for field in fields.split():
        for value in bad:
            with pytest.raises(ValueError) as fault:
                build(config_class, **{**needs, field: value})
            text = str(fault.value)
            assert text.startswith(f"--{field.replace('_', '-')} ") and str(value) in text
        for value in good:
            assert getattr(build(config_class, **{**needs, field: value}), field) == value


@in_one_test("config_class, broken, message, kept", RULES)
def test_a_rule_of_one_topic(
    config_class: type, broken: dict[str, Any], message: str, kept: dict[str, Any]
) -> None:
    with pytest.raises(ValueError) as fault:
        build(config_class, **broken)
    assert message in str(fault.value)
    build(config_class, **kept)


@pytest.mark.parametrize(("broken", "message", "kept"), ACROSS_TOPICS)
def test_a_rule_across_topics(broken: dict[str, Any], message: str, kept: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as fault:
        run(**broken)
    assert message in str(fault.value)
    run(**kept)


@pytest.mark.parametrize("config_class", SMALLEST)
def test_a_config_cannot_be_changed(config_class: type) -> None:
    config = build(config_class)
    with pytest.raises(FrozenInstanceError):
        setattr(config, next(iter(vars(config))), 1)


# What follows from the fields


@pytest.mark.parametrize(
    ("changes", "ffn"),
    [
        ({}, 64),
        ({"swiglu": True, "hidden_size": 100, "num_attention_heads": 5}, 256),
        ({"swiglu": True, "hidden_size": 4096}, 10880),
        ({"swiglu": True, "hidden_size": 24}, 64),
        ({"swiglu": True, "ffn_hidden_size": 7}, 7),
        ({"squared_relu": True}, 64),
    ],
)
def test_the_default_ffn_size_is_megatrons(changes: dict[str, Any], ffn: int) -> None:
    assert build(ModelConfig, **changes).ffn_size == ffn


def test_query_groups_are_heads_without_grouped_attention() -> None:
    assert build(ModelConfig).query_groups == 4
    assert build(ModelConfig, group_query_attention=True).query_groups == 1
    assert build(ModelConfig, group_query_attention=True, num_query_groups=2).query_groups == 2


def test_sequence_parallel_is_off_on_one_rank() -> None:
    assert not ParallelConfig(sequence_parallel=True).sequence_parallel
    assert ParallelConfig(sequence_parallel=True, tensor_model_parallel_size=2).sequence_parallel


def test_the_world_is_divided_into_tensor_and_data_parallel_ranks() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    assert parallel.data_parallel_size(6) == 3
    with pytest.raises(
        ValueError, match="world size 5 is not a multiple of --tensor-model-parallel-size 2: start"
    ):
        parallel.data_parallel_size(5)


def test_microbatches_and_iterations_follow_from_the_batch() -> None:
    training = build(TrainingConfig, global_batch_size=12, train_samples=50)
    assert (
        training.batch_size(3),
        training.num_microbatches(3),
        training.num_iterations(training.batch_schedule(3)),
    ) == (12, 2, 4)
    with pytest.raises(
        ValueError, match="12 is not divisible by --micro-batch-size 2 x data-parallel size 4 = 8"
    ):
        training.num_microbatches(4)


def test_the_batch_is_one_microbatch_per_rank_by_default() -> None:
    assert (
        build(TrainingConfig).batch_size(3) == 6 and build(TrainingConfig).num_microbatches(3) == 1
    )
    with pytest.raises(ValueError, match="set --train-iters or --train-samples"):
        build(TrainingConfig).num_iterations(BatchSchedule.constant(12))


@pytest.mark.parametrize(
    ("values", "tp_size", "padded"),
    [
        ({"vocab_size": 127}, 1, 128),  # NullTokenizer adds the end-of-document id
        ({"vocab_size": 128}, 1, 256),
        ({"vocab_size": 128}, 4, 512),
        ({"vocab_size": 50257, "vocab_file": "v", "merge_file": "m"}, 1, 50304),
        ({"vocab_size": 50257, "vocab_file": "v", "merge_file": "m"}, 8, 51200),
        ({"vocab_size": 9, "make_vocab_size_divisible_by": 5}, 3, 15),
    ],
)
def test_the_vocabulary_is_padded_as_in_megatron(
    values: dict[str, Any], tp_size: int, padded: int
) -> None:
    assert TokenizerConfig(**values).padded_vocab_size(tp_size) == padded


def test_an_unknown_vocabulary_is_a_fault_where_it_is_needed() -> None:
    with pytest.raises(
        ValueError, match="--tokenizer-type HuggingFaceTokenizer is not known yet: set --vocab-size"
    ):
        TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model="m"
        ).padded_vocab_size(1)
