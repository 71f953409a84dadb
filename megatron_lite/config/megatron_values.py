"""Megatron's other ways to say a setting, replaced by the fields of the configuration.

The command line is parsed into {field: value} first. Each function here replaces what has no field,
or has another value here, and returns notices for the user. Standard library only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_lite.config.all_faults import Faults
from megatron_lite.config.checks import flag
from megatron_lite.config.model import NORMALIZATIONS, ModelConfig
from megatron_lite.config.parallel import no_flash_across_ranks
from megatron_lite.config.pattern_text import parse_pattern, parse_window

Given = dict[str, Any]

ATTENTION_BACKENDS = {"fused": "auto", "local": "unfused"}
# Other ways in which ranks exchange keys and values. They change rounding at most.
CP_COMM_TYPES = {"a2a": "p2p", "a2a+p2p": "p2p"}
# What Megatron's own FSDP shares out, as the switch that shares it out here.
SHARDING_STRATEGIES = {
    "no_shard": None,
    "optim": "use_distributed_optimizer",
    "optim_grads": "use_distributed_optimizer",
    "optim_grads_params": "use_torch_fsdp2",
}
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def translate_values(given: Given, faults: Faults, *, has_file: bool) -> list[str]:
    """Replaces Megatron's other ways to say a setting in `given`. Returns notices about them.

    Adds a fault for flags that contradict each other, and for a text that cannot be parsed.

    has_file: whether a file supplies the values of flags that are not given.
    """
    steps: dict[str, Callable[[Given], list[str]]] = {
        "attention_backend": _attention_backend,
        "normalization": _normalization,
        "eval_iters": _eval_iters,
        "loss_scale": _loss_scale,
        "cp_comm_type": _cp_comm_type,
        "window_size": _window_size,
        "window_attn_skip_freq": lambda found: _pattern(found, "window_attn_skip_freq"),
        "no_rope_freq": lambda found: _pattern(found, "no_rope_freq"),
        "position_embedding_type": _position_embedding,
        "bf16": _no_bf16,
        "use_torch_fsdp2": _megatron_fsdp,
        "decoder_first_pipeline_num_layers": lambda found: _accounted_layers(found, has_file),
    }
    notices = []
    for field, step in steps.items():
        with faults.of(field):
            notices += step(given)
    if not has_file:
        notices += _context_parallel_attention(given)
    return notices


WITHOUT_FIELD = (
    *("use_rotary_position_embeddings", "no_position_embedding", "use_megatron_fsdp", "no_bf16"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def _attention_backend(given: Given) -> list[str]:
    backend = given.get("attention_backend")
    if backend not in ATTENTION_BACKENDS:
        return []
    given["attention_backend"] = ATTENTION_BACKENDS[backend]
    return [f"--attention-backend {backend} is read as {given['attention_backend']}"]


def _normalization(given: Given) -> list[str]:
    """Takes the names of norms in any case, as forks of Megatron write them."""
    name = given.get("normalization")
    known = {norm.lower(): norm for norm in NORMALIZATIONS}
    if name in (None, *NORMALIZATIONS) or name.lower() not in known:
        return []
    given["normalization"] = known[name.lower()]
    return [f"--normalization {name} is read as {given['normalization']}"]


def _eval_iters(given: Given) -> list[str]:
    if given.get("eval_iters", 0) >= 0:
        return []
    notice = f"--eval-iters {given['eval_iters']} is read as 0: nothing is evaluated"
    given["eval_iters"] = 0
    return [notice]


def _loss_scale(given: Given) -> list[str]:
    if given.get("loss_scale") != 0:
        return []
    del given["loss_scale"]
    return ["--loss-scale 0 is read as a dynamic scale"]


def _cp_comm_type(given: Given) -> list[str]:
    types = given.pop("cp_comm_type", [])
    if not types:
        return []
    if len(set(types)) > 1:
        raise ValueError(
            f"--cp-comm-type {' '.join(types)}: all layers exchange keys and values in one way "
            "here, give one"
        )
    given["cp_comm_type"] = CP_COMM_TYPES.get(types[0], types[0])
    if given["cp_comm_type"] == types[0]:
        return []
    return [
        f"--cp-comm-type {types[0]} is read as {given['cp_comm_type']}: each rank keeps its heads "
        "here, which changes the result by rounding at most"
    ]


def _window_size(given: Given) -> list[str]:
    if (window := given.get("window_size")) is not None:
        given["window_size"] = parse_window(window)
    return []


def _pattern(given: Given, field: str) -> list[str]:
    if (pattern := given.get(field)) is not None:
        given[field] = parse_pattern(flag(field), pattern)
    return []


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


def add_switches_without_field(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `translate_values` replaces by fields, for a parser of fields alone."""
    for name in WITHOUT_FIELD:
        parser.add_argument(
            flag(name), action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    parser.add_argument(
        "--data-parallel-sharding-strategy", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


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
    field = SHARDING_STRATEGIES[strategy]
    said = f"--use-megatron-fsdp with {strategy}"
    if field is None:
        return [f"{said} has no effect: it shares out nothing"]
    for other in ("use_distributed_optimizer", "overlap_param_gather"):
        if field == "use_torch_fsdp2":
            given.pop(other, None)
    given[field] = True
    return [f"{said} is read as {flag(field)}, which gives the same results"]


def _accounted_layers(given: Given, has_file: bool) -> list[str]:
    """Replaces the switches that count the embedding or the loss as a layer of the pipeline.

    The first, or the last, pipeline rank then has one layer less than the others. The command line
    must have both numbers that this needs: a file is read later.
    """
    embedding, loss = (bool(given.pop(name, False)) for name in ACCOUNTED)
    size, layers = given.get("pipeline_model_parallel_size", 1), given.get("num_layers")
    if not (embedding or loss):
        return []
    said = " and ".join(
        flag(name) for name, is_set in zip(ACCOUNTED, (embedding, loss), strict=True) if is_set
    )
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
    together = layers + embedding + loss
    if together % size:
        raise ValueError(
            f"{said}: --num-layers {layers} and {together - layers} more are not divisible by "
            f"--pipeline-model-parallel-size {size}"
        )
    virtual = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    if any((given.get(name) or 1) > 1 for name in virtual):
        raise ValueError(
            f"{said}: with virtual stages all of a rank's stages have the same number of layers "
            "here; leave the flag out, or the virtual stages"
        )
    each, notices = together // size, []
    if embedding:
        given["decoder_first_pipeline_num_layers"] = each - 1
        notices.append(f"{flag(ACCOUNTED[0])}: --decoder-first-pipeline-num-layers {each - 1}")
    if loss:
        given["decoder_last_pipeline_num_layers"] = each - 1
        notices.append(f"{flag(ACCOUNTED[1])}: --decoder-last-pipeline-num-layers {each - 1}")
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
