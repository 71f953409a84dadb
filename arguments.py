"""Parses the command line into one frozen RunConfig.

Flags have Megatron-LM's names, types and defaults. Each config class has one group of flags, and
each field has one flag. The config classes hold the defaults and the rules. A flag that is not
given leaves no entry in argparse's result, so that `--config-json FILE` can supply its value.
`megatron_lite/config/flags.py` holds the answers to all other flags of Megatron. The module does
not import torch, so `--dump-config` prints at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.config import alternatives, checks, flags, hf_file, megatron_values
from megatron_lite.config.all_faults import Faults, Parser
from megatron_lite.config.checkpoint_settings import CheckpointConfig
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.data_settings import (
    DATALOADER_TYPES,
    TIKTOKEN_PATTERNS,
    TOKENIZER_TYPES,
    DataConfig,
    TokenizerConfig,
)
from megatron_lite.config.dry_run import DEVICES as DRY_RUN_DEVICES
from megatron_lite.config.dry_run import DryRunConfig, take_dry_run
from megatron_lite.config.flag_help import help_on
from megatron_lite.config.host_parts import MEGATRON_PARTS
from megatron_lite.config.json_text import LARGEST_TEXT, parse_whole_number, shown
from megatron_lite.config.logging_settings import TIMING_LOG_OPTIONS, LoggingConfig
from megatron_lite.config.loss_scaling import LossScaleConfig
from megatron_lite.config.lr_schedule_settings import (
    LR_DECAY_STYLES,
    WSD_DECAY_STYLES,
    LrScheduleConfig,
)
from megatron_lite.config.megatron_values import translate_values
from megatron_lite.config.model import (
    ACTIVATIONS,
    ATTENTION_BACKENDS,
    NORM_IMPLS,
    NORM_POSITIONS,
    NORMALIZATIONS,
    POSITION_EMBEDDING_TYPES,
    QK_LAYERNORM_SCOPES,
    SWITCHED_ACTIVATIONS,
    ModelConfig,
)
from megatron_lite.config.notices import setting_notices
from megatron_lite.config.optimizer_settings import (
    MUON_COEFFICIENT_TYPES,
    MUON_MATMUL_PRECISIONS,
    MUON_SCALE_MODES,
    MUON_TP_MODES,
    OPTIMIZER_IMPLS,
    OPTIMIZERS,
    OptimizerConfig,
)
from megatron_lite.config.parallel import CP_COMM_TYPES, DISTRIBUTED_BACKENDS, ParallelConfig
from megatron_lite.config.profiling import ProfilingConfig
from megatron_lite.config.recompute import GRANULARITIES, METHODS, RecomputeConfig
from megatron_lite.config.regions import ALIAS, CORE_ATTENTION, MODULES, regions_help
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import EXIT_SIGNALS, TrainingConfig

# A file of --dump-config holds these derived values. A flag may change the values from which they
# are derived, and they must be derived again.
DERIVED_FIELDS = (("model", "kv_channels"), ("model", "ffn_hidden_size"))


@dataclass(frozen=True)
class ParsedArguments:
    """The result of parsing a command line.

    config: the configuration of the run.
    dump_config: whether to print the configuration and stop.
    explain_recompute: whether to print the effect of recomputation and stop.
    dry_run: the ranks whose memory to measure without training, and stop; None: no dry run.
    notices: lines for the user about flags with no effect, or less effect than their names promise.
    local_rank: the number of this process on its node, if a launcher passes it as a flag. It is no
        part of the configuration, since each process has its own.
    """

    config: RunConfig
    dump_config: bool
    explain_recompute: bool
    dry_run: DryRunConfig | None
    notices: tuple[str, ...]
    local_rank: int | None = None


def parse_args(argv: Sequence[str]) -> ParsedArguments:
    """Parses a command line, given without the name of the program.

    Faults in the command line are printed on stderr, all of them at once, and the program exits
    with status 2.
    """
    parser = build_parser()
    argv, notices = _rename_old_spellings(argv, parser)
    _print_help_on(argv)
    read = parser.read(argv)
    unknown, meant = flags.unread_faults(read.unread, supported_flags(parser))
    faults = Faults([*read.faults, *unknown], {*read.failed, *map(_field_name, meant)})
    given = vars(read.namespace)
    dump_config = given.pop("dump_config", False)
    explain_recompute = given.pop("explain_recompute", False)
    config_json, local_rank = given.pop("config_json", None), given.pop("local_rank", None)
    hf_config = given.pop("hf_config", None)
    printing = {
        "--dump-config": dump_config,
        "--explain-recompute": explain_recompute,
        "--dry-run-memory": "dry_run_memory" in given,
    }
    first, *others = [name for name, is_given in printing.items() if is_given] or [""]
    if others:
        faults.texts.append(
            f"{first} and {others[0]} each print something else and stop: leave one of them out"
        )
    dry_run = None
    with faults.of():
        dry_run = take_dry_run(given)
    notices += _without_effect(given, faults)
    has_file = config_json is not None or hf_config is not None
    notices += translate_values(given, faults, has_file=has_file)
    config = _build_config(given, config_json, notices, faults, hf_config)
    if faults.texts or config is None:
        parser.stop(faults.texts)
    # A flag that turns its field off stores False. The notices ask only for fields that are set.
    notices += setting_notices(
        config, [name for name, value in given.items() if value is not False]
    )
    return ParsedArguments(
        config, dump_config, explain_recompute, dry_run, tuple(notices), local_rank
    )


def topics() -> dict[str, type]:
    """Returns the config class of each topic, such as ModelConfig for "model".

    The topics have the order of RunConfig's fields.
    """
    hints = typing.get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}


def supported_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Returns all flags that set a field or ask for help, with their aliases."""
    return [
        name
        for action in parser._actions
        if not action.dest.startswith("--")
        for name in action.option_strings
    ]


class _Group:
    """The flags of one config class.

    A flag stores nothing unless it is given. Its help shows the default of the class's field.
    """

    def __init__(self, parser: argparse.ArgumentParser, title: str, config_class: type) -> None:
        self._group = parser.add_argument_group(title)
        self._fields = {field.name: field for field in dataclasses.fields(config_class)}

    def value(
        self,
        flag: str,
        kind: type,
        text: str,
        *,
        alias: str | None = None,
        values: Sequence[str] = (),
        nargs: str | int | None = None,
    ) -> None:
        """Adds a flag with a value, or with several (nargs).

        values: the choices for the help. The config class checks them.
        """
        field = _field_name(flag)
        metavar = (
            "{" + ",".join(values) + "}" if values else {int: "N", float: "X", str: "TEXT"}[kind]
        )
        names = [flag] if alias is None else [flag, alias]
        self._group.add_argument(
            *names,
            dest=field,
            type=kind,
            nargs=nargs,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=text + self._default(field),
        )

    def switch(self, flag: str, text: str, *, alias: str | None = None) -> None:
        """Adds a flag without a value that turns its field on.

        `translate_values` replaces the few switches that have no field.
        """
        names = [flag] if alias is None else [flag, alias]
        self._group.add_argument(
            *names,
            dest=_field_name(flag),
            action="store_true",
            default=argparse.SUPPRESS,
            help=text,
        )

    def off_switch(self, flag: str, field: str, text: str, *, alias: str | None = None) -> None:
        """Adds a flag without a value that turns `field` off."""
        assert self._fields[field].default is True, field
        names = [flag] if alias is None else [flag, alias]
        self._group.add_argument(
            *names, dest=field, action="store_false", default=argparse.SUPPRESS, help=text
        )

    def _default(self, field: str) -> str:
        if field not in self._fields:  # `translate_values` replaces it
            return ""
        default = self._fields[field].default
        if default is dataclasses.MISSING:
            return " (required)"
        return "" if default is None or default == () else f" (default: {default})"


def build_parser() -> Parser:
    """Returns the parser of the whole command line.

    Abbreviated flags are refused: a new flag must not change the meaning of an old command.
    """
    parser = Parser(
        prog="pretrain_gpt.py",
        description="Trains a GPT. Flags have Megatron-LM's names and meaning. --help refused and "
        "--help ignored list the other flags of Megatron, by the reason.",
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.register("type", int, _whole_number)
    parser.add_argument("--dump-config", action="store_true", help="print the run as JSON and stop")
    parser.add_argument(
        "--explain-recompute",
        action="store_true",
        help="print, layer by layer, what is kept for "
        "backward, rebuilt and sent, and what other recompute flags would do, and stop",
    )
    _add_dry_run_arguments(parser)
    parser.add_argument(
        "--config-json",
        metavar="FILE",
        help="take the run from what --dump-config printed; flags override it, "
        "and alternatives of a flag that is given",
    )
    parser.add_argument(
        "--hf-config",
        metavar="FILE",
        help="take the model's shape and vocabulary from a config.json of Hugging Face, or its "
        "folder; flags override it. The weights are random: megatron_lite.tools.convert brings "
        "trained ones",
    )
    parser.add_argument(
        "--local-rank",
        "--local_rank",
        type=int,
        metavar="N",
        help="number of this process on its node, as "
        "DeepSpeed's launcher and old ones of torch pass it; LOCAL_RANK of the environment "
        "must be the same",
    )
    _add_model_arguments(parser)
    _add_parallel_arguments(parser)
    _add_data_parallel_arguments(parser)
    _add_recompute_arguments(parser)
    _add_training_arguments(parser)
    _add_optimizer_arguments(parser)
    _add_loss_scaling_arguments(parser)
    _add_lr_schedule_arguments(parser)
    _add_data_arguments(parser)
    _add_tokenizer_arguments(parser)
    _add_checkpoint_arguments(parser)
    _add_logging_arguments(parser)
    _add_profiling_arguments(parser)
    _add_arguments_without_effect(parser)
    return parser


def _add_dry_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run-memory",
        action="store_true",
        help="run one step of some ranks without their machines, on tensors without values; print "
        "the memory that each rank needs, and stop",
    )
    parser.add_argument(
        "--dry-run-ranks",
        metavar="RANK,..",
        help="global ranks of --dry-run-memory (default: one of each kind of pipeline rank)",
    )
    parser.add_argument(
        "--dry-run-world-size",
        type=int,
        metavar="N",
        help="number of ranks of the run of --dry-run-memory (default: those that the launcher "
        "started, or those of one model)",
    )
    parser.add_argument(
        "--dry-run-device",
        metavar="{" + ",".join(DRY_RUN_DEVICES) + "}",
        help="device of the run of --dry-run-memory (default: the one that the run would use); "
        "cuda cannot be simulated yet, and the report says so",
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "model", ModelConfig)
    group.value("--num-layers", int, "transformer layers")
    group.value("--hidden-size", int, "channels of the residual stream")
    group.value("--num-attention-heads", int, "attention heads")
    group.value("--max-position-embeddings", int, "longest sequence that the model can read")
    group.value(
        "--ffn-hidden-size",
        int,
        "channels inside the MLP; derived: 4 x hidden, or 8/3 x hidden with --swiglu",
    )
    group.value("--kv-channels", int, "channels of one head; derived: hidden / heads")
    group.switch("--group-query-attention", "share keys and values among groups of heads")
    group.value("--num-query-groups", int, "groups of --group-query-attention")
    group.value(
        "--position-embedding-type", str, "position embedding", values=POSITION_EMBEDDING_TYPES
    )
    group.switch("--use-rotary-position-embeddings", "the same as --position-embedding-type rope")
    group.switch(
        "--no-position-embedding",
        "--position-embedding-type none, unless rope is chosen: then nothing",
    )
    group.value("--rotary-base", int, "base of the rotary frequencies")
    group.value("--rotary-percent", float, "share of a head's channels that is rotated")
    group.switch("--use-rope-scaling", "scale the rotary frequencies by Llama 3.1's rule")
    group.value("--rope-scaling-factor", float, "factor of --use-rope-scaling")
    group.value(
        "--rotary-seq-len-interpolation-factor",
        int,
        "divide the positions of the rotary embedding by N, for sequences N times as long",
    )
    group.value(
        "--no-rope-freq",
        str,
        "every N-th layer does not rotate queries and keys; or a list with 1 for each layer that "
        "does not, such as ([0]*3+[1])*2",
    )
    group.switch(
        "--parallel-residual",
        "attention and the MLP read the same input, and the layer adds both to it, as in GPT-NeoX",
    )
    group.value(
        "--norm-position",
        str,
        "norms before attention and the MLP, or after each and before the residual is added, as in "
        "OLMo 2",
        values=NORM_POSITIONS,
    )
    group.value("--normalization", str, "norm of every layer", values=NORMALIZATIONS)
    group.value(
        "--norm-impl",
        str,
        "whose kernel computes the norms: torch's, or NVIDIA apex's on CUDA (docs/apex.md)",
        values=NORM_IMPLS,
    )
    group.value("--norm-epsilon", float, "added to the variance in a norm")
    group.switch(
        "--apply-layernorm-1p", "norms multiply by 1 + their weight, and the weight starts at zero"
    )
    group.switch("--qk-layernorm", "norm of queries and keys, per head")
    group.value(
        "--qk-layernorm-scope",
        str,
        "channels of each norm of --qk-layernorm: those of one head, or of all heads as in OLMo 2",
        values=QK_LAYERNORM_SCOPES,
    )
    for activation in SWITCHED_ACTIVATIONS:
        group.switch(f"--{activation.replace('_', '-')}", ACTIVATIONS[activation].help)
    group.off_switch(
        "--no-bias-gelu-fusion", "bias_gelu_fusion", "exact (erf) GELU instead of its tanh form"
    )
    group.off_switch("--disable-bias-linear", "add_bias_linear", "no bias in the linear layers")
    group.switch("--add-qkv-bias", "bias in the QKV projection, also with --disable-bias-linear")
    group.switch(
        "--untie-embeddings-and-output-weights",
        "an output matrix of its own instead of the word embeddings",
    )
    group.value(
        "--attention-backend",
        str,
        "core attention: flash is torch's SDPA, unfused builds the scores",
        values=(*ATTENTION_BACKENDS, *megatron_values.ATTENTION_BACKENDS),
    )
    group.switch("--attention-softmax-in-fp32", "softmax of unfused attention in float32")
    group.value(
        "--window-size",
        str,
        "LEFT,0: a query reads the LEFT tokens before its own, and its own; else all before",
    )
    group.value(
        "--window-attn-skip-freq",
        str,
        "every N-th layer has no window; or a list with 1 for each layer that has it, "
        "such as ([1]*3+[0])*2",
    )
    group.switch("--fp32-residual-connection", "residual stream in float32 under --bf16 and --fp16")
    group.value("--hidden-dropout", float, "dropout of embeddings and of what each layer adds")
    group.value("--attention-dropout", float, "dropout of attention probabilities")
    group.value("--init-method-std", float, "standard deviation of the initial weights")


def _add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "parallelism", ParallelConfig)
    group.value("--tensor-model-parallel-size", int, "ranks that share each layer")
    group.switch(
        "--sequence-parallel",
        "split norms and dropout over the tensor-parallel ranks, along the sequence",
    )
    group.value(
        "--pipeline-model-parallel-size", int, "ranks that share the layers, one behind the other"
    )
    group.value(
        "--num-layers-per-virtual-pipeline-stage",
        int,
        "several stages of so many layers on each pipeline rank",
    )
    group.value("--num-virtual-stages-per-pipeline-rank", int, "the same, by their number")
    group.value(
        "--decoder-first-pipeline-num-layers",
        int,
        "layers of the first pipeline rank, if not as many as of the others",
    )
    group.value("--decoder-last-pipeline-num-layers", int, "layers of the last pipeline rank")
    group.switch(
        "--account-for-embedding-in-pipeline-split",
        "one layer less on the first pipeline rank than on the others",
    )
    group.switch(
        "--account-for-loss-in-pipeline-split",
        "one layer less on the last pipeline rank than on the others",
    )
    group.off_switch(
        "--no-overlap-p2p-communication",
        "overlap_p2p_comm",
        "receive what a stage needs only when it needs it",
    )
    group.value("--context-parallel-size", int, "ranks that share each sequence")
    group.value(
        "--cp-comm-type",
        str,
        "how context-parallel ranks exchange keys and values: around a ring, or all at once",
        values=(*CP_COMM_TYPES, *megatron_values.CP_COMM_TYPES),
        nargs="+",
    )
    group.value(
        "--distributed-backend",
        str,
        "auto: nccl on CUDA, else gloo; gloo keeps the run on the CPU",
        values=DISTRIBUTED_BACKENDS,
    )
    group.off_switch(
        "--no-shared-memory-collectives",
        "shared_memory_collectives",
        "send between the CPU ranks of one host through gloo, not through memory that they share",
    )
    group.value(
        "--distributed-timeout-minutes",
        int,
        "time after which a collective gives up, and the run with it",
    )
    group.value(
        "--distributed-timeout-seconds-after-init",
        int,
        "the same from the second iteration on; it must cover the writing of a checkpoint, for "
        "which ranks wait",
    )


def _add_data_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "data parallelism", DataParallelConfig)
    group.switch(
        "--overlap-grad-reduce",
        "sum gradients over the data-parallel ranks bucket by bucket, beside backward",
    )
    group.value(
        "--ddp-bucket-size",
        int,
        "parameters of a bucket; derived: 40 million, or 1 million per data-parallel rank",
    )
    group.switch(
        "--grad-reduce-in-bf16",
        "exchange gradients in bfloat16 (each rank sums its micro-batches in float32)",
    )
    group.switch(
        "--use-distributed-optimizer",
        "optimizer states and master weights over the data-parallel ranks (ZeRO-1)",
    )
    group.switch("--overlap-param-gather", "gather the updated weights beside the next forward")
    group.switch(
        "--use-torch-fsdp2",
        "weights, gradients and optimizer states over the data-parallel ranks, layer by layer",
    )
    group.switch(
        "--use-megatron-fsdp",
        "the same as --use-torch-fsdp2 or --use-distributed-optimizer, by the sharding strategy",
    )
    group.value(
        "--data-parallel-sharding-strategy",
        str,
        "what --use-megatron-fsdp shares out (default: no_shard)",
        values=tuple(megatron_values.SHARDING_STRATEGIES),
    )
    group.off_switch(
        "--torch-fsdp2-no-reshard-after-forward",
        "torch_fsdp2_reshard_after_forward",
        "keep a layer's weights from its forward until its backward",
    )
    group.switch(
        "--fsdp-memory-efficient-wrapping",
        "gather token embedding and output projection by themselves, when needed",
    )


def _add_recompute_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "activation recomputation", RecomputeConfig)
    group.switch("--recompute-activations", "the same as --recompute-granularity selective")
    group.value(
        "--recompute-granularity",
        str,
        "rebuild whole layers in backward, or --recompute-modules of each layer",
        values=GRANULARITIES,
    )
    group.value(
        "--recompute-method",
        str,
        "full: units of --recompute-num-layers layers, or the first of them in a stage",
        values=METHODS,
    )
    group.value(
        "--recompute-num-layers",
        int,
        "uniform: layers of a unit; block: layers of each stage (1 if omitted)",
    )
    group.switch(
        "--distribute-saved-activations", "keep 1/t of a unit's input on each tensor-parallel rank"
    )
    group.value(
        "--recompute-modules",
        str,
        f"regions of selective ({CORE_ATTENTION} if omitted): {regions_help()}",
        values=(*MODULES, ALIAS),
        nargs="+",
    )
    group.value(
        "--recompute-policy",
        str,
        "what each layer rebuilds and where it keeps the rest, such as '0-3:full/2; "
        "every-2:core_attn+layernorm; *:none' (see config/policy.py), instead of the flags above; "
        "auto chooses the fastest one that fits --memory-budget",
    )
    group.value(
        "--memory-budget",
        str,
        "for --recompute-policy auto: the memory of one rank for everything that it allocates, "
        "such as 80GiB; derived on a GPU: its memory less a reserve",
    )
    group.switch(
        "--contiguous-saved-activations",
        "keep the inputs of recomputed layers in one allocation, made once",
    )
    group.value(
        "--activation-memory-budget",
        float,
        "under --torch-compile: the share of its activations, 0 to 1, that a "
        "compiled layer may keep for backward",
    )
    group.off_switch(
        "--no-recompute-tail-skip",
        "recompute_tail_skip",
        "replays also do their last matmul, whose result nothing reads",
    )
    group.value(
        "--num-microbatches-with-partial-activation-checkpoints",
        int,
        "in a pipeline: of as many micro-batches as are in flight at once, so many keep everything",
    )
    group.value(
        "--cpu-offloading-num-layers",
        int,
        "keep what so many first layers of each stage save in host memory: the policy "
        "'0-N:none@host'",
    )
    group.switch(
        "--fine-grained-activation-offloading",
        "keep what --offload-modules of every layer save in host memory: the policy "
        "'*:none@host(..)'",
    )
    group.value("--offload-modules", str, "the modules", values=MEGATRON_PARTS, nargs="+")
    group.switch(
        "--recompute-verify",
        "compare replays with their forward, and predicted with measured bytes; slow",
    )


def _add_training_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "training", TrainingConfig)
    group.value("--micro-batch-size", int, "samples of one forward pass on one rank")
    group.value(
        "--global-batch-size",
        int,
        "samples of one iteration over all ranks; derived: one micro-batch per replica",
    )
    group.value(
        "--rampup-batch-size",
        int,
        "START INCREMENT SAMPLES: a batch that grows from START to --global-batch-size by "
        "INCREMENT at a time, while SAMPLES are consumed",
        nargs=3,
    )
    group.value(
        "--step-batch-size-schedule",
        str,
        "TOKENS:SAMPLES ..: the batch size from each number of consumed tokens on, such as "
        "'0:768 250B:1536'; the last one is --global-batch-size",
    )
    group.value("--train-iters", int, "length of the run in iterations; or --train-samples")
    group.value("--train-samples", int, "length of the run in samples")
    group.value("--seed", int, "seed of initial weights, data order and dropout")
    group.switch("--bf16", "weights and activations in bfloat16, master weights in float32")
    group.switch(
        "--fp16",
        "weights and activations in float16, master weights in float32, and the loss scaled",
    )
    group.off_switch(
        "--no-gradient-accumulation-fusion",
        "gradient_accumulation_fusion",
        "do not use NVIDIA apex's kernel for weight gradients on CUDA, even where it is installed "
        "(docs/apex.md)",
    )
    group.value(
        "--memory-limit",
        str,
        "stop with advice if a rank allocates more than this, such as 4GiB, as if its device had "
        "no more",
    )
    group.value(
        "--loss-chunk-size",
        int,
        "tokens of a micro-batch that have logits at a time, which backward computes again; all of "
        "them, and kept, if not given. In bf16 the gradient of the output weight then differs by "
        "less than 2^-8 of its norm; losses and other gradients are the same bits",
    )
    group.switch(
        "--calculate-per-token-loss",
        "give each token that counts the same weight in the gradients, not each micro-batch; only "
        "--eod-mask-loss makes a difference between them",
    )
    group.value(
        "--eval-interval",
        int,
        "iterations between validations; the end of the run has one in any case",
    )
    group.value("--eval-iters", int, "global batches of one validation; 0 for none at all")
    group.value("--exit-interval", int, "save and stop when the iteration is a multiple of it")
    group.value(
        "--exit-duration-in-mins",
        int,
        "save and stop after the iteration that ends later than this",
    )
    group.switch(
        "--exit-signal-handler",
        "save and stop after the iteration or the batch of an evaluation in which any rank gets "
        "SIGTERM, SIGUSR1, SIGUSR2 or --exit-signal",
    )
    group.value(
        "--exit-signal",
        str,
        "another signal that --exit-signal-handler waits for",
        values=EXIT_SIGNALS,
    )
    group.off_switch(
        "--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad", "go on after a NaN"
    )
    group.value(
        "--max-skipped-updates",
        int,
        "stop after so many skipped updates in a row; derived: after 1 of a NaN, and "
        "after 10 of a spike",
    )
    group.value(
        "--skip-update-on-spike",
        float,
        "skip the update where the loss is above so many times its running mean",
    )
    group.value(
        "--check-weight-hash-across-dp-replicas-interval",
        int,
        "iterations between comparisons of the weights that several ranks hold alike; also before "
        "each checkpoint",
    )
    group.switch(
        "--torch-compile", "compile each layer with torch.compile (tensor-parallel size 1)"
    )
    group.switch("--deterministic-mode", "only algorithms that give the same bits every time")


def _add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "optimizer", OptimizerConfig)
    group.value(
        "--optimizer",
        str,
        "adam is AdamW; muon orthogonalizes the updates of layers' matrices, with AdamW for all "
        "other weights (docs/optimizers.md)",
        values=tuple(OPTIMIZERS),
    )
    group.value(
        "--optimizer-impl",
        str,
        "whose kernel computes AdamW: torch's, or NVIDIA apex's FusedAdam on CUDA (docs/apex.md)",
        values=OPTIMIZER_IMPLS,
    )
    group.value("--adam-beta1", float, "decay of the gradient's mean")
    group.value("--adam-beta2", float, "decay of the squared gradient's mean")
    group.value("--adam-eps", float, "added to the denominator")
    group.value("--weight-decay", float, "decoupled weight decay of matrices")
    group.value("--clip-grad", float, "largest global gradient norm; 0 for no clipping")
    group.value("--muon-momentum", float, "decay of the gradient's mean, which Muon orthogonalizes")
    group.switch(
        "--muon-nesterov", "orthogonalize the mean as it would be after the same gradient once more"
    )
    group.value("--muon-num-ns-steps", int, "Newton-Schulz iterations")
    group.value(
        "--muon-scale-mode",
        str,
        "by what the orthogonal matrix of m rows and n columns is multiplied: "
        "sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))",
        values=MUON_SCALE_MODES,
    )
    group.value(
        "--muon-extra-scale-factor",
        float,
        "a further factor; with spectral, 0.2 gives updates the size of AdamW's",
    )
    group.value(
        "--muon-coefficient-type",
        str,
        "polynomials of the Newton-Schulz iterations",
        values=MUON_COEFFICIENT_TYPES,
    )
    group.off_switch(
        "--muon-no-split-qkv",
        "muon_split_qkv",
        "orthogonalize linear_qkv as one matrix, not as three",
    )
    group.value(
        "--muon-tp-mode",
        str,
        "a matrix that is split over tensor-parallel ranks is gathered and orthogonalized on "
        "each of them, or each orthogonalizes its own block",
        values=MUON_TP_MODES,
    )
    group.value(
        "--muon-fp32-matmul-prec",
        str,
        "Newton-Schulz in bfloat16 (medium) or in float32 (high)",
        values=MUON_MATMUL_PRECISIONS,
    )


def _add_loss_scaling_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "loss scaling of --fp16", LossScaleConfig)
    group.value(
        "--loss-scale",
        float,
        "a constant loss scale; else a dynamic one: halved after an overflow, which skips "
        "its step, and doubled after a window without",
    )
    group.value("--initial-loss-scale", float, "first dynamic scale")
    group.value(
        "--min-loss-scale",
        float,
        "smallest dynamic scale: an overflow at it stops the run, unless "
        "--no-check-for-nan-in-loss-and-grad",
    )
    group.value(
        "--loss-scale-window", float, "steps without overflow after which the scale doubles"
    )
    group.value(
        "--hysteresis",
        int,
        "overflows before the scale is halved for the first time, or after it has doubled",
    )


def _add_lr_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "learning rate", LrScheduleConfig)
    group.value("--lr", float, "largest learning rate (needed to train)")
    group.value("--min-lr", float, "smallest learning rate, at the end of the decay")
    group.value("--lr-decay-style", str, "shape of the decay", values=LR_DECAY_STYLES)
    group.value("--lr-decay-iters", int, "iterations until --min-lr; derived: the whole run")
    group.value("--lr-decay-samples", int, "the same in samples, with --train-samples")
    group.value("--lr-warmup-iters", int, "iterations of linear warm-up")
    group.value("--lr-warmup-samples", int, "the same in samples, with --train-samples")
    group.value("--lr-warmup-fraction", float, "warm-up as a share of the decay's length")
    group.value("--lr-warmup-init", float, "learning rate at the start of the warm-up")
    group.value(
        "--lr-wsd-decay-style",
        str,
        "how WSD (warm-up, stable, decay) falls at its end",
        values=WSD_DECAY_STYLES,
    )
    group.value("--lr-wsd-decay-iters", int, "iterations of WSD's decay, at the end")
    group.value("--lr-wsd-decay-samples", int, "the same in samples, with --train-samples")
    group.value(
        "--decoupled-lr", float, "--lr of the word embedding and the output layer, if it differs"
    )
    group.value("--decoupled-min-lr", float, "their --min-lr; derived: --min-lr")
    group.switch(
        "--use-checkpoint-opt_param-scheduler",
        "a run that continues takes learning-rate schedule and weight decay from its checkpoint",
        alias="--use-checkpoint-opt-param-scheduler",
    )
    group.switch(
        "--override-opt_param-scheduler",
        "a run that continues takes them from the flags, which is the default, and the log does "
        "not list the differences",
        alias="--override-opt-param-scheduler",
    )


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "data", DataConfig)
    group.value("--seq-length", int, "tokens of a sample")
    group.value(
        "--data-path",
        str,
        "prefix of PREFIX.bin and PREFIX.idx; several, or weight and prefix in turn, are blended",
        nargs="*",
    )
    group.switch("--mock-data", "made-up token ids instead of a dataset")
    group.value("--split", str, "shares of the documents for training, validation and test")
    group.switch("--eod-mask-loss", "leave tokens that end a document out of the loss")
    group.switch(
        "--reset-position-ids", "let learned positions begin at 0 after the end of a document"
    )
    group.switch("--reset-attention-mask", "let no token read an earlier document")
    group.value("--data-cache-path", str, "directory of the sample and blend indices")
    group.value(
        "--data-args-path", str, "file with the words of --data-path, for lists that are too long"
    )
    for split in ("train", "valid", "test"):
        group.value(
            f"--{split}-data-path",
            str,
            f"the same as --data-path for the {split} split alone, without --split",
            nargs="*",
        )
    group.value(
        "--per-split-data-args-path",
        str,
        'JSON file {"train": [..], "valid": [..], "test": [..]} with the words of these three',
    )
    group.value(
        "--dataloader-type",
        str,
        "order of the samples: in the order of the index, or (cyclic) shuffled anew in each pass",
        values=DATALOADER_TYPES,
    )
    group.off_switch(
        "--no-data-sharding",
        "data_sharding",
        "with --dataloader-type cyclic, shuffle all samples together instead of a range for each "
        "data-parallel rank",
    )


def _add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "tokenizer", TokenizerConfig)
    group.value(
        "--tokenizer-type",
        str,
        "derived: GPT2BPETokenizer with --vocab-file and --merge-file, else NullTokenizer",
        values=TOKENIZER_TYPES,
    )
    group.value(
        "--tokenizer-model",
        str,
        "tokenizer.json or its directory, for HuggingFaceTokenizer; a SentencePiece model, for "
        "Llama2Tokenizer and the like; a JSON list of tokens, for TikTokenizer",
    )
    group.value("--vocab-file", str, "vocab.json, for GPT2BPETokenizer")
    group.value("--merge-file", str, "merges.txt, for GPT2BPETokenizer")
    group.value(
        "--tiktoken-pattern",
        str,
        "how TikTokenizer splits a text (v2 if omitted)",
        values=TIKTOKEN_PATTERNS,
    )
    group.value("--tiktoken-num-special-tokens", int, "special tokens of TikTokenizer")
    group.value(
        "--tokenizer-special-tokens",
        str,
        "names of its first special tokens, if they are not the usual ones",
        nargs="+",
    )
    group.value("--vocab-size", int, "token ids before padding; derived from the tokenizer's files")
    group.value(
        "--make-vocab-size-divisible-by",
        int,
        "each rank's rows of the embedding are padded to a multiple of it",
    )


def _add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "checkpoints", CheckpointConfig)
    group.value("--save", str, "directory to write checkpoints into")
    group.value(
        "--save-interval", int, "iterations between checkpoints", alias="--persistent-save-interval"
    )
    group.value(
        "--save-retain-interval",
        int,
        "keep the checkpoints of iterations that are multiples of it, and the last ones",
    )
    group.value(
        "--save-keep-last",
        int,
        "keep the last so many checkpoints; default: all, with --save-retain-interval 1",
    )
    group.switch(
        "--async-save", "train on while a checkpoint is written, once its tensors are copied"
    )
    group.value("--load", str, "directory to read the newest checkpoint from")
    group.switch("--allow-fresh-start", "start from scratch where --load finds no checkpoint")
    group.switch("--finetune", "take the weights only, and start at iteration 0")
    group.switch("--no-load-optim", "do not read the optimizer's state")
    group.switch("--no-load-rng", "do not read the states of the random streams")
    group.switch(
        "--no-load-fallback",
        "stop where the newest checkpoint is damaged, instead of using the one before it",
    )
    group.switch("--allow-changed-data", "go on with other data than the checkpoint's run has read")


def _add_logging_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "logging", LoggingConfig)
    group.value("--log-interval", int, "iterations between two lines")
    group.value(
        "--peak-tflops-per-gpu",
        float,
        "dense peak in TFLOP/s, for MFU and HFU; derived from the GPU's name and dtype",
    )
    group.value(
        "--metrics-jsonl", str, "file for one JSON object per iteration, with full precision"
    )
    group.value("--tensorboard-dir", str, "directory for TensorBoard")
    group.value(
        "--memory-timeline",
        str,
        "file for the memory of one micro-batch, operator by operator, as JSON; "
        "python -m megatron_lite.tools.plot_memory draws it",
    )
    group.switch(
        "--log-peak-memory",
        "measure the peak of the second step on a CPU too, beside the predicted one; takes seconds",
    )
    group.value(
        "--machine",
        str,
        "predict the time of a step for this machine: a name of tools/plan.py, or a JSON file of "
        "tools/calibrate.py; derived from the GPU's name",
    )
    group.switch("--log-throughput", "TFLOP/s per GPU in the iteration line")
    group.switch("--log-params-norm", "norm of all weights")
    group.switch("--log-num-zeros-in-grad", "number of gradient elements that are zero")
    group.switch("--log-validation-ppl-to-tensorboard", "validation perplexity in TensorBoard")
    group.switch("--log-timers-to-tensorboard", "iteration time in TensorBoard")
    group.switch("--log-memory-to-tensorboard", "memory in TensorBoard")
    group.switch("--log-world-size-to-tensorboard", "number of ranks in TensorBoard")
    group.off_switch(
        "--no-log-loss-scale-to-tensorboard",
        "log_loss_scale_to_tensorboard",
        "no loss scale in TensorBoard",
        alias="--disable-log-loss-scale-to-tensorboard",
    )
    group.value(
        "--tensorboard-log-interval", int, "iterations between two points in TensorBoard and W&B"
    )
    group.value(
        "--wandb-project",
        str,
        "project of an offline run of Weights & Biases, which gets the scalars of TensorBoard; "
        "needs the package wandb",
    )
    group.value("--wandb-exp-name", str, "its name")
    group.value("--wandb-save-dir", str, "its folder; derived: DIR/wandb of --save DIR")
    group.value("--wandb-entity", str, "its owner")
    group.value(
        "--timing-log-level",
        int,
        "1: time the parts of a step; 2: and those of each micro-batch. Both wait for the GPU",
    )
    group.value(
        "--timing-log-option",
        str,
        "times of the fastest and slowest rank, of the slowest, or of all",
        values=TIMING_LOG_OPTIONS,
    )
    group.switch(
        "--log-straggler",
        "name the slowest ranks, where they are slower than the others of their stage",
    )
    group.value("--straggler-minmax-count", int, "how many of them at most")
    group.value("--straggler-ratio", float, "how many times the median's time a slow rank takes")


def _add_profiling_arguments(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "profiling", ProfilingConfig)
    group.switch(
        "--profile", "profile some iterations, for Nsight Systems or with --use-pytorch-profiler"
    )
    group.value("--profile-step-start", int, "the iteration after which profiling begins")
    group.value("--profile-step-end", int, "the last iteration that is profiled")
    group.value("--profile-ranks", int, "global ranks to profile; all if omitted", nargs="+")
    group.switch(
        "--use-pytorch-profiler",
        "write a Chrome trace of each rank to torch_profile/ under --tensorboard-dir, else --save",
    )
    group.switch("--pytorch-profiler-collect-shapes", "shapes of tensors in the trace")
    group.switch("--pytorch-profiler-collect-callstack", "Python's stack in the trace")
    group.switch("--record-shapes", "operators with shapes for Nsight Systems")
    group.switch("--nvtx-ranges", "operators for Nsight Systems")
    group.switch(
        "--record-memory-history",
        "write CUDA's allocations to --memory-snapshot-path at each --log-interval",
    )
    group.value("--memory-snapshot-path", str, "file for them; _RANK is put before its last suffix")


def _add_arguments_without_effect(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that are accepted and ignored, and the flags that allow only one value.

    Each is stored under its own spelling with the dashes, which no field has. `_without_effect`
    finds it by this name.
    """
    for flag, ignored in flags.ignored_flags().items():
        if ignored.nargs == 0:
            parser.add_argument(flag, dest=flag, action="store_true", help=argparse.SUPPRESS)
        else:
            nargs = None if ignored.nargs == 1 else ignored.nargs
            parser.add_argument(flag, dest=flag, nargs=nargs, help=argparse.SUPPRESS)
    for flag in flags.ONLY_VALUE:
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS)


def _whole_number(text: str) -> int:
    """Returns the int of at most 64 bits that the text spells, as an argparse type."""
    try:
        return parse_whole_number(text)
    except ValueError as error:
        beyond = "beyond 64 bits" in str(error)
        raise argparse.ArgumentTypeError(
            str(error) if beyond else f"invalid int value: {shown(repr(text))}"
        ) from None


def _field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _rename_old_spellings(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """Returns `argv` with old spellings replaced, and a notice for each flag replaced.

    Underscores in the name of a flag are replaced by dashes.
    """
    renamed, notices = [], []
    known = {*parser._option_string_actions, *flags.RENAMED, *flags.refused_flags()}
    for word in (flags.dashed(word, known) for word in argv):
        name, equals, value = word.partition("=")
        if name in flags.RENAMED:
            notices.append(f"{name} is an old spelling, read as {flags.RENAMED[name]}")
            # The last word takes the value of the old flag. The words before it are complete.
            *added, name = flags.RENAMED[name].split()
            renamed += added
        renamed.append(name + equals + value)
    return renamed, notices


def _print_help_on(argv: Sequence[str]) -> None:
    """Prints the text and exits with status 0 if the words are `--help TOPIC`."""
    for word, topic in itertools.pairwise(argv):
        if word in ("-h", "--help") and (text := help_on(topic)) is not None:
            print(text)
            sys.exit(0)


def _without_effect(given: dict[str, Any], faults: Faults) -> list[str]:
    """Removes the flags without effect from `given` and returns notices about them.

    Adds a fault to `faults` for a flag that contradicts another, and for a flag that allows only
    one value and has another value.
    """
    for flag in (
        "--accumulate-allreduce-grads-in-fp32",
        "--ddp-reduce-scatter-with-fp32-accumulation",
    ):
        if flag in given and given.get("grad_reduce_in_bf16"):
            faults.texts.append(f"{flag} contradicts --grad-reduce-in-bf16: leave one of them out")
    if "--fsdp-reshard-after-forward" in given and not given.get(
        "torch_fsdp2_reshard_after_forward", True
    ):
        faults.texts.append(
            "--fsdp-reshard-after-forward contradicts --torch-fsdp2-no-reshard-after-forward: "
            "leave one of them out"
        )
    ignored = [flag for flag in flags.ignored_flags() if given.pop(flag, None) is not None]
    for flag, only in flags.ONLY_VALUE.items():
        if not flags.is_only_value(flag, value := given.pop(flag, only)):
            faults.texts.append(
                f"Megatron's {flag} {value} is not supported here, only {only}: "
                f"{flags.refusal_reason(flag)}"
            )
    return flags.ignored_notices(ignored)


def _build_config(
    given: dict[str, Any],
    config_json: str | None,
    notices: list[str],
    faults: Faults,
    hf_config: str | None = None,
) -> RunConfig | None:
    """Returns the RunConfig of the given fields, and of a file for all other fields.

    config_json, hf_config: the path of the file, or None.

    Adds notices to `notices` and faults to `faults`. Each topic adds the first rule that it breaks;
    the rules between topics are checked if no topic breaks one. Returns None if there is a fault.
    """
    values: dict[str, dict[str, Any]] = {}
    try:
        if hf_config is not None:
            if config_json is not None:
                raise ValueError("--config-json and --hf-config each describe the model: give one")
            values = _values_of_hf(hf_config, given, notices)
        elif config_json is not None:
            values = _values_of_file(config_json)
            notices += _take_out_replaced(values, given, f"--config-json {config_json}")
    except ValueError as error:
        faults.texts.append(str(error))
        return None
    built, missing = {}, []
    for topic, config_class in topics().items():
        fields = dataclasses.fields(config_class)
        names = {field.name for field in fields}
        values[topic] = values.get(topic, {}) | {
            name: value for name, value in given.items() if name in names
        }
        unset = [
            field.name
            for field in fields
            if field.default is dataclasses.MISSING and field.name not in values[topic]
        ]
        missing += [checks.flag(name) for name in unset if name not in faults.fields]
        if not unset and not names & faults.fields:
            with faults.of(*names):
                built[topic] = config_class(**values[topic])
    if missing:
        faults.texts.append(
            f"missing {', '.join(missing)}: give {'it' if len(missing) == 1 else 'them'} as "
            "flags, or a whole run with --config-json FILE"
        )
    if len(built) == len(topics()):
        with faults.of():
            return RunConfig(**built)
    return None


def _take_out_replaced(
    values: dict[str, dict[str, Any]], given: dict[str, Any], file: str
) -> list[str]:
    """Removes from the file's values those that the given fields replace.

    Returns notices about the removed values that were not the default.
    """
    replaced = alternatives.replaced_fields(
        {name: value for topic in values.values() for name, value in topic.items()}, given
    )
    defaults = {
        field.name: field.default
        for config_class in topics().values()
        for field in dataclasses.fields(config_class)
    }
    taken = {
        name: values[topic].pop(name)
        for topic in values
        for name in replaced
        if name in values[topic]
    }
    return alternatives.notices(
        {
            name: replaced[name]
            for name in replaced
            if taken.get(name, defaults[name]) != defaults[name]
        },
        file=file,
    )


def _values_of_hf(
    path: str, given: dict[str, Any], notices: list[str]
) -> dict[str, dict[str, Any]]:
    """Returns the values of a config.json of Hugging Face by topic and field.

    Adds a notice for each key that is not read, and for each flag that says otherwise.
    """
    mapped = hf_file.read_hf_file(Path(path))
    model = hf_file.exact_fields(mapped, Path(path))
    tokenizer = hf_file.tokenizer_fields(mapped, given)
    notices += [f"--hf-config {path}: {note}" for note in mapped.notes]
    notices += hf_file.override_notices({**model, **tokenizer}, given, path)
    # The vocabulary is the model's, whichever tokenizer is chosen.
    values = {"model": model}
    notices += _take_out_replaced(values, given, f"--hf-config {path}")
    return {**values, "tokenizer": tokenizer}


def _values_of_file(path: str) -> dict[str, dict[str, Any]]:
    """Returns the values of a --dump-config file by topic and field.

    A derived value becomes None if it equals the value that would be derived anyway.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(LARGEST_TEXT + 1)
        config = RunConfig.from_json(text)
    except OSError as error:
        raise ValueError(f"--config-json {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"--config-json {path}: {error}") from error
    values = dataclasses.asdict(config)
    for topic, field in DERIVED_FIELDS:
        if dataclasses.replace(getattr(config, topic), **{field: None}) == getattr(config, topic):
            values[topic][field] = None
    return values
