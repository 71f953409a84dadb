"""One flag for each field of the configuration, with Megatron-LM's name, type and default."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from arguments import build_parser, parse_args, supported_flags, topics
from megatron_lite.config import megatron_flags
from megatron_lite.config.megatron_values import OTHER_WAYS
from megatron_lite.config.run_flags import flag_of, flags_of, run_fields
from tests.support.pairs import in_one_test

# Megatron-LM's own table of the flags that set a field: its spelling, its default (or ours, where
# Megatron fills it in later), a value that is not the default; then the flags that it needs, and
# the fields that change with it.
MEGATRON: tuple[tuple[Any, ...], ...] = (
    ("--num-layers", None, 3),
    ("--hidden-size", None, 24),
    ("--num-attention-heads", None, 2),
    ("--max-position-embeddings", None, 16),
    ("--ffn-hidden-size", None, 48),
    ("--kv-channels", None, 6),
    ("--group-query-attention", False, True),
    ("--num-query-groups", 1, 2, "--group-query-attention"),
    ("--position-embedding-type", "learned_absolute", "rope"),
    ("--rotary-base", 10000, 500000),
    ("--rotary-percent", 1.0, 0.5),
    ("--use-rope-scaling", False, True),
    ("--rope-scaling-factor", 8.0, 4.0),
    ("--rotary-seq-len-interpolation-factor", None, 2),
    ("--no-rope-freq", None, 2, "--position-embedding-type rope"),
    ("--window-size", None, (3, 0)),
    ("--window-attn-skip-freq", None, 2, "--window-size 3,0"),
    ("--normalization", "LayerNorm", "RMSNorm"),
    ("--norm-epsilon", 1e-05, 1e-06),
    ("--apply-layernorm-1p", False, True),
    ("--qk-layernorm", False, True),
    ("--swiglu", False, True),
    ("--squared-relu", False, True),
    ("--no-bias-gelu-fusion", True, False),
    ("--disable-bias-linear", True, False),
    ("--add-qkv-bias", False, True),
    ("--untie-embeddings-and-output-weights", False, True),
    ("--attention-backend", "auto", "unfused"),
    ("--attention-softmax-in-fp32", False, True),
    ("--fp32-residual-connection", False, True),
    ("--hidden-dropout", 0.1, 0.0),
    ("--attention-dropout", 0.1, 0.25),
    ("--init-method-std", 0.02, 0.006),
    ("--tensor-model-parallel-size", 1, 2),
    ("--sequence-parallel", False, True, "--tensor-model-parallel-size 2"),
    ("--pipeline-model-parallel-size", 1, 2),
    ("--num-layers-per-virtual-pipeline-stage", None, 1, "--pipeline-model-parallel-size 2"),
    (
        "--num-virtual-stages-per-pipeline-rank",
        None,
        2,
        "--pipeline-model-parallel-size 2 --num-layers 4",
    ),
    ("--decoder-first-pipeline-num-layers", None, 1, "--pipeline-model-parallel-size 2"),
    ("--decoder-last-pipeline-num-layers", None, 1, "--pipeline-model-parallel-size 2"),
    ("--no-overlap-p2p-communication", True, False),
    ("--context-parallel-size", 1, 2, "--attention-dropout 0"),
    ("--cp-comm-type", "p2p", "allgather", "--context-parallel-size 2 --attention-dropout 0"),
    ("--distributed-backend", "auto", "gloo"),
    ("--distributed-timeout-minutes", 10, 3),
    ("--distributed-timeout-seconds-after-init", None, 30),
    ("--overlap-grad-reduce", False, True),
    ("--ddp-bucket-size", None, 7),
    ("--grad-reduce-in-bf16", False, True, "--bf16"),
    ("--use-distributed-optimizer", False, True),
    ("--overlap-param-gather", False, True, "--use-distributed-optimizer --overlap-grad-reduce"),
    ("--use-torch-fsdp2", False, True),
    ("--torch-fsdp2-no-reshard-after-forward", True, False, "--use-torch-fsdp2"),
    ("--recompute-activations", False, True, "", "recompute_granularity recompute_modules"),
    ("--recompute-granularity", None, "selective", "", "recompute_modules"),
    (
        "--recompute-method",
        None,
        "block",
        "--recompute-granularity full --recompute-method uniform",
    ),
    ("--recompute-num-layers", None, 3, "--recompute-granularity full --recompute-method block"),
    (
        "--distribute-saved-activations",
        False,
        True,
        "--recompute-granularity full --recompute-method uniform --tensor-model-parallel-size 2",
    ),
    ("--recompute-modules", (), ("mlp",), "--recompute-granularity selective"),
    ("--micro-batch-size", None, 3),
    ("--global-batch-size", None, 8),
    ("--rampup-batch-size", (), (2, 2, 16), "--global-batch-size 8"),
    ("--cpu-offloading-num-layers", 0, 1),
    ("--fine-grained-activation-offloading", False, True, "--offload-modules core_attn"),
    ("--offload-modules", (), ("qkv_linear",)),
    ("--step-batch-size-schedule", None, "0:2,4K:8", "", "global_batch_size"),
    ("--train-iters", None, 7),
    ("--train-samples", None, 56, "--global-batch-size 8"),
    ("--seed", 1234, 7),
    ("--bf16", False, True),
    ("--fp16", False, True),
    ("--no-gradient-accumulation-fusion", True, False),
    ("--eval-interval", None, 5),
    ("--eval-iters", 100, 4),
    ("--exit-interval", None, 6),
    ("--exit-duration-in-mins", None, 9),
    ("--exit-signal-handler", False, True),
    ("--exit-signal", "SIGTERM", "SIGUSR1", "--exit-signal-handler"),
    ("--no-check-for-nan-in-loss-and-grad", True, False),
    ("--check-weight-hash-across-dp-replicas-interval", None, 10),
    ("--deterministic-mode", False, True),
    ("--optimizer", "adam", "muon"),
    ("--muon-momentum", 0.9, 0.95, "--optimizer muon"),
    ("--muon-nesterov", False, True, "--optimizer muon"),
    ("--muon-num-ns-steps", 5, 8, "--optimizer muon"),
    ("--muon-scale-mode", "spectral", "unit_rms_norm", "--optimizer muon"),
    ("--muon-extra-scale-factor", 1.0, 0.2, "--optimizer muon"),
    ("--muon-coefficient-type", "quintic", "polar_express", "--optimizer muon"),
    ("--muon-no-split-qkv", True, False, "--optimizer muon"),
    ("--muon-tp-mode", "duplicated", "blockwise", "--optimizer muon"),
    ("--muon-fp32-matmul-prec", "medium", "high", "--optimizer muon"),
    ("--adam-beta1", 0.9, 0.8),
    ("--adam-beta2", 0.999, 0.95),
    ("--adam-eps", 1e-08, 1e-06),
    ("--weight-decay", 0.01, 0.1),
    ("--clip-grad", 1.0, 0.5),
    ("--loss-scale", None, 8.0, "--fp16"),
    ("--initial-loss-scale", 4294967296.0, 65536.0, "--fp16"),
    ("--min-loss-scale", 1.0, 2.0, "--fp16"),
    ("--loss-scale-window", 1000.0, 100.0, "--fp16"),
    ("--hysteresis", 2, 3, "--fp16"),
    ("--lr", None, 0.0003),
    ("--min-lr", 0.0, 1e-05, "--lr 1e-3"),
    ("--lr-decay-style", "linear", "cosine"),
    ("--lr-decay-iters", None, 9),
    ("--lr-decay-samples", None, 90, "--train-samples 64 --global-batch-size 8"),
    ("--lr-warmup-iters", 0, 2),
    ("--lr-warmup-samples", 0, 20, "--train-samples 64 --global-batch-size 8"),
    ("--lr-warmup-fraction", None, 0.01),
    ("--lr-warmup-init", 0.0, 1e-06, "--lr 1e-3"),
    ("--lr-wsd-decay-style", "exponential", "minus_sqrt"),
    ("--lr-wsd-decay-iters", None, 3, "--lr-decay-style WSD --lr-wsd-decay-iters 2"),
    (
        "--lr-wsd-decay-samples",
        None,
        30,
        "--lr-decay-style WSD --lr-wsd-decay-samples 20 --train-samples 64 --global-batch-size 8",
    ),
    ("--decoupled-lr", None, 0.01),
    ("--decoupled-min-lr", None, 0.001),
    ("--use-checkpoint-opt_param-scheduler", False, True),
    ("--use-checkpoint-opt-param-scheduler", False, True),
    ("--override-opt_param-scheduler", False, True),
    ("--override-opt-param-scheduler", False, True),
    ("--seq-length", None, 4),
    ("--data-path", (), ("a", "b")),
    ("--mock-data", False, True),
    ("--split", "969, 30, 1", "98,2,0"),
    ("--data-cache-path", None, "cache"),
    ("--eod-mask-loss", False, True),
    ("--reset-position-ids", False, True),
    ("--reset-attention-mask", False, True),
    ("--calculate-per-token-loss", False, True),
    ("--data-args-path", None, "words.txt"),
    ("--train-data-path", (), ("a", "b")),
    ("--valid-data-path", (), ("a", "b"), "--train-data-path a"),
    ("--test-data-path", (), ("a", "b"), "--train-data-path a"),
    ("--per-split-data-args-path", None, "splits.json"),
    ("--dataloader-type", "single", "cyclic"),
    ("--no-data-sharding", True, False, "--dataloader-type cyclic"),
    (
        "--tokenizer-type",
        None,
        "GPT2BPETokenizer",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t --vocab-file v --merge-file m",
        "tokenizer_model vocab_file merge_file",
    ),
    (
        "--tokenizer-model",
        None,
        "tokenizer.json",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model t",
    ),
    ("--vocab-file", None, "v.json", "--vocab-file a --merge-file m"),
    ("--merge-file", None, "m.txt", "--vocab-file v --merge-file a"),
    ("--vocab-size", None, 77),
    ("--tiktoken-pattern", None, "v1"),
    ("--tiktoken-num-special-tokens", 1000, 10),
    (
        "--tokenizer-special-tokens",
        (),
        ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>", "<x>"),
        "--tokenizer-type TikTokenizer --tokenizer-model t.json",
    ),
    ("--make-vocab-size-divisible-by", 128, 64),
    ("--save", None, "out"),
    ("--save-interval", None, 5, "--save out"),
    ("--persistent-save-interval", None, 5, "--save out"),
    ("--save-retain-interval", None, 5, "--save out"),
    ("--async-save", False, True, "--save out"),
    ("--load", None, "in"),
    ("--finetune", False, True, "--load in"),
    ("--no-load-optim", False, True, "--load in"),
    ("--no-load-rng", False, True, "--load in"),
    ("--log-interval", 100, 1),
    ("--tensorboard-dir", None, "tb"),
    ("--log-throughput", False, True),
    ("--log-params-norm", False, True),
    ("--log-num-zeros-in-grad", False, True),
    ("--log-validation-ppl-to-tensorboard", False, True),
    ("--log-timers-to-tensorboard", False, True),
    ("--log-memory-to-tensorboard", False, True),
    ("--log-world-size-to-tensorboard", False, True),
    ("--no-log-loss-scale-to-tensorboard", True, False),
    ("--disable-log-loss-scale-to-tensorboard", True, False),
    ("--tensorboard-log-interval", 1, 5),
    ("--wandb-project", None, "project", "--save out"),
    ("--wandb-exp-name", None, "name"),
    ("--wandb-save-dir", None, "w"),
    ("--wandb-entity", None, "me"),
    ("--timing-log-level", 0, 2),
    ("--timing-log-option", "minmax", "all"),
    ("--profile", False, True),
    ("--profile-step-start", 10, 3),
    ("--profile-step-end", 12, 13),
    ("--profile-ranks", (), (0, 3)),
    ("--use-pytorch-profiler", False, True),
    ("--pytorch-profiler-collect-shapes", False, True),
    ("--pytorch-profiler-collect-callstack", False, True),
    ("--record-shapes", False, True),
    ("--nvtx-ranges", False, True),
    ("--record-memory-history", False, True),
    ("--memory-snapshot-path", "snapshot.pickle", "s.pickle"),
    ("--log-straggler", False, True),
    ("--straggler-minmax-count", 1, 2),
)
OURS: tuple[tuple[Any, ...], ...] = (
    ("--allow-fresh-start", False, True, "--load in"),
    ("--save-keep-last", None, 3, "--save out"),
    ("--no-load-fallback", False, True, "--load in"),
    ("--allow-changed-data", False, True, "--load in"),
    ("--log-style", "short", "megatron"),
    ("--log-file", None, "run.log"),
    ("--metrics-jsonl", None, "m.jsonl"),
    ("--peak-tflops-per-gpu", None, 312.5),
    ("--memory-timeline", None, "timeline.json"),
    ("--recompute-policy", None, "*:full"),
    ("--contiguous-saved-activations", False, True, "--recompute-policy *:full"),
    ("--torch-compile", False, True),
    ("--activation-memory-budget", None, 0.5, "--torch-compile"),
    ("--no-recompute-tail-skip", True, False),
    ("--recompute-verify", False, True),
    ("--loss-chunk-size", None, 256),
    ("--memory-limit", None, "4GiB"),
    ("--allow-predicted-out-of-memory", False, True),
    ("--memory-budget", None, "4GiB", "--recompute-policy auto"),
    ("--machine", None, "h100-80gb"),
    ("--log-peak-memory", False, True),
    ("--norm-impl", "torch", "apex"),
    ("--parallel-residual", False, True),
    ("--norm-position", "before", "after"),
    ("--qk-layernorm-scope", "head", "all-heads", "--qk-layernorm --normalization RMSNorm"),
    ("--optimizer-impl", "torch", "apex"),
    (
        "--num-microbatches-with-partial-activation-checkpoints",
        None,
        1,
        "--pipeline-model-parallel-size 2 --recompute-policy *:full",
    ),
    ("--fsdp-memory-efficient-wrapping", False, True, "--use-torch-fsdp2"),
    ("--max-skipped-updates", None, 3),
    ("--skip-update-on-spike", None, 2.5),
    ("--straggler-ratio", 1.2, 1.5),
)
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
BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 "
    "--seq-length 8 --micro-batch-size 2 --vocab-size 99 --ffn-hidden-size 64 --kv-channels 4"
)


def actions() -> dict[str, Any]:
    """Every supported flag with its argparse action."""
    parser = build_parser()
    return {name: parser._option_string_actions[name] for name in supported_flags(parser)}


def parsed_fields(words: str) -> dict[str, Any]:
    config = parse_args(f"{BASE} {words}".split()).config
    assert parse_args(flags_of(config)).config == config, "the way back is exact"
    return {
        field: value
        for topic in dataclasses.asdict(config).values()
        for field, value in topic.items()
    }


def test_each_field_has_one_flag_and_each_flag_one_field() -> None:
    names = [field.name for kind in topics().values() for field in dataclasses.fields(kind)]
    assert len(names) == len(set(names)) and set(names) == run_fields().keys()
    others = {name for ways in OTHER_WAYS.values() for name in ways}
    set_by = {
        id(action): action.dest for name, action in actions().items() if name not in WITHOUT_FIELD
    }
    assert sorted(set_by.values()) == sorted([*names, *others])
    assert all(actions()[flag_of(name)].dest == name for name in names)
    tabled = [row[0] for row in (*MEGATRON, *OURS)]
    without_row = {flag for flag, action in actions().items() if action.dest in others}
    assert sorted(tabled) == sorted(actions().keys() - without_row - WITHOUT_FIELD)


@in_one_test("row", [*MEGATRON, *OURS])
def test_a_flag_changes_its_field_from_megatrons_default_and_nothing_else(
    row: tuple[Any, ...],
) -> None:
    flag, default, value, needs, also = (*row, "", "")[:5]
    field = actions()[flag].dest
    one = run_fields()[field]
    if one.is_required:
        assert default is None, "Megatron's None is an error there as well"
    else:
        assert one.default == default and type(one.default) is type(default)
    words = [] if isinstance(value, bool) else value if isinstance(value, tuple) else [value]
    if flag == "--window-size":
        words = ["3,0"]
    before = parsed_fields(needs)
    after = parsed_fields(f"{needs} {flag} {' '.join(map(str, words))}")
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {field, *also.split()}
    assert after[field] == value and type(after[field]) is type(value)


def test_a_flag_belongs_to_one_class_only() -> None:
    supported, refused = supported_flags(build_parser()), megatron_flags.REFUSED
    known = [*supported, *megatron_flags.NO_EFFECT, *megatron_flags.RENAMED, *refused]
    assert sorted(known) == sorted(set(known))
    assert megatron_flags.ONLY_VALUE.keys() <= refused.keys(), "the reason is in the table"
    words = " ".join(megatron_flags.RENAMED.values()).split()
    assert {word for word in words if word.startswith("--")} <= {*supported}
    assert megatron_releases().keys() <= {*known}, "every flag of every release is known"
    assert {row[0] for row in MEGATRON} <= megatron_releases().keys()
    assert not {row[0] for row in OURS} & megatron_releases().keys()


def test_a_flag_without_effect_takes_as_many_values_as_in_megatron() -> None:
    parser, theirs = build_parser(), megatron_releases()
    for flag in megatron_flags.NO_EFFECT.keys() & theirs.keys():
        nargs = parser._option_string_actions[flag].nargs
        assert (1 if nargs is None else nargs) == theirs[flag], flag


def megatron_releases() -> dict[str, int | str]:
    """Every spelling of a flag in the releases v1.0 to 2026-08, with the number of its values.

    The file has the first and the last release with the flag, too.
    """
    path = Path(__file__).parent / "command_lines" / "megatron_flags.json"
    return {flag: nargs for flag, (nargs, *_) in json.loads(path.read_text()).items()}


def test_suggestions_are_supported_flags_of_the_same_meaning() -> None:
    """A spelling can be near and the meaning far: --use-mpi is not --use-mup."""
    supported, no_effect = supported_flags(build_parser()), megatron_flags.NO_EFFECT
    for other, ours in megatron_flags.DATA["other programs"].items():
        assert other not in {*supported, *no_effect, *megatron_flags.REFUSED}
        assert megatron_flags.closest_flag(other, supported) == ours
    # a tool without such a flag is not told of it
    assert megatron_flags.closest_flag("--learning-rate", ["--gpus"]) is None
    for known in (*[*megatron_flags.REFUSED][::20], *[*no_effect][::40]):
        for name in (f"{known}s", known[:-1], f"{known}-2"):
            closest = megatron_flags.closest_flag(name, supported, no_effect)
            assert closest is None or closest in {*supported, *no_effect}
    for name in ("--no-swiglu", "--adam-beta3", "--tensor-model-parallel-rank", "--no-bias"):
        assert megatron_flags.closest_flag(name, supported, no_effect) is None
