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


# class, values that break the rule, part of the message, values next to them that keep it
FINE = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)}
RULES: list[tuple[type, dict[str, Any], str, dict[str, Any]]] = [
    *[
        (
            ModelConfig,
            {field: 0},
            f"--{field.replace('_', '-')} must be at least 1 (got 0)",
            {field: 4},
        )
        for field in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "max_position_embeddings",
            "ffn_hidden_size",
            "kv_channels",
        )
    ],
    (
        ModelConfig,
        {"group_query_attention": True, "num_query_groups": 0},
        "--num-query-groups must be at least 1 (got 0)",
        {"group_query_attention": True, "num_query_groups": 1},
    ),
    (
        ModelConfig,
        {"init_method_std": -0.1},
        "--init-method-std must be at least 0.0 (got -0.1)",
        {"init_method_std": 0.0},
    ),
    (
        ModelConfig,
        {"norm_epsilon": math.nan},
        "--norm-epsilon must be at least 0.0 (got nan)",
        {"norm_epsilon": 0.0},
    ),
    (
        ModelConfig,
        {"norm_epsilon": math.inf},
        "--norm-epsilon must be at least 0.0 and finite (got inf)",
        {"norm_epsilon": 1.0},
    ),
    (
        ModelConfig,
        {"hidden_dropout": 1.0},
        "--hidden-dropout must be in [0.0, 1.0) (got 1.0)",
        {"hidden_dropout": 0.99},
    ),
    (
        ModelConfig,
        {"attention_dropout": -0.1},
        "--attention-dropout must be in [0.0, 1.0)",
        {"attention_dropout": 0.0},
    ),
    (
        ModelConfig,
        {"position_embedding_type": "alibi"},
        "--position-embedding-type must be one of",
        {"position_embedding_type": "none"},
    ),
    (
        ModelConfig,
        {"normalization": "rmsnorm"},
        "--normalization must be one of LayerNorm, RMSNorm",
        {"normalization": "RMSNorm"},
    ),
    (
        ModelConfig,
        {"attention_backend": "fused"},
        "--attention-backend must be one of",
        {"attention_backend": "unfused"},
    ),
    (
        ModelConfig,
        {"hidden_size": 18},
        "--hidden-size 18 is not divisible by --num-attention-heads 4",
        {"hidden_size": 18, "kv_channels": 4},
    ),
    (
        ModelConfig,
        {"group_query_attention": True, "num_query_groups": 3},
        "--num-attention-heads 4 is not divisible by",
        {"group_query_attention": True, "num_query_groups": 2},
    ),
    (
        ModelConfig,
        {"num_query_groups": 2},
        "--num-query-groups 2 needs --group-query-attention",
        {"num_query_groups": 2, "group_query_attention": True},
    ),
    (
        ModelConfig,
        {"swiglu": True, "squared_relu": True},
        "--swiglu and --squared-relu are two activations",
        {"squared_relu": True},
    ),
    (
        ModelConfig,
        {"swiglu": True},
        "which is 0 at --hidden-size 16: set --ffn-hidden-size",
        {"swiglu": True, "hidden_size": 24},
    ),
    (
        ModelConfig,
        {"position_embedding_type": "rope", "rotary_base": 0},
        "--rotary-base must be at least 1 (got 0)",
        {"position_embedding_type": "rope", "rotary_base": 1},
    ),
    (
        ModelConfig,
        {"position_embedding_type": "rope", "rotary_percent": 0.25},
        "gives 1 rotated channels",
        {"position_embedding_type": "rope", "rotary_percent": 0.5},
    ),
    (
        ModelConfig,
        {"position_embedding_type": "rope", "rotary_percent": 1.5},
        "--rotary-percent 1.5",
        {"position_embedding_type": "rope", "rotary_percent": 1.0},
    ),
    (
        ModelConfig,
        {"position_embedding_type": "rope", "kv_channels": 3},
        "it must be an even number",
        {"position_embedding_type": "rope", "kv_channels": 6},
    ),
    (
        ParallelConfig,
        {"tensor_model_parallel_size": 0},
        "--tensor-model-parallel-size must be at least 1",
        {"tensor_model_parallel_size": 3},
    ),
    (
        ParallelConfig,
        {"distributed_timeout_minutes": 0},
        "--distributed-timeout-minutes must be at least 1",
        {"distributed_timeout_minutes": 1},
    ),
    (
        ParallelConfig,
        {"distributed_backend": "mpi"},
        "--distributed-backend must be one of auto, nccl, gloo",
        {"distributed_backend": "gloo"},
    ),
    (
        TrainingConfig,
        {"micro_batch_size": 0},
        "--micro-batch-size must be at least 1",
        {"micro_batch_size": 1},
    ),
    (
        TrainingConfig,
        {"global_batch_size": 0},
        "--global-batch-size must be at least 1",
        {"global_batch_size": 2},
    ),
    (
        TrainingConfig,
        {"global_batch_size": 3},
        "--global-batch-size 3 is not divisible by --micro-batch-size 2",
        {"global_batch_size": 4},
    ),
    (
        TrainingConfig,
        {"train_samples": 0, "global_batch_size": 2},
        "--train-samples must be at least 1",
        {"train_samples": 1, "global_batch_size": 2},
    ),
    (
        TrainingConfig,
        {"train_iters": 2, "train_samples": 8, "global_batch_size": 4},
        "both give the length of the run",
        {"train_iters": 2},
    ),
    *[
        (
            TrainingConfig,
            {"rampup_batch_size": ramp, "global_batch_size": 12},
            message,
            {"rampup_batch_size": (4, 2, 9), "global_batch_size": 12},
        )
        for ramp, message in (
            (
                (4, 2),
                (
                    "--rampup-batch-size 4 2: give START INCREMENT SAMPLES, three numbers of at "
                    "least 1"
                ),
            ),
            ((4, 2, 0), "--rampup-batch-size 4 2 0: give START INCREMENT SAMPLES"),
            ((0, 2, 9), "three numbers of at least 1"),
            ((4, -2, 9), "three numbers of at least 1"),
            (
                (12, 2, 9),
                "--rampup-batch-size 12 2 9: the start must be below --global-batch-size 12",
            ),
            ((4, 3, 9), "--global-batch-size 12 - 4 = 8 is not a multiple of the increment 3"),
        )
    ],
    (
        TrainingConfig,
        {"rampup_batch_size": (4, 2, 9)},
        "--rampup-batch-size 4 2 9 needs --global-batch-size",
        {"rampup_batch_size": (4, 2, 9), "global_batch_size": 6},
    ),
    *[
        (
            TrainingConfig,
            {"step_batch_size_schedule": text, **others},
            message,
            {"step_batch_size_schedule": "0:4 1K:8"},
        )
        for text, others, message in (
            ("", {}, "the first batch has no size; begin with 0:SAMPLES"),
            ("1K:8", {}, "the first batch has no size; begin with 0:SAMPLES"),
            ("0:4 1K", {}, "'1K' is no TOKENS:SAMPLES; give steps such as '0:768 250B:1536'"),
            ("0:4 1Q:8", {}, "'1Q:8' is no TOKENS:SAMPLES"),
            ("0:4 -1:8", {}, "'-1:8' is no TOKENS:SAMPLES"),
            ("0:0", {}, "a batch of 0 samples; give at least 1"),
            ("0:0.4", {}, "a batch of 0 samples; give at least 1"),
            (" ".join(["0:4"] * 10_001), {}, "10001 steps are too many, give at most 10000"),
            (
                "0:4 1K:8",
                {"global_batch_size": 4},
                "ends with a batch of 8 samples, and --global-batch-size is 4: leave "
                "--global-batch-size out",
            ),
            (
                "0:4 1K:8",
                {"rampup_batch_size": (4, 2, 9)},
                "--rampup-batch-size are two schedules: set one",
            ),
        )
    ],
    (
        LrScheduleConfig,
        {"decoupled_lr": -1.0},
        "--decoupled-lr must be at least 0",
        {"decoupled_lr": 0.5},
    ),
    (
        LrScheduleConfig,
        {"decoupled_lr": 0.1, "decoupled_min_lr": 0.2},
        "--decoupled-min-lr 0.2 is above --decoupled-lr 0.1",
        {"decoupled_lr": 0.1, "decoupled_min_lr": 0.1},
    ),
    (
        LrScheduleConfig,
        {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
        "--override-opt_param-scheduler that of the flags: set one",
        {"use_checkpoint_opt_param_scheduler": True},
    ),
    *[
        (ProfilingConfig, {"profile": True, **fault}, message, {"profile": True})
        for fault, message in (
            ({"profile_step_start": -1}, "--profile-step-start must be at least 0"),
            ({"profile_step_start": 12}, "--profile-step-end 12 must be above"),
            ({"profile_ranks": (0, -1)}, "--profile-ranks 0 -1: give numbers of ranks"),
            ({"memory_snapshot_path": ""}, "--memory-snapshot-path is empty"),
        )
    ],
    *[
        (LoggingConfig, fault, message, {})
        for fault, message in (
            ({"timing_log_level": 3}, "--timing-log-level must be one of 0, 1, 2 (got 3)"),
            ({"timing_log_option": "min"}, "--timing-log-option must be one of max, minmax, all"),
            ({"tensorboard_log_interval": 0}, "--tensorboard-log-interval must be at least 1"),
            ({"wandb_project": "p", "wandb_exp_name": ""}, "--wandb-exp-name is empty"),
        )
    ],
    *[
        (TokenizerConfig, {"tokenizer_type": kind, **fault}, message, {})
        for kind, fault, message in (
            ("Llama2Tokenizer", {}, "needs --tokenizer-model (a SentencePiece model)"),
            ("TikTokenizer", {}, "needs --tokenizer-model (a JSON list of tokens)"),
            (
                "TikTokenizer",
                {"tokenizer_model": "t", "tiktoken_pattern": "v3"},
                "--tiktoken-pattern must be one of v1, v2 (got 'v3')",
            ),
            (
                "TikTokenizer",
                {"tokenizer_model": "t", "tokenizer_special_tokens": ("<s>",)},
                "--tokenizer-special-tokens <s>: <unk> is missing; name it",
            ),
        )
    ],
    *[
        (RecomputeConfig, fault, message, kept)
        for fault, message, kept in (
            (
                {"cpu_offloading_num_layers": -1},
                "--cpu-offloading-num-layers must be at least 0",
                {"cpu_offloading_num_layers": 0, "recompute_granularity": "selective"},
            ),
            (
                {"cpu_offloading_num_layers": 1, "recompute_granularity": "selective"},
                "--recompute-granularity selective cannot go with --cpu-offloading-num-layers",
                {"cpu_offloading_num_layers": 1},
            ),
            (
                {**FINE, "recompute_policy": "*:full"},
                "--recompute-policy *:full cannot go with --fine-grained-activation-offloading",
                FINE,
            ),
            (
                {**FINE, "cpu_offloading_num_layers": 1},
                "are two ways to say what goes to host memory",
                FINE,
            ),
            (
                {"fine_grained_activation_offloading": True},
                "needs --offload-modules among attn_norm, qkv_linear, core_attn, attn_proj, "
                "mlp_norm (got none)",
                FINE,
            ),
            (
                {**FINE, "offload_modules": ("moe_act",)},
                "(got moe_act): other parts are those of mixture-of-experts layers",
                FINE,
            ),
            (
                {**FINE, "offload_modules": ("attn_proj",)},
                "--offload-modules attn_proj needs core_attn",
                {**FINE, "offload_modules": ("attn_proj", "core_attn")},
            ),
        )
    ],
    (TrainingConfig, {"train_iters": -1}, "--train-iters must be at least 0", {"train_iters": 0}),
    (TrainingConfig, {"eval_iters": -1}, "--eval-iters must be at least 0", {"eval_iters": 0}),
    (TrainingConfig, {"seed": -1}, "--seed must be in [0, 4294967296)", {"seed": 2**32 - 1}),
    (
        TrainingConfig,
        {"eval_interval": 0},
        "--eval-interval must be at least 1",
        {"eval_interval": 1},
    ),
    (
        TrainingConfig,
        {"exit_interval": 0},
        "--exit-interval must be at least 1",
        {"exit_interval": 1},
    ),
    *[
        (
            LossScaleConfig,
            {field: value},
            f"--{field.replace('_', '-')} must be above 0 and finite (got {value})",
            {field: 2.0},
        )
        for field in ("loss_scale", "initial_loss_scale", "min_loss_scale")
        for value in (0.0, -1.0, math.inf, math.nan)
    ],
    (
        LossScaleConfig,
        {"loss_scale_window": 0.0},
        "--loss-scale-window must be at least 1",
        {"loss_scale_window": 1.0},
    ),
    (
        LossScaleConfig,
        {"loss_scale_window": 1.5},
        "--loss-scale-window counts steps",
        {"loss_scale_window": 2.0},
    ),
    (LossScaleConfig, {"hysteresis": 0}, "--hysteresis must be at least 1", {"hysteresis": 1}),
    (
        LossScaleConfig,
        {"initial_loss_scale": 4.0, "min_loss_scale": 8.0},
        "--min-loss-scale 8.0 is above --initial-loss-scale",
        {"initial_loss_scale": 4.0, "min_loss_scale": 4.0},
    ),
    (
        OptimizerConfig,
        {"optimizer": "sgd"},
        f"--optimizer must be one of {', '.join(OPTIMIZERS)} (got 'sgd')",
        {"optimizer": "adam"},
    ),
    *[
        (
            OptimizerConfig,
            {field: value},
            f"{given} needs --optimizer muon (got adam)",
            {field: value, "optimizer": "muon"},
        )
        for field, value, given in (
            ("muon_momentum", 0.95, "--muon-momentum 0.95"),
            ("muon_nesterov", True, "--muon-nesterov"),
            ("muon_num_ns_steps", 8, "--muon-num-ns-steps 8"),
            ("muon_split_qkv", False, "--muon-no-split-qkv"),
            ("muon_scale_mode", "shape_scaling", "--muon-scale-mode shape_scaling"),
            ("muon_extra_scale_factor", 0.2, "--muon-extra-scale-factor 0.2"),
            ("muon_coefficient_type", "simple", "--muon-coefficient-type simple"),
            ("muon_tp_mode", "blockwise", "--muon-tp-mode blockwise"),
            ("muon_fp32_matmul_prec", "high", "--muon-fp32-matmul-prec high"),
        )
    ],
    *[
        (
            OptimizerConfig,
            {"optimizer": "muon", field: bad},
            message,
            {"optimizer": "muon", field: good},
        )
        for field, bad, message, good in (
            ("muon_momentum", 1.0, "--muon-momentum must be in [0.0, 1.0) (got 1.0)", 0.0),
            ("muon_num_ns_steps", 0, "--muon-num-ns-steps must be in [1, 100) (got 0)", 1),
            ("muon_num_ns_steps", 100, "--muon-num-ns-steps must be in [1, 100) (got 100)", 99),
            (
                "muon_scale_mode",
                "none",
                "--muon-scale-mode must be one of spectral, unit_rms_norm, shape_scaling",
                "spectral",
            ),
            (
                "muon_coefficient_type",
                "cans",
                "--muon-coefficient-type must be one of simple, quintic, polar_express",
                "simple",
            ),
            (
                "muon_tp_mode",
                "distributed",
                "--muon-tp-mode distributed is not built: give duplicated",
                "duplicated",
            ),
            (
                "muon_tp_mode",
                "split",
                "--muon-tp-mode must be one of duplicated, blockwise (got 'split')",
                "blockwise",
            ),
            (
                "muon_fp32_matmul_prec",
                "low",
                "--muon-fp32-matmul-prec low is not built: give medium (bfloat16)",
                "high",
            ),
            (
                "muon_fp32_matmul_prec",
                "highest",
                "--muon-fp32-matmul-prec must be one of medium, high",
                "medium",
            ),
            (
                "muon_extra_scale_factor",
                0.0,
                "--muon-extra-scale-factor must be above 0 and finite (got 0.0)",
                0.1,
            ),
            (
                "muon_extra_scale_factor",
                math.nan,
                "--muon-extra-scale-factor must be above 0 and finite (got nan)",
                0.1,
            ),
        )
    ],
    (
        OptimizerConfig,
        {"adam_beta1": 1.0},
        "--adam-beta1 must be in [0.0, 1.0)",
        {"adam_beta1": 0.0},
    ),
    (
        OptimizerConfig,
        {"adam_beta2": math.nan},
        "--adam-beta2 must be in [0.0, 1.0) (got nan)",
        {"adam_beta2": 0.999},
    ),
    (OptimizerConfig, {"adam_eps": -1e-8}, "--adam-eps must be in (0, 1)", {"adam_eps": 1e-8}),
    (
        OptimizerConfig,
        {"weight_decay": -0.1},
        "--weight-decay must be at least 0.0",
        {"weight_decay": 0.0},
    ),
    (OptimizerConfig, {"clip_grad": -1.0}, "--clip-grad must be at least 0.0", {"clip_grad": 0.0}),
    (
        LrScheduleConfig,
        {"lr_decay_style": "step"},
        "--lr-decay-style must be one of",
        {"lr_decay_style": "constant"},
    ),
    (
        LrScheduleConfig,
        {"lr_wsd_decay_style": "step"},
        "--lr-wsd-decay-style must be one of",
        {"lr_wsd_decay_style": "cosine"},
    ),
    *[
        (
            LrScheduleConfig,
            {field: -1},
            f"--{field.replace('_', '-')} must be at least 0.0 (got -1)",
            {field: 0},
        )
        for field in ("lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples")
    ],
    *[
        (
            LrScheduleConfig,
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 1, field: 0},
            f"--{field.replace('_', '-')} must be at least 1 (got 0)",
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 1, field: 1},
        )
        for field in (
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
        )
    ],
    (
        LrScheduleConfig,
        {"lr_warmup_fraction": 1.0},
        "--lr-warmup-fraction must be in [0.0, 1.0)",
        {"lr_warmup_fraction": 0.0},
    ),
    (
        LrScheduleConfig,
        {"lr": 1e-4, "min_lr": 1e-3},
        "--min-lr 0.001 is above --lr 0.0001",
        {"lr": 1e-4, "min_lr": 1e-4},
    ),
    (
        LrScheduleConfig,
        {"lr": 1e-4, "lr_warmup_init": 1e-3},
        "--lr-warmup-init 0.001 is above --lr",
        {"lr": 1e-4, "lr_warmup_init": 1e-4},
    ),
    (
        LrScheduleConfig,
        {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3},
        "--lr-warmup-fraction excludes",
        {"lr_warmup_iters": 3},
    ),
    (
        LrScheduleConfig,
        {"lr_warmup_fraction": 0.1, "lr_warmup_samples": 3},
        "--lr-warmup-fraction excludes",
        {"lr_warmup_samples": 3},
    ),
    (
        LrScheduleConfig,
        {"lr_decay_style": "WSD"},
        "--lr-decay-style WSD needs --lr-wsd-decay-iters",
        {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 3},
    ),
    (
        LrScheduleConfig,
        {"lr_wsd_decay_iters": 3},
        "--lr-wsd-decay-iters needs --lr-decay-style WSD (got linear)",
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3},
    ),
    (DataConfig, {"seq_length": 0}, "--seq-length must be at least 1", {"seq_length": 1}),
    (
        DataConfig,
        {"data_path": ("a",), "mock_data": True},
        "--data-path and --mock-data are two sources",
        {"data_path": ("a",)},
    ),
    (TokenizerConfig, {"vocab_size": 0}, "--vocab-size must be at least 1", {"vocab_size": 1}),
    (
        TokenizerConfig,
        {"make_vocab_size_divisible_by": 0},
        "--make-vocab-size-divisible-by must be at least 1",
        {"make_vocab_size_divisible_by": 1},
    ),
    (
        TokenizerConfig,
        {"vocab_size": None},
        "--tokenizer-type NullTokenizer needs --vocab-size",
        {"vocab_size": 2},
    ),
    (
        TokenizerConfig,
        {"tokenizer_type": "BertTokenizer"},
        "--tokenizer-type must be one of",
        {"tokenizer_type": "NullTokenizer"},
    ),
    (
        TokenizerConfig,
        {"tokenizer_model": "m"},
        "--tokenizer-model needs --tokenizer-type",
        {"tokenizer_model": "m", "tokenizer_type": "HuggingFaceTokenizer"},
    ),
    (
        TokenizerConfig,
        {"tokenizer_type": "HuggingFaceTokenizer"},
        "needs --tokenizer-model",
        {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "m", "vocab_size": None},
    ),
    (
        TokenizerConfig,
        {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"},
        "needs --vocab-file and --merge-file",
        {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": "v",
            "merge_file": "m",
            "vocab_size": None,
        },
    ),
    (
        TokenizerConfig,
        {"vocab_file": "v"},
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file",
        {"vocab_file": "v", "merge_file": "m"},
    ),
    (
        CheckpointConfig,
        {"save": "d", "save_interval": 0},
        "--save-interval must be at least 1",
        {"save": "d", "save_interval": 1},
    ),
    (CheckpointConfig, {"save_keep_last": 5}, "--save-keep-last 5 needs --save DIR", {"save": "d"}),
    *[
        (
            CheckpointConfig,
            {field: True},
            f"--{field.replace('_', '-')} needs --load DIR",
            {field: True, "load": "d"},
        )
        for field in ("allow_fresh_start", "no_load_fallback", "allow_changed_data")
    ],
    (LoggingConfig, {"log_interval": 0}, "--log-interval must be at least 1", {"log_interval": 1}),
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
