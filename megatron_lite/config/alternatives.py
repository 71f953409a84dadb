"""The values of a --config-json file that a flag replaces besides its own.

An example is `--config-json run.json --recompute-policy '*:full'`. Some settings exclude each
other: a run may have only one of them. If the command line gives one, it replaces the file's values
of the settings that this one excludes. It also replaces the values that belong to those settings
alone. All other values of the file stay. Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_lite.config.checks import flag
from megatron_lite.config.data_settings import PER_SPLIT_PATHS, TokenizerConfig
from megatron_lite.config.model import SWITCHED_ACTIVATIONS
from megatron_lite.config.optimizer_settings import OWN_SETTINGS, LossScaleConfig
from megatron_lite.config.policy import LayerAction, parse_policy
from megatron_lite.config.recompute import AUTO
from megatron_lite.config.setting import settings_of

FULL = ("recompute_method", "recompute_num_layers", "distribute_saved_activations")
SELECTIVE = ("recompute_activations", "recompute_modules")
LOSS_SCALE = tuple(settings_of(LossScaleConfig).keys() - {"loss_scale"})
TOKENIZER = tuple(settings_of(TokenizerConfig).keys() - {"make_vocab_size_divisible_by"})
OVER_PIPELINE = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_microbatches_with_partial_activation_checkpoints",
)

# A run may use at most one of the alternatives of a group. Each alternative is a tuple of fields.
ALTERNATIVES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("recompute_policy",),
        ("recompute_granularity", *FULL, *SELECTIVE),
        ("cpu_offloading_num_layers",),
        ("fine_grained_activation_offloading", "offload_modules"),
        ("activation_memory_budget",),
    ),
    (("train_iters",), ("train_samples",)),
    (("lr_decay_iters",), ("lr_decay_samples",)),
    (("lr_warmup_iters",), ("lr_warmup_samples",), ("lr_warmup_fraction",)),
    (("lr_wsd_decay_iters",), ("lr_wsd_decay_samples",)),
    (
        ("data_path",),
        ("mock_data",),
        ("data_args_path",),
        PER_SPLIT_PATHS,
        ("per_split_data_args_path",),
    ),
    (("bf16",), ("fp16",)),
    (("global_batch_size", "rampup_batch_size"), ("step_batch_size_schedule",)),
    (("loss_scale",), LOSS_SCALE),
    tuple((name,) for name in SWITCHED_ACTIVATIONS),
    (("num_layers_per_virtual_pipeline_stage",), ("num_virtual_stages_per_pipeline_rank",)),
    (("use_torch_fsdp2",), ("use_distributed_optimizer", "overlap_param_gather")),
    (("sequence_parallel",), ("distribute_saved_activations",)),
    (("overlap_param_gather",), ("activation_memory_budget",)),
)
# The fields that have no meaning without a setting. If the setting is replaced, they are too.
BELONGS_TO = {
    "recompute_policy": ("memory_budget",),
    "torch_compile": ("activation_memory_budget",),
    "fp16": ("loss_scale", *LOSS_SCALE),
    "bf16": ("grad_reduce_in_bf16",),
    "use_torch_fsdp2": ("torch_fsdp2_reshard_after_forward", "fsdp_memory_efficient_wrapping"),
}
# The fields that belong to one value of a setting. If the command line gives the setting another
# value, they are replaced.
BELONGS_TO_VALUE: dict[str, Mapping[object, tuple[str, ...]]] = {
    "recompute_granularity": {
        "full": (*FULL, "contiguous_saved_activations"),
        "selective": SELECTIVE,
    },
    "optimizer": OWN_SETTINGS,
    "lr_decay_style": {"WSD": ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")},
}
# The fields that need a size above 1. If the command line gives the size 1, they are replaced.
NEEDS_MORE_THAN_ONE = {
    "pipeline_model_parallel_size": OVER_PIPELINE,
    "context_parallel_size": ("cp_comm_type",),
    "tensor_model_parallel_size": ("distribute_saved_activations",),
}


def replaced_fields(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the stored fields that are replaced, each with the given field that replaces it.

    stored: the values of the file, by field name. given: the values of the command line, likewise.

    If the command line itself gives several alternatives of a group, nothing of the group is
    replaced: the rules of the configuration refuse the combination. Raises ValueError if a given
    policy cannot be read.
    """
    replaced: dict[str, str] = {}

    def replace(fields: Collection[str], by: str) -> None:
        for field in fields:
            if field not in given and field not in replaced:
                replaced[field] = by
                replace(BELONGS_TO.get(field, ()), by)

    for group in ALTERNATIVES:
        chosen = [way for way in group if not given.keys().isdisjoint(way)]
        if len(chosen) == 1:
            by = next(field for field in chosen[0] if field in given)
            replace([field for way in group if way is not chosen[0] for field in way], by)
    # --recompute-activations chooses selective, though it is another field than the granularity.
    if given.get("recompute_activations") and stored.get("recompute_granularity") != "selective":
        full = BELONGS_TO_VALUE["recompute_granularity"]["full"]
        replace(("recompute_granularity", *full), "recompute_activations")
    for field, values in BELONGS_TO_VALUE.items():
        if field in given and given[field] != stored.get(field):
            for value, names in values.items():
                replace(names if value != given[field] else (), field)
    for field, names in NEEDS_MORE_THAN_ONE.items():
        replace(names if given.get(field) == 1 else (), field)
    # A BPE file alone chooses GPT2BPETokenizer, as in TokenizerConfig. Another tokenizer replaces
    # all settings of the stored one.
    bpe_file = next((field for field in ("vocab_file", "merge_file") if field in given), None)
    tokenizer = given.get("tokenizer_type", None if bpe_file is None else "GPT2BPETokenizer")
    if tokenizer not in (None, stored.get("tokenizer_type")):
        replace(TOKENIZER, "tokenizer_type" if "tokenizer_type" in given else str(bpe_file))
    # A new policy leaves the arena for the inputs of units without effect if it has no unit, and
    # the windows of micro-batches if it recomputes nothing.
    partial = "num_microbatches_with_partial_activation_checkpoints"
    if given.get("activation_memory_budget") is not None:
        replace(("contiguous_saved_activations", partial), "activation_memory_budget")
    if (text := given.get("recompute_policy")) is not None:
        rules = () if text == AUTO else parse_policy(text).rules
        if text != AUTO:
            replace(BELONGS_TO["recompute_policy"], "recompute_policy")
        if not any(rule.action.unit for rule in rules):
            replace(("contiguous_saved_activations",), "recompute_policy")
        if all(rule.action == LayerAction() for rule in rules):
            replace((partial,), "recompute_policy")
    return replaced


def replaced_notices(replaced: Mapping[str, str], *, file: str) -> list[str]:
    """Returns a line for each flag that replaces values of the file.

    file: the file with the flag that names it, such as "--config-json run.json".
    """
    by: dict[str, list[str]] = {}
    for field, cause in replaced.items():
        by.setdefault(cause, []).append(field)
    return [
        f"{flag(cause)} replaces what {file} gives as {', '.join(fields)}"
        for cause, fields in by.items()
    ]
