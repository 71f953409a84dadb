"""Megatron's other ways to say a setting, replaced by the fields of the configuration.

The command line is parsed into {field: value} first. OTHER_WAYS has the flags without a field, by
topic; a field's own other values are in its `megatron` (setting.py). Each function here replaces
what has no field, and returns notices for the user. Standard library only.
"""

from __future__ import annotations

from typing import Any

from megatron_lite.config.checks import flag
from megatron_lite.config.model import NORM_VECTORS, ModelConfig
from megatron_lite.config.parallel import ParallelConfig, no_flash_across_ranks
from megatron_lite.config.parser import Faults
from megatron_lite.config.setting import Setting, settings_of

Given = dict[str, Any]

# What Megatron's own FSDP shares out, as the switch that shares it out here.
SHARDING_STRATEGIES = {
    "no_shard": None,
    "optim": "use_distributed_optimizer",
    "optim_grads": "use_distributed_optimizer",
    "optim_grads_params": "use_torch_fsdp2",
}
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
OTHER_WAYS = {
    "model": {
        "use_rotary_position_embeddings": Setting("the same as --position-embedding-type rope"),
        "no_position_embedding": Setting(
            "--position-embedding-type none, unless rope is chosen: then nothing"
        ),
    },
    "parallel": {
        name: Setting(f"one layer less on the {rank} pipeline rank than on the others")
        for name, rank in zip(ACCOUNTED, ("first", "last"), strict=True)
    },
    "data_parallel": {
        "use_megatron_fsdp": Setting(
            "the same as --use-torch-fsdp2 or --use-distributed-optimizer, by the sharding strategy"
        ),
        "data_parallel_sharding_strategy": Setting(
            "what --use-megatron-fsdp shares out (default: no_shard)",
            choices=tuple(SHARDING_STRATEGIES),
        ),
    },
    "training": {"no_bf16": Setting("train a --model in float32")},
}


def translate_values(given: Given, faults: Faults, *, has_file: bool) -> list[str]:
    """Replaces Megatron's other ways to say a setting in `given`. Returns notices about them.

    Adds a fault for flags that contradict each other.

    has_file: whether a file supplies the values of flags that are not given.
    """
    notices: list[str] = []
    for field, step in (
        ("cp_comm_type", _cp_comm_type),
        ("normalization", _other_values),
        ("position_embedding_type", _position_embedding),
        ("bf16", _no_bf16),
        ("use_torch_fsdp2", _megatron_fsdp),
    ):
        with faults.of(field):
            notices += step(given)
    with faults.of("decoder_first_pipeline_num_layers"):
        notices += _accounted_layers(given, has_file)
    return notices + ([] if has_file else _context_parallel_attention(given))


def _other_values(given: Given) -> list[str]:
    """Replaces values of Megatron and of its forks, which write the names of norms in any case."""
    backend, norm = str(given.get("attention_backend")), str(given.get("normalization"))
    found = {
        "attention_backend": settings_of(ModelConfig)["attention_backend"].megatron.get(backend),
        "normalization": {known.lower(): known for known in NORM_VECTORS}.get(norm.lower()),
    }
    notices = []
    for field, read_as in found.items():
        if read_as not in (None, given.get(field)):
            notices.append(f"{flag(field)} {given[field]} is read as {read_as}")
            given[field] = read_as
    if (iters := given.get("eval_iters", 0)) < 0:
        given["eval_iters"] = 0
        notices.append(f"--eval-iters {iters} is read as 0: nothing is evaluated")
    if given.get("loss_scale") == 0:
        del given["loss_scale"]
        notices.append("--loss-scale 0 is read as a dynamic scale")
    return notices


def _cp_comm_type(given: Given) -> list[str]:
    kinds = given.pop("cp_comm_type", [])
    if not kinds:
        return []
    kind, *others = dict.fromkeys(kinds)
    if others:
        raise ValueError(
            f"--cp-comm-type {' '.join(kinds)}: all layers exchange keys and values in one way "
            "here, give one"
        )
    read_as = settings_of(ParallelConfig)["cp_comm_type"].megatron.get(kind, kind)
    given["cp_comm_type"] = read_as
    if read_as == kind:
        return []
    return [
        f"--cp-comm-type {kind} is read as {read_as}: each rank keeps its heads here, which "
        "changes the result by rounding at most"
    ]


def _position_embedding(given: Given) -> list[str]:
    """Replaces the two switches for a position embedding by the field.

    Raises ValueError if they contradict --position-embedding-type.
    """
    use_rotary = given.pop("use_rotary_position_embeddings", False)
    use_none = given.pop("no_position_embedding", False)
    if use_rotary and given.setdefault("position_embedding_type", "rope") != "rope":
        raise ValueError(
            f"--use-rotary-position-embeddings contradicts --position-embedding-type "
            f"{given['position_embedding_type']}: leave one out"
        )
    if not use_none:
        return []
    kind = given.setdefault("position_embedding_type", "none")
    if kind == "learned_absolute":
        raise ValueError(
            "--no-position-embedding contradicts --position-embedding-type "
            "learned_absolute: leave one out"
        )
    return [f"--no-position-embedding is an old flag, read as --position-embedding-type {kind}"]


def _no_bf16(given: Given) -> list[str]:
    """Replaces --no-bf16 by the field, which a known model would turn on."""
    if given.pop("no_bf16", False) and given.setdefault("bf16", False):
        raise ValueError("--no-bf16 contradicts --bf16: leave one out")
    return []


def _megatron_fsdp(given: Given) -> list[str]:
    """Replaces Megatron's own FSDP by the switch that shares out the same here."""
    is_used = given.pop("use_megatron_fsdp", False)
    strategy = given.pop("data_parallel_sharding_strategy", None)
    if not is_used:
        if strategy is None:
            return []
        return ["--data-parallel-sharding-strategy has no effect without --use-megatron-fsdp"]
    strategy = strategy or "no_shard"
    if strategy not in SHARDING_STRATEGIES:
        raise ValueError(
            f"--data-parallel-sharding-strategy must be one of {', '.join(SHARDING_STRATEGIES)} "
            f"(got {strategy})"
        )
    field, said = SHARDING_STRATEGIES[strategy], f"--use-megatron-fsdp with {strategy}"
    if field is None:
        return [f"{said} has no effect: it shares out nothing"]
    if field == "use_torch_fsdp2":
        given.pop("use_distributed_optimizer", None)
        given.pop("overlap_param_gather", None)
    given[field] = True
    return [f"{said} is read as {flag(field)}, which gives the same results"]


def _accounted_layers(given: Given, has_file: bool) -> list[str]:
    """Replaces the switches that count the embedding or the loss as a layer of the pipeline.

    The first, or the last, pipeline rank then has one layer less than the others. The command line
    must have both numbers that this needs: a file is read later.
    """
    counted = [name for name in ACCOUNTED if given.pop(name, False)]
    size, layers = given.get("pipeline_model_parallel_size", 1), given.get("num_layers")
    if not counted:
        return []
    said = " and ".join(map(flag, counted))
    if has_file and not {"num_layers", "pipeline_model_parallel_size"} <= given.keys():
        raise ValueError(
            f"{said} needs --num-layers and --pipeline-model-parallel-size on the command line, "
            "not in a file: give both, or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers instead"
        )
    if layers is None:
        return []  # the missing --num-layers is an error of its own
    if size == 1:
        return [f"{said}: no effect at --pipeline-model-parallel-size 1"]
    if (layers + len(counted)) % size:
        raise ValueError(
            f"{said}: --num-layers {layers} and {len(counted)} more are not divisible by "
            f"--pipeline-model-parallel-size {size}"
        )
    virtual = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    if any((given.get(name) or 1) > 1 for name in virtual):
        raise ValueError(
            f"{said}: with virtual stages all of a rank's stages have the same number of layers "
            "here; leave the flag out, or the virtual stages"
        )
    number, notices = (layers + len(counted)) // size - 1, []
    for name, end in zip(ACCOUNTED, ("first", "last"), strict=True):
        if name in counted:
            field = f"decoder_{end}_pipeline_num_layers"
            given[field] = number
            notices.append(f"{flag(name)}: {flag(field)} {number}")
    return notices


def _context_parallel_attention(given: Given) -> list[str]:
    """Chooses unfused attention where context parallelism has no other for the run."""
    if given.get("context_parallel_size", 1) == 1:
        return []
    if given.get("attention_backend", "auto") != "auto":
        return []
    reason = no_flash_across_ranks(
        given.get("attention_dropout", ModelConfig.attention_dropout),
        bool(given.get("reset_attention_mask")),
    )
    if reason is None:
        return []
    given["attention_backend"] = "unfused"
    return [
        f"--attention-backend auto is unfused: context-parallel ranks have no flash attention with "
        f"{reason}, and unfused attention builds the scores"
    ]
