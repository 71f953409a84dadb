"""One flag per config field, one field per flag, with Megatron-LM's names, types and defaults."""

from __future__ import annotations

import dataclasses
import json
from argparse import Action
from pathlib import Path
from typing import Any

from arguments import build_parser, parse_args, supported_flags, topics
from megatron_lite.config import flags
from megatron_lite.config.detail_flags import DETAILS
from megatron_lite.config.ignored_flags import IGNORED_FAMILIES
from tests.support.pairs import in_one_test

ON, OFF = "store_true", "store_false"

# Megatron-LM's own table for the flags that set a field: spelling, type, default; then a value that
# is not the default.
MEGATRON: tuple[tuple[Any, ...], ...] = (
    ("--num-layers", int, None, "3"),
    ("--hidden-size", int, None, "24"),
    ("--num-attention-heads", int, None, "2"),
    ("--max-position-embeddings", int, None, "16"),
    ("--ffn-hidden-size", int, None, "48"),
    ("--kv-channels", int, None, "6"),
    ("--group-query-attention", ON, False),
    ("--num-query-groups", int, 1, "2"),
    ("--position-embedding-type", str, "learned_absolute", "rope"),
    ("--rotary-base", int, 10000, "500000"),
    ("--rotary-percent", float, 1.0, "0.5"),
    ("--use-rope-scaling", ON, False),
    ("--rope-scaling-factor", float, 8.0, "4.0"),
    ("--rotary-seq-len-interpolation-factor", int, None, "2"),
    # Megatron's types of these three turn a text into numbers; here the parser stores text
    ("--no-rope-freq", str, None, "2"),
    ("--window-size", str, None, "3,0"),
    ("--window-attn-skip-freq", str, None, "2"),
    ("--normalization", str, "LayerNorm", "RMSNorm"),
    ("--norm-epsilon", float, 1e-05, "1e-6"),
    ("--apply-layernorm-1p", ON, False),
    ("--qk-layernorm", ON, False),
    ("--swiglu", ON, False),
    ("--squared-relu", ON, False),
    ("--no-bias-gelu-fusion", OFF, True),
    ("--disable-bias-linear", OFF, True),
    ("--add-qkv-bias", ON, False),
    ("--untie-embeddings-and-output-weights", ON, False),
    ("--attention-backend", str, "auto", "unfused"),
    ("--attention-softmax-in-fp32", ON, False),
    ("--fp32-residual-connection", ON, False),
    ("--hidden-dropout", float, 0.1, "0.0"),
    ("--attention-dropout", float, 0.1, "0.25"),
    ("--init-method-std", float, 0.02, "0.006"),
    ("--tensor-model-parallel-size", int, 1, "2"),
    ("--sequence-parallel", ON, False),
    ("--pipeline-model-parallel-size", int, 1, "2"),
    ("--num-layers-per-virtual-pipeline-stage", int, None, "1"),
    ("--num-virtual-stages-per-pipeline-rank", int, None, "2"),
    ("--decoder-first-pipeline-num-layers", int, None, "1"),
    ("--decoder-last-pipeline-num-layers", int, None, "1"),
    ("--no-overlap-p2p-communication", OFF, True),
    ("--context-parallel-size", int, 1, "2"),
    ("--cp-comm-type", str, ["p2p"], "allgather"),
    ("--distributed-backend", str, "nccl", "gloo"),
    ("--distributed-timeout-minutes", int, 10, "3"),
    ("--distributed-timeout-seconds-after-init", int, None, "30"),
    ("--overlap-grad-reduce", ON, False),
    ("--ddp-bucket-size", int, None, "7"),
    ("--grad-reduce-in-bf16", ON, False),
    ("--use-distributed-optimizer", ON, False),
    ("--overlap-param-gather", ON, False),
    ("--use-torch-fsdp2", ON, False),
    ("--torch-fsdp2-no-reshard-after-forward", OFF, True),
    ("--recompute-activations", ON, False),
    ("--recompute-granularity", str, None, "selective"),
    ("--recompute-method", str, None, "block"),
    ("--recompute-num-layers", int, None, "3"),
    ("--distribute-saved-activations", ON, False),
    ("--recompute-modules", str, None, "mlp"),
    ("--micro-batch-size", int, None, "3"),
    ("--global-batch-size", int, None, "8"),
    ("--rampup-batch-size", int, None, "2 2 16"),
    ("--cpu-offloading-num-layers", int, 0, "1"),
    ("--fine-grained-activation-offloading", ON, False),
    ("--offload-modules", str, None, "qkv_linear"),
    ("--step-batch-size-schedule", str, None, "0:2,4K:8"),
    ("--train-iters", int, None, "7"),
    ("--train-samples", int, None, "56"),
    ("--seed", int, 1234, "7"),
    ("--bf16", ON, False),
    ("--fp16", ON, False),
    ("--no-gradient-accumulation-fusion", OFF, True),
    ("--eval-interval", int, None, "5"),
    ("--eval-iters", int, 100, "4"),
    ("--exit-interval", int, None, "6"),
    ("--exit-duration-in-mins", int, None, "9"),
    ("--exit-signal-handler", ON, False),
    ("--exit-signal", str, "SIGTERM", "SIGUSR1"),
    ("--no-check-for-nan-in-loss-and-grad", OFF, True),
    ("--check-weight-hash-across-dp-replicas-interval", int, None, "10"),
    ("--deterministic-mode", ON, False),
    ("--optimizer", str, "adam", "muon"),
    ("--muon-momentum", float, 0.9, "0.95"),
    ("--muon-nesterov", ON, False),
    ("--muon-num-ns-steps", int, 5, "8"),
    ("--muon-scale-mode", str, "spectral", "unit_rms_norm"),
    ("--muon-extra-scale-factor", float, 1.0, "0.2"),
    ("--muon-coefficient-type", str, "quintic", "polar_express"),
    ("--muon-no-split-qkv", OFF, True),
    ("--muon-tp-mode", str, "duplicated", "blockwise"),
    ("--muon-fp32-matmul-prec", str, "medium", "high"),
    ("--adam-beta1", float, 0.9, "0.8"),
    ("--adam-beta2", float, 0.999, "0.95"),
    ("--adam-eps", float, 1e-08, "1e-6"),
    ("--weight-decay", float, 0.01, "0.1"),
    ("--clip-grad", float, 1.0, "0.5"),
    ("--loss-scale", float, None, "8"),
    ("--initial-loss-scale", float, 2.0**32, "65536"),
    ("--min-loss-scale", float, 1.0, "2"),
    ("--loss-scale-window", float, 1000.0, "100"),
    ("--hysteresis", int, 2, "3"),
    ("--lr", float, None, "3e-4"),
    ("--min-lr", float, 0.0, "1e-5"),
    ("--lr-decay-style", str, "linear", "cosine"),
    ("--lr-decay-iters", int, None, "9"),
    ("--lr-decay-samples", int, None, "90"),
    ("--lr-warmup-iters", int, 0, "2"),
    ("--lr-warmup-samples", int, 0, "20"),
    ("--lr-warmup-fraction", float, None, "0.01"),
    ("--lr-warmup-init", float, 0.0, "1e-6"),
    ("--lr-wsd-decay-style", str, "exponential", "minus_sqrt"),
    ("--lr-wsd-decay-iters", int, None, "3"),
    ("--lr-wsd-decay-samples", int, None, "30"),
    ("--decoupled-lr", float, None, "0.01"),
    ("--decoupled-min-lr", float, None, "0.001"),
    ("--use-checkpoint-opt_param-scheduler", ON, False),
    ("--use-checkpoint-opt-param-scheduler", ON, False),
    ("--override-opt_param-scheduler", ON, False),
    ("--override-opt-param-scheduler", ON, False),
    ("--seq-length", int, None, "4"),
    ("--data-path", str, None, "a b"),
    ("--mock-data", ON, False),
    ("--split", str, None, "98,2,0"),
    ("--data-cache-path", str, None, "cache"),
    ("--eod-mask-loss", ON, False),
    ("--reset-position-ids", ON, False),
    ("--reset-attention-mask", ON, False),
    ("--calculate-per-token-loss", ON, False),
    ("--data-args-path", str, None, "words.txt"),
    ("--train-data-path", str, None, "a b"),
    ("--valid-data-path", str, None, "a b"),
    ("--test-data-path", str, None, "a b"),
    ("--per-split-data-args-path", str, None, "splits.json"),
    ("--dataloader-type", str, None, "cyclic"),
    ("--no-data-sharding", OFF, True),
    ("--tokenizer-type", str, None, "GPT2BPETokenizer"),
    ("--tokenizer-model", str, None, "tokenizer.json"),
    ("--vocab-file", str, None, "v.json"),
    ("--merge-file", str, None, "m.txt"),
    ("--vocab-size", int, None, "77"),
    ("--tiktoken-pattern", str, None, "v1"),
    ("--tiktoken-num-special-tokens", int, 1000, "10"),
    ("--tokenizer-special-tokens", str, None, "<unk> <s> </s> <mask> <pad> <cls> <sep> <x>"),
    ("--make-vocab-size-divisible-by", int, 128, "64"),
    ("--save", str, None, "out"),
    ("--save-interval", int, None, "5"),
    ("--persistent-save-interval", int, None, "5"),
    ("--save-retain-interval", int, None, "5"),
    ("--async-save", ON, False),
    ("--load", str, None, "in"),
    ("--finetune", ON, False),
    ("--no-load-optim", ON, None),
    ("--no-load-rng", ON, None),
    ("--log-interval", int, 100, "1"),
    ("--tensorboard-dir", str, None, "tb"),
    ("--log-throughput", ON, False),
    ("--log-params-norm", ON, False),
    ("--log-num-zeros-in-grad", ON, False),
    ("--log-validation-ppl-to-tensorboard", ON, False),
    ("--log-timers-to-tensorboard", ON, False),
    ("--log-memory-to-tensorboard", ON, False),
    ("--log-world-size-to-tensorboard", ON, False),
    ("--no-log-loss-scale-to-tensorboard", OFF, True),
    ("--disable-log-loss-scale-to-tensorboard", OFF, True),
    ("--tensorboard-log-interval", int, 1, "5"),
    ("--wandb-project", str, None, "project"),
    ("--wandb-exp-name", str, None, "name"),
    ("--wandb-save-dir", str, None, "w"),
    ("--wandb-entity", str, None, "me"),
    ("--timing-log-level", int, 0, "2"),
    ("--timing-log-option", str, "minmax", "all"),
    ("--profile", ON, False),
    ("--profile-step-start", int, 10, "3"),
    ("--profile-step-end", int, 12, "13"),
    ("--profile-ranks", int, None, "0 3"),
    ("--use-pytorch-profiler", ON, False),
    ("--pytorch-profiler-collect-shapes", ON, False),
    ("--pytorch-profiler-collect-callstack", ON, False),
    ("--record-shapes", ON, False),
    ("--nvtx-ranges", ON, False),
    ("--record-memory-history", ON, False),
    ("--memory-snapshot-path", str, "snapshot.pickle", "s.pickle"),
    ("--log-straggler", ON, False),
    ("--straggler-minmax-count", int, 1, "2"),
)
OURS: tuple[tuple[Any, ...], ...] = (
    ("--allow-fresh-start", ON, False),
    ("--save-keep-last", int, None, "3"),
    ("--no-load-fallback", ON, False),
    ("--allow-changed-data", ON, False),
    ("--log-style", str, "short", "megatron"),
    ("--log-file", str, None, "run.log"),
    ("--metrics-jsonl", str, None, "m.jsonl"),
    ("--peak-tflops-per-gpu", float, None, "312.5"),
    ("--memory-timeline", str, None, "timeline.json"),
    ("--recompute-policy", str, None, "*:full"),
    ("--contiguous-saved-activations", ON, False),
    ("--torch-compile", ON, False),
    ("--activation-memory-budget", float, None, "0.5"),
    ("--no-recompute-tail-skip", OFF, True),
    ("--recompute-verify", ON, False),
    ("--loss-chunk-size", int, None, "256"),
    ("--memory-limit", str, None, "4GiB"),
    ("--allow-predicted-out-of-memory", ON, False),
    ("--memory-budget", str, None, "4GiB"),
    ("--machine", str, None, "h100-80gb"),
    ("--log-peak-memory", ON, False),
    ("--norm-impl", str, "torch", "apex"),
    ("--parallel-residual", ON, False),
    ("--norm-position", str, "before", "after"),
    ("--qk-layernorm-scope", str, "head", "all-heads"),
    ("--optimizer-impl", str, "torch", "apex"),
    ("--num-microbatches-with-partial-activation-checkpoints", int, None, "1"),
    ("--fsdp-memory-efficient-wrapping", ON, False),
    ("--max-skipped-updates", int, None, "3"),
    ("--skip-update-on-spike", float, None, "2.5"),
    ("--straggler-ratio", float, 1.2, "1.5"),
)
# both set position_embedding_type
OTHER_WAYS_TO_SAY_IT = {
    *("--use-rotary-position-embeddings", "--no-position-embedding"),
    "--no-bf16",
    *("--use-megatron-fsdp", "--data-parallel-sharding-strategy"),
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
}
WITHOUT_FIELD = {
    "--help",
    "-h",
    "--dump-config",
    "--explain-recompute",
    "--dry-run-memory",
    "--dry-run-ranks",
    "--dry-run-world-size",
    "--dry-run-device",
    "--config-json",
    "--hf-config",
    "--model",
    "--preset",
    "--local-rank",
    "--local_rank",
}

# Where our default is not Megatron's, and why.
OTHER_DEFAULTS = {
    "--split": "969, 30, 1",  # Megatron's, filled in after parsing there
    "--distributed-backend": "auto",  # nccl on CUDA, gloo elsewhere
    "--data-path": (),
    "--train-data-path": (),
    "--valid-data-path": (),
    "--test-data-path": (),
    "--dataloader-type": "single",  # Megatron's, filled in after parsing there
    "--cp-comm-type": "p2p",  # there one for each layer
    "--recompute-modules": (),  # None there, and core_attn all the same
    "--profile-ranks": (),  # [] there
    "--offload-modules": (),  # [] there
    "--tokenizer-special-tokens": (),  # None there, and the usual ones all the same
    "--rampup-batch-size": (),  # None there, and a constant batch all the same
    "--no-load-optim": False,  # None there, and false all the same
    "--no-load-rng": False,
}
BASE = {
    "--num-layers": "2",
    "--hidden-size": "16",
    "--num-attention-heads": "4",
    "--max-position-embeddings": "8",
    "--seq-length": "8",
    "--micro-batch-size": "2",
    "--vocab-size": "99",
    "--ffn-hidden-size": "64",
    "--kv-channels": "4",
}
SAMPLES = "--train-samples 64 --global-batch-size 8"
# What a flag needs beside it.
CONTEXT = {
    "--qk-layernorm-scope": "--qk-layernorm --normalization RMSNorm",
    "--valid-data-path": "--train-data-path a",
    "--test-data-path": "--train-data-path a",
    "--no-data-sharding": "--dataloader-type cyclic",
    "--num-query-groups": "--group-query-attention",
    "--window-attn-skip-freq": "--window-size 3,0",
    "--no-rope-freq": "--position-embedding-type rope",
    "--sequence-parallel": "--tensor-model-parallel-size 2",
    "--num-layers-per-virtual-pipeline-stage": "--pipeline-model-parallel-size 2",
    "--num-virtual-stages-per-pipeline-rank": "--pipeline-model-parallel-size 2 --num-layers 4",
    "--decoder-first-pipeline-num-layers": "--pipeline-model-parallel-size 2",
    "--decoder-last-pipeline-num-layers": "--pipeline-model-parallel-size 2",
    "--num-microbatches-with-partial-activation-checkpoints": (
        "--pipeline-model-parallel-size 2 --recompute-policy *:full"
    ),
    "--context-parallel-size": "--attention-dropout 0",
    "--cp-comm-type": "--context-parallel-size 2 --attention-dropout 0",
    "--exit-signal": "--exit-signal-handler",
    "--train-samples": "--global-batch-size 8",
    "--rampup-batch-size": "--global-batch-size 8",
    "--wandb-project": "--save out",
    "--tokenizer-special-tokens": "--tokenizer-type TikTokenizer --tokenizer-model t.json",
    **dict.fromkeys(
        (
            "--loss-scale",
            "--initial-loss-scale",
            "--min-loss-scale",
            "--loss-scale-window",
            "--hysteresis",
        ),
        "--fp16",
    ),
    "--min-lr": "--lr 1e-3",
    "--lr-warmup-init": "--lr 1e-3",
    "--lr-decay-samples": SAMPLES,
    "--lr-warmup-samples": SAMPLES,
    "--save-interval": "--save out",
    "--persistent-save-interval": "--save out",
    "--finetune": "--load in",
    "--no-load-optim": "--load in",
    "--no-load-rng": "--load in",
    "--allow-fresh-start": "--load in",
    **dict.fromkeys(("--save-retain-interval", "--save-keep-last", "--async-save"), "--save out"),
    **dict.fromkeys(("--no-load-fallback", "--allow-changed-data"), "--load in"),
}
# Flags that are illegal without each other come together, and so do the changes.
TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "--step-batch-size-schedule": ("", {"global_batch_size": 8}),
    **dict.fromkeys(
        (
            "--muon-momentum",
            "--muon-nesterov",
            "--muon-num-ns-steps",
            "--muon-scale-mode",
            "--muon-extra-scale-factor",
            "--muon-coefficient-type",
            "--muon-no-split-qkv",
            "--muon-tp-mode",
            "--muon-fp32-matmul-prec",
        ),
        ("--optimizer muon", {"optimizer": "muon"}),
    ),
    "--lr-wsd-decay-iters": ("--lr-decay-style WSD", {"lr_decay_style": "WSD"}),
    "--lr-wsd-decay-samples": (
        f"--lr-decay-style WSD {SAMPLES}",
        {"lr_decay_style": "WSD", "train_samples": 64, "global_batch_size": 8},
    ),
    "--grad-reduce-in-bf16": ("--bf16", {"bf16": True}),
    "--overlap-param-gather": (
        "--use-distributed-optimizer --overlap-grad-reduce",
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    ),
    "--torch-fsdp2-no-reshard-after-forward": ("--use-torch-fsdp2", {"use_torch_fsdp2": True}),
    "--fsdp-memory-efficient-wrapping": ("--use-torch-fsdp2", {"use_torch_fsdp2": True}),
    "--recompute-activations": (
        "",
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    ),
    "--recompute-granularity": ("", {"recompute_modules": ("core_attn",)}),
    "--recompute-method": (
        "--recompute-granularity full",
        {"recompute_granularity": "full", "recompute_num_layers": 1},
    ),
    "--recompute-num-layers": (
        "--recompute-granularity full --recompute-method block",
        {"recompute_granularity": "full", "recompute_method": "block"},
    ),
    "--distribute-saved-activations": (
        "--recompute-granularity full --recompute-method uniform --tensor-model-parallel-size 2",
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "tensor_model_parallel_size": 2,
        },
    ),
    "--recompute-modules": (
        "--recompute-granularity selective",
        {"recompute_granularity": "selective"},
    ),
    "--contiguous-saved-activations": ("--recompute-policy *:full", {"recompute_policy": "*:full"}),
    "--activation-memory-budget": ("--torch-compile", {"torch_compile": True}),
    "--fine-grained-activation-offloading": (
        "--offload-modules core_attn",
        {"offload_modules": ("core_attn",)},
    ),
    "--memory-budget": ("--recompute-policy auto", {"recompute_policy": "auto"}),
    "--tokenizer-type": ("--vocab-file v --merge-file m", {"vocab_file": "v", "merge_file": "m"}),
    "--tokenizer-model": (
        "--tokenizer-type HuggingFaceTokenizer",
        {"tokenizer_type": "HuggingFaceTokenizer"},
    ),
    "--vocab-file": ("--merge-file m", {"merge_file": "m", "tokenizer_type": "GPT2BPETokenizer"}),
    "--merge-file": ("--vocab-file v", {"vocab_file": "v", "tokenizer_type": "GPT2BPETokenizer"}),
}


def actions() -> dict[str, Action]:
    """Every supported flag with its argparse action."""
    parser = build_parser()
    supported = set(supported_flags(parser))
    return {
        name: action
        for action in parser.actions
        for name in action.option_strings
        if name in supported
    }


def fields() -> dict[str, dataclasses.Field[Any]]:
    return {
        field.name: field
        for config_class in topics().values()
        for field in dataclasses.fields(config_class)
    }


def parsed_fields(*words: str) -> dict[str, Any]:
    parsed = parse_args([word for pair in BASE.items() for word in pair] + " ".join(words).split())
    return {
        field: value
        for topic in dataclasses.asdict(parsed.config).values()
        for field, value in topic.items()
    }


def test_no_two_topics_have_a_field_of_the_same_name() -> None:
    names = [
        field.name
        for config_class in topics().values()
        for field in dataclasses.fields(config_class)
    ]
    assert len(names) == len(set(names))


def test_each_field_has_one_flag_and_each_flag_one_field() -> None:
    flag_actions = {
        id(action): action
        for name, action in actions().items()
        if name not in OTHER_WAYS_TO_SAY_IT | WITHOUT_FIELD
    }
    assert sorted(action.dest for action in flag_actions.values()) == sorted(fields())


def test_the_tables_of_this_test_hold_every_flag_of_a_field() -> None:
    tabled = [row[0] for row in (*MEGATRON, *OURS)]
    assert sorted(tabled) == sorted(set(actions()) - OTHER_WAYS_TO_SAY_IT - WITHOUT_FIELD)


@in_one_test("row", [*MEGATRON, *OURS])
def test_a_flag_has_the_type_and_default_of_megatron(row: tuple[Any, ...]) -> None:
    flag, kind, default = row[:3]
    action = actions()[flag]
    field = fields()[action.dest]
    if kind in (ON, OFF):
        assert type(action).__name__ == {ON: "_StoreTrueAction", OFF: "_StoreFalseAction"}[kind]
    else:
        assert action.type is kind
    nargs = {
        "--data-path": "*",
        "--train-data-path": "*",
        "--valid-data-path": "*",
        "--test-data-path": "*",
        "--recompute-modules": "+",
        "--profile-ranks": "+",
        "--offload-modules": "+",
        "--tokenizer-special-tokens": "+",
        "--rampup-batch-size": 3,
        "--cp-comm-type": "+",
    }
    assert action.nargs == nargs.get(flag, 0 if kind in (ON, OFF) else None)
    if field.default is dataclasses.MISSING:
        assert flag in BASE and default is None, "Megatron's None is an error there as well"
    else:
        expected = OTHER_DEFAULTS.get(flag, default)
        assert field.default == expected and type(field.default) is type(expected)


@in_one_test("row", [*MEGATRON, *OURS])
def test_a_flag_changes_its_field_and_nothing_else(row: tuple[Any, ...]) -> None:
    flag, kind = row[:2]
    field = actions()[flag].dest
    several = {
        "--data-path": ("a", "b"),
        "--train-data-path": ("a", "b"),
        "--valid-data-path": ("a", "b"),
        "--test-data-path": ("a", "b"),
        "--recompute-modules": ("mlp",),
        "--profile-ranks": (0, 3),
        "--offload-modules": ("qkv_linear",),
        "--tokenizer-special-tokens": (
            *("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", "<x>"),
        ),
        "--rampup-batch-size": (2, 2, 16),
        "--window-size": (3, 0),
        "--window-attn-skip-freq": 2,
        "--no-rope-freq": 2,
    }
    value: Any = (
        several[flag]
        if flag in several
        else {ON: True, OFF: False}[kind]
        if kind in (ON, OFF)
        else kind(row[3])
    )
    together, changes = TOGETHER.get(flag, ("", {}))
    before = parsed_fields(CONTEXT.get(flag, ""))
    after = parsed_fields(CONTEXT.get(flag, ""), together, flag, *row[3:])
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        **changes,
        field: value,
    }


def test_a_flag_belongs_to_one_class_only() -> None:
    ignored = [
        f"--{name.partition('=')[0]}"
        for _, names in (*IGNORED_FAMILIES, *DETAILS)
        for name in names.split()
    ] + [entry.partition(" ")[0] for entry in flags.WITHOUT_EFFECT]
    known = [*supported_flags(build_parser()), *ignored, *flags.RENAMED, *flags.refused_flags()]
    assert sorted(known) == sorted(set(known))
    assert set(flags.ONLY_VALUE) <= set(flags.refused_flags()), (
        "the reason for the other values is in the table"
    )
    new = {
        word
        for spelling in flags.RENAMED.values()
        for word in spelling.split()
        if word.startswith("--")
    }
    assert new <= set(supported_flags(build_parser()))


def test_every_flag_of_every_release_of_megatron_is_known() -> None:
    known = {
        *supported_flags(build_parser()),
        *flags.ignored_flags(),
        *flags.RENAMED,
        *flags.refused_flags(),
    }
    assert megatron_flags().keys() - known == set()
    assert {row[0] for row in MEGATRON} <= megatron_flags().keys()
    assert not {row[0] for row in OURS} & megatron_flags().keys()


def test_a_flag_without_effect_takes_as_many_values_as_in_megatron() -> None:
    ours = {flag: ignored.nargs for flag, ignored in flags.ignored_flags().items()}
    theirs = megatron_flags()
    assert {flag: nargs for flag, nargs in ours.items() if flag in theirs} == {
        flag: theirs[flag] for flag in ours if flag in theirs
    }


def megatron_flags() -> dict[str, int | str]:
    """Every spelling of a flag in the releases v1.0 to 2026-08, with the number of its values.

    The file has the first and the last release with the flag, too.
    """
    path = Path(__file__).parent / "command_lines" / "megatron_flags.json"
    return {flag: nargs for flag, (nargs, *_) in json.loads(path.read_text()).items()}


def test_the_flags_of_other_programs_are_answered_with_flags_of_this_one() -> None:
    supported = supported_flags(build_parser())
    known = {*flags.ignored_flags(), *flags.refused_flags(), *supported}
    assert set(flags.OTHER_NAMES.values()) <= set(supported)
    assert set(flags.OTHER_NAMES).isdisjoint(known)
    assert flags.closest_flag("--learning-rate", supported) == "--lr"
    # a tool without such a flag is not told of it
    assert flags.closest_flag("--learning-rate", ["--gpus"]) != "--lr"
