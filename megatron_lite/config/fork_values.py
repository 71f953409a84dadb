"""Settings of Megatron's forks that stand for other fields here, by arithmetic or from a file.

`megatron_flags.OTHER_WAYS` has their flags, and loads this module where one is given. Standard
library only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_lite.config.checks import InputError, flag, input_faults, quoted
from megatron_lite.config.input_file import read_json
from megatron_lite.config.plain import as_object, shown

Given = dict[str, Any]

# What a configuration of DeepSpeed says, by section, as fields here, and the type of each.
DEEPSPEED: dict[tuple[str, ...], tuple[str, type]] = {
    ("train_batch_size",): ("global_batch_size", int),
    ("train_micro_batch_size_per_gpu",): ("micro_batch_size", int),
    ("gradient_clipping",): ("clip_grad", float),
    ("bf16", "enabled"): ("bf16", bool),
    ("fp16", "enabled"): ("fp16", bool),
    ("fp16", "loss_scale"): ("loss_scale", float),
    ("fp16", "loss_scale_window"): ("loss_scale_window", int),
    ("fp16", "hysteresis"): ("hysteresis", int),
    ("fp16", "min_loss_scale"): ("min_loss_scale", float),
}
STAGE = ("zero_optimization", "stage")
STAGES = {1: "use_distributed_optimizer", 2: "use_distributed_optimizer", 3: "use_torch_fsdp2"}
AUTO = "auto"
NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


def translate_forks(given: Given, tokens: Iterable[str]) -> list[str]:
    """Replaces these settings in `given`. Returns notices about them.

    tokens: the fields of lengths in tokens. Raises InputError for flags that contradict each other.
    """
    steps = (_deepspeed, _dense_layers, _scales, _layer_list)
    return [*_tokens(given, tokens), *(notice for step in steps for notice in step(given))]


def _deepspeed(given: Given) -> Iterator[str]:
    """Takes the fields of a DeepSpeed configuration. Raises InputError where a flag contradicts."""
    if (path := given.pop("deepspeed_config", None)) is None:
        return
    said = f"--deepspeed-config {path}"
    if not os.path.exists(path):
        yield f"{shown(said)}: there is no such file, so the flags alone hold"
        return
    with input_faults(f"{said}: "):
        try:
            found = as_object(read_json(path), "the file")
        except OSError as error:
            raise ValueError(f"cannot be read ({error.strerror})") from error
        stage = _taken(found, STAGE, int)
        if stage not in (None, 0, *STAGES):
            raise ValueError(f"zero_optimization.stage must be 0, 1, 2 or 3 (got {stage})")
        if stage in STAGES:
            given[STAGES[stage]] = True
        for keys, (field, kind) in DEEPSPEED.items():
            value = _taken(found, keys, kind)
            if value is None or value is False or (field == "loss_scale" and value == 0):
                continue  # a scale of 0 is dynamic
            if given.get(field, value) != value:
                raise ValueError(
                    f"{'.'.join(keys)} {value} contradicts {flag(field)} {given[field]}: make "
                    "them equal"
                )
            given[field] = value
    if unread := [name for name, value in found.items() if value not in ({}, None)]:
        yield f"{said}: not read: {', '.join(map(shown, unread))}"


def _taken(found: Given, keys: tuple[str, ...], kind: type) -> Any:
    """Removes a value of nested objects, and returns it; None if it is not there, or "auto".

    Raises ValueError if it is of another type.
    """
    for key in keys[:-1]:
        found = as_object(found.get(key, {}), key)
    value = found.pop(keys[-1], None)
    if value is None or value == AUTO:
        return None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{'.'.join(keys)} must be {NAMES[kind]} (got {quoted(value)})")
    return value


def _tokens(given: Given, names: Iterable[str]) -> Iterator[str]:
    """Replaces lengths in tokens by samples, or by iterations where the run has those."""
    for name in names:
        if (tokens := given.pop(name, None)) is None:
            continue
        in_iterations = "train_iters" in given
        sizes = ["seq_length", "global_batch_size"][: 1 + in_iterations]
        if missing := [flag(size) for size in sizes if given.get(size, 0) < 1]:
            raise InputError(
                f"{flag(name)} {tokens} needs {' and '.join(missing)}: give it, at least 1"
            )
        if tokens < 0 or (tokens == 0 and name == "train_tokens"):
            raise InputError(f"{flag(name)} must be at least 1 (got {tokens}): give the tokens")
        if in_iterations and given.get("rampup_batch_size"):
            raise InputError(
                f"{flag(name)} {tokens} with --rampup-batch-size needs --train-samples in place of "
                "--train-iters: the batches differ"
            )
        length = -(-tokens // math.prod(given[size] for size in sizes))
        topic = name.removesuffix("tokens")
        field = topic + ("iters" if in_iterations else "samples")
        for other in (f"{topic}iters", f"{topic}samples") if topic != "train_" else ():
            given.pop(other, None)  # which tokens override
        given[field] = min(length, given.get(field, length))
        yield f"{flag(name)} {tokens} is read as {flag(field)} {given[field]}"


def _dense_layers(given: Given) -> Iterator[str]:
    """Replaces MindSpeed's number of dense first layers by the list of --moe-layer-freq."""
    dense = given.pop("first_k_dense_replace", None)
    layers, every = given.get("num_layers"), given.get("moe_layer_freq", 1)
    if dense is None:
        return
    if layers is None:
        raise InputError(
            f"--first-k-dense-replace {dense} needs --num-layers: give it, or --moe-layer-freq "
            f"[0]*{dense}+[1]*N"
        )
    if not isinstance(every, int):
        raise InputError(f"--first-k-dense-replace {dense} excludes a list of --moe-layer-freq")
    given["moe_layer_freq"] = tuple(
        int(number >= dense and number % (every or 1) == 0) for number in range(layers)
    )
    yield f"--first-k-dense-replace {dense}: the first {dense} of {layers} layers have no experts"


def _scales(given: Given) -> Iterator[str]:
    """Replaces numbers of MindSpeed's models by the multipliers that they stand for."""
    hidden, layers = given.get("hidden_size", 0), given.get("num_layers", 0)
    for name, field, size, scale in (
        ("input_embeds_norm", "embedding_multiplier", hidden, lambda _: math.sqrt(hidden)),
        ("query_pre_attn_scalar", "softmax_scale", 1, lambda number: 1 / math.sqrt(number)),
        ("scale_depth", "residual_multiplier", layers, lambda depth: depth / math.sqrt(layers)),
        ("dim_model_base", "logits_scaling", hidden, lambda base: hidden / base),
    ):
        value = given.pop(name, None)
        if value is None or value is False:
            continue
        if value <= 0:
            raise InputError(f"{flag(name)} must be above 0 (got {value})")
        if size < 1:
            raise InputError(f"{flag(name)} needs --hidden-size and --num-layers: give them")
        given[field] = scale(value)
        yield f"{flag(name)} is read as {flag(field)} {given[field]}"


def _layer_list(given: Given) -> Iterator[str]:
    """Replaces MindSpeed's list of the stages' layers by the numbers of the first and the last."""
    if (text := given.pop("num_layer_list", None)) is None:
        return
    said = f"--num-layer-list {shown(text)}"
    stages, layers = given.get("pipeline_model_parallel_size", 1), given.get("num_layers")
    numbers = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if len(numbers) != stages or sum(numbers) != layers or not all(numbers):
        raise InputError(
            f"{said} must have --pipeline-model-parallel-size {stages} numbers of at least 1 with "
            f"the sum --num-layers {layers}"
        )
    if len({*numbers[1:-1]}) > 1:
        raise InputError(
            f"{said}: all stages but the first and the last have equal numbers of layers here"
        )
    if len({*numbers}) > 1:
        given["decoder_first_pipeline_num_layers"] = numbers[0]
        given["decoder_last_pipeline_num_layers"] = numbers[-1]
    yield f"{said}: the first stage has {numbers[0]} layers, the last {numbers[-1]}"
