"""Megatron's other ways to say a setting, replaced by the fields of the configuration.

The command line is parsed into {field: value} first. OTHER_WAYS has the flags without a field, by
topic; a field's own other values are in its `megatron` (setting.py). Each function here replaces
what has no field, and returns notices for the user. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.data_settings import TokenizerConfig
from megatron_lite.config.model import NORM_VECTORS, ModelConfig
from megatron_lite.config.parallel import ParallelConfig, no_flash_across_ranks
from megatron_lite.config.plain import parse_whole_number
from megatron_lite.config.setting import Setting, settings_of
from megatron_lite.config.training import TrainingConfig

Given = dict[str, Any]

# What Megatron's own FSDP shares out, as the switch that shares it out here.
SHARDING_STRATEGIES = {
    "no_shard": None,
    "optim": "use_distributed_optimizer",
    "optim_grads": "use_distributed_optimizer",
    "optim_grads_params": "use_torch_fsdp2",
}
STRATEGY = Setting(
    "what --use-megatron-fsdp shares out (default: no_shard)", choices=tuple(SHARDING_STRATEGIES)
)
# The switches that count the embedding or the loss as a layer, with the field of each.
ACCOUNTED = {
    "account_for_embedding_in_pipeline_split": "decoder_first_pipeline_num_layers",
    "account_for_loss_in_pipeline_split": "decoder_last_pipeline_num_layers",
}
# Lengths in tokens, as Megatron-DeepSpeed has them.
TOKENS = {
    f"{name}_tokens": Setting(f"{text}, in tokens of whole samples", parse=parse_whole_number)
    for name, text in {
        "train": "length of the run, at most",
        "lr_decay": "length of the decay of the learning rate",
        "lr_warmup": "length of its warmup",
    }.items()
}
OTHER_WAYS = {
    "model": {
        "first_k_dense_replace": Setting(
            "layers without experts before those of --moe-layer-freq", parse=parse_whole_number
        ),
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
        "deepspeed_config": Setting(
            "a JSON file of DeepSpeed: batch sizes, precision, clipping and ZeRO's stage", parse=str
        ),
        "use_megatron_fsdp": Setting(
            "the same as --use-torch-fsdp2 or --use-distributed-optimizer, by the sharding strategy"
        ),
        "data_parallel_sharding_strategy": STRATEGY,
    },
    "training": {"no_bf16": Setting("train a --model in float32"), **TOKENS},
}


def translate_values(given: Given, *, has_file: bool) -> list[str]:
    """Replaces Megatron's other ways to say a setting in `given`. Returns notices about them.

    has_file: whether a file supplies the values of flags that are not given.
    Raises ValueError for flags that contradict each other.
    """
    steps = (_cp_comm_type, _other_values, _position_embedding, _no_bf16, _megatron_fsdp)
    notices = [*_of_forks(given), *(notice for step in steps for notice in step(given))]
    notices += _accounted_layers(given, has_file=has_file)
    return notices + ([] if has_file else _context_parallel_attention(given))


def _of_forks(given: Given) -> list[str]:
    """Replaces what forks of Megatron-LM have, which is rarely given, so that it loads late."""
    if given.keys().isdisjoint(("deepspeed_config", "first_k_dense_replace", *TOKENS)):
        return []
    from megatron_lite.config.fork_values import translate_forks

    return translate_forks(given, TOKENS)


def _other_values(given: Given) -> Iterator[str]:
    """Replaces values of Megatron and of its forks, which write the names of norms in any case."""
    norms = {known.lower(): known for known in NORM_VECTORS}
    of_megatron = {
        field: settings_of(topic)[field].megatron
        for topic, field in (
            (ModelConfig, "attention_backend"),
            (TrainingConfig, "cuda_graph_impl"),
            (TokenizerConfig, "tokenizer_type"),
            (ParallelConfig, "moe_token_dispatcher_type"),
        )
    }
    for field, read_as in (
        *((field, values.get(str(given.get(field)))) for field, values in of_megatron.items()),
        ("normalization", norms.get(str(given.get("normalization")).lower())),
    ):
        if read_as not in (None, given.get(field)):
            yield f"{flag(field)} {given[field]} is read as {read_as}"
            given[field] = read_as
    if (iters := given.get("eval_iters", 0)) < 0:
        given["eval_iters"] = 0
        yield f"--eval-iters {iters} is read as 0: nothing is evaluated"
    if given.get("loss_scale") == 0:
        del given["loss_scale"]
        yield "--loss-scale 0 is read as a dynamic scale"


def _cp_comm_type(given: Given) -> Iterator[str]:
    kinds = given.pop("cp_comm_type", [])
    if len({*kinds}) > 1:
        raise InputError(
            f"--cp-comm-type {' '.join(kinds)}: all layers exchange keys and values in one way "
            "here, give one"
        )
    for kind in kinds[:1]:
        read_as = settings_of(ParallelConfig)["cp_comm_type"].megatron.get(kind, kind)
        given["cp_comm_type"] = read_as
        if read_as != kind:
            yield (
                f"--cp-comm-type {kind} is read as {read_as}: each rank keeps its heads here, "
                "which changes the result by rounding at most"
            )


def _position_embedding(given: Given) -> Iterator[str]:
    """Replaces the two switches for a position embedding by the field.

    Raises ValueError if they contradict --position-embedding-type.
    """
    for switch, kinds in (
        ("use_rotary_position_embeddings", ("rope",)),
        ("no_position_embedding", ("none", "rope")),
    ):
        if given.pop(switch, False):
            kind = given.setdefault("position_embedding_type", kinds[0])
            if kind not in kinds:
                raise InputError(
                    f"{flag(switch)} contradicts --position-embedding-type {kind}: leave one out"
                )
            if switch == "no_position_embedding":
                yield f"{flag(switch)} is an old flag, read as --position-embedding-type {kind}"


def _no_bf16(given: Given) -> tuple[str, ...]:
    """Replaces --no-bf16 by the field, which a known model would turn on."""
    if given.pop("no_bf16", False) and given.setdefault("bf16", False):
        raise InputError("--no-bf16 contradicts --bf16: leave one out")
    return ()


def _megatron_fsdp(given: Given) -> Iterator[str]:
    """Replaces Megatron's own FSDP by the switch that shares out the same here."""
    is_used = given.pop("use_megatron_fsdp", False)
    strategy = given.pop("data_parallel_sharding_strategy", None)
    if not is_used:
        if strategy is not None:
            yield "--data-parallel-sharding-strategy has no effect without --use-megatron-fsdp"
        return
    said = f"--use-megatron-fsdp with {strategy or 'no_shard'}"
    fault = STRATEGY.fault(flag("data_parallel_sharding_strategy"), strategy or "no_shard")
    if fault is not None:
        raise InputError(fault)
    field = SHARDING_STRATEGIES[strategy or "no_shard"]
    if field is None:
        yield f"{said} has no effect: it shares out nothing"
        return
    if field == "use_torch_fsdp2":
        given.pop("use_distributed_optimizer", None)
        given.pop("overlap_param_gather", None)
    given[field] = True
    yield f"{said} is read as {flag(field)}, which gives the same results"


def _accounted_layers(given: Given, *, has_file: bool) -> Iterator[str]:
    """Replaces the switches that count the embedding or the loss as a layer of the pipeline.

    The first, or the last, pipeline rank then has one layer less than the others. The command line
    must have both numbers that this needs: a file is read later.
    """
    counted = [name for name in ACCOUNTED if given.pop(name, False)]
    size, layers = given.get("pipeline_model_parallel_size", 1), given.get("num_layers")
    said = " and ".join(map(flag, counted))
    if counted and has_file and not {"num_layers", "pipeline_model_parallel_size"} <= given.keys():
        raise InputError(
            f"{said} needs --num-layers and --pipeline-model-parallel-size on the command line, "
            "not in a file: give both, or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers instead"
        )
    if not counted or layers is None:
        return  # a missing --num-layers is an error of its own
    if size == 1:
        yield f"{said}: no effect at --pipeline-model-parallel-size 1"
        return
    if (layers + len(counted)) % size:
        raise InputError(
            f"{said}: --num-layers {layers} and {len(counted)} more are not divisible by "
            f"--pipeline-model-parallel-size {size}"
        )
    virtual = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    if any((given.get(name) or 1) > 1 for name in virtual):
        raise InputError(
            f"{said}: with virtual stages all of a rank's stages have the same number of layers "
            "here; leave the flag out, or the virtual stages"
        )
    number = (layers + len(counted)) // size - 1
    for name in counted:
        field = ACCOUNTED[name]
        given[field] = number
        yield f"{flag(name)}: {flag(field)} {number}"


def _context_parallel_attention(given: Given) -> list[str]:
    """Chooses unfused attention where context parallelism has no other for the run."""
    reason = no_flash_across_ranks(
        given.get("attention_dropout", ModelConfig.attention_dropout),
        bool(given.get("reset_attention_mask")),
    )
    is_free = given.get("attention_backend", "auto") == "auto"
    if given.get("context_parallel_size", 1) == 1 or not is_free or reason is None:
        return []
    given["attention_backend"] = "unfused"
    return [
        f"--attention-backend auto is unfused: context-parallel ranks have no flash attention with "
        f"{reason}, and unfused attention builds the scores"
    ]
