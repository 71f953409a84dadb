"""Weights and optimizer states of a Megatron checkpoint, once a format has found their places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpointing.other_systems import ITERATION, megatron_format
from megatron_lite.checkpointing.step_files import LATEST, pointed_step
from megatron_lite.config.checks import InputError
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.megatron.args import progress_of, vocabulary_of
from megatron_lite.convert.weights import (
    OUTPUT,
    WEIGHT,
    WORDS,
    Described,
    WeightSource,
    check_layers,
    check_names,
    joined,
    parameter_specs,
    refused,
)

QKV = ".self_attention.linear_qkv."
MOST_UPDATES = 10**9 - 1
# By the parameter's name in the whole model, the part of every TP rank: a tensor, or something with
# a tensor's `shape` and `dtype` that `read` reads.
Parts = Mapping[str, Sequence[Any]]


class Unmapped(Exception):
    """A reason for which optimizer states cannot be mapped to parameters."""


def need(condition: bool, reason: str) -> None:
    """Raises Unmapped unless the condition holds."""
    if not condition:
        raise Unmapped(reason)


def iteration_folder(path: Path, name: str) -> Path:
    """Returns the folder of the iteration that a directory's pointer names.

    A path without a pointer is the folder of an iteration itself. name: that of the format.
    Raises InputError if the path is no directory of the format, or if the pointer names nothing.
    """
    if not path.is_dir():
        raise InputError(f"--load {path}: no such directory")
    has_pointer = (path / LATEST).exists()
    folder = pointed_step(path, "release") if has_pointer else path
    found = megatron_format(folder)
    if found != name:
        hint = "" if found is None else f": it is one of --from {found}"
        raise InputError(f"{folder}: holds no checkpoint of the format {name}{hint}")
    inside = [one.name for one in path.iterdir() if ITERATION.fullmatch(one.name)]
    if inside and not has_pointer:
        raise InputError(
            f"--load {path}: lacks {LATEST}, which names the iteration to read: copy that file "
            f"too, or give the folder of one iteration, such as --load {path / max(inside)}"
        )
    return folder


def updates_of(groups: list[Any], states: Mapping[Any, Any]) -> int:
    """Returns how many updates an optimizer made. Raises Unmapped if that is not clear."""
    holders = [*groups, *states.values(), {"step": states.get("common_step")}]
    found = [one.get("step") for one in holders if isinstance(one, dict)]
    steps = {float(step) for step in found if step is not None}
    step = steps.pop() if len(steps) == 1 else -1.0
    need(
        step.is_integer() and 0 <= step <= MOST_UPDATES,
        "they do not say how many updates were made",
    )
    return int(step)


def megatron_source(
    where: str,
    common: Mapping[str, Any],
    args: Mapping[str, Any],
    model: ModelConfig,
    weights: Parts,
    states: Callable[[], tuple[Mapping[str, Parts], int]],
    *,
    tp_size: int = 1,
    version: float = 3.0,
) -> WeightSource:
    """Opens a directory of `--save` of Megatron-LM, or one iteration of it.

    where: its folder. common: values that are no tensors. args: the arguments of the run.
    states: returns the optimizer states by key, and how many updates the optimizer made. It raises
        Unmapped if they cannot be converted.
    version: that of the layout of linear_qkv.
    Raises InputError if the weights are not those of the model that the arguments describe.
    """
    # With tied embeddings the last stage has a copy of them.
    is_copy = {OUTPUT} if not model.untie_embeddings_and_output_weights else ()
    weights = {name: parts for name, parts in weights.items() if name not in is_copy}
    words = weights.get(WORDS)
    if words is None or len(words[0].shape) != 2:
        raise InputError(f"{where}: holds no {WORDS}")
    check_layers(model.num_layers, len(weights), where)
    padded = sum(one.shape[0] for one in words)
    vocab_size, notes = vocabulary_of(args, padded)
    with refused(where):
        specs = parameter_specs(model, vocab_size, tp_size=tp_size, padded_vocab_size=padded)
    check_names(where, weights.keys(), specs.keys(), "the model that its args describe")
    places: dict[str, Parts] = {WEIGHT: weights}
    updates = 0
    try:
        found, updates = states()
        places |= found
    except Unmapped as reason:
        notes.append(
            f"the optimizer states are left out ({reason}): the weights alone are converted"
        )

    def read(name: str, key: str = WEIGHT) -> Tensor:
        parts, wanted = places[key][name], specs[name].local_shape(tp_size)
        for rank, one in enumerate(parts):
            if one.shape != wanted:
                raise InputError(
                    f"{where}: {name} {key} of TP rank {rank} has the shape "
                    f"{tuple(one.shape)}, and the model of its args has {wanted}"
                )
        read = [one if isinstance(one, Tensor) else one.read() for one in parts]
        if QKV in name:
            read = [_head_by_head(part, version, model.head_dim) for part in read]
        whole = joined(read, specs[name])
        return whole.float() if key else whole

    described = Described(
        model=model,
        true_vocab_size=vocab_size,
        dtypes={name: weights[name][0].dtype for name in specs},
        progress=progress_of(common, args, where),
        state_keys=tuple(key for key in places if key != WEIGHT),
        num_updates=updates,
        notes=tuple(notes),
    )
    return WeightSource(described, read)


def _head_by_head(part: Tensor, version: float, width: int) -> Tensor:
    """Returns the rows of linear_qkv head by head. Before version 2.0 they had other orders."""
    if version >= 2.0:
        return part
    # version 0: [3, heads, d]; version 1.0: [heads, d, 3]
    shape, dims = ((3, -1, width), (0, 1)) if version == 0 else ((-1, width, 3), (1, 2))
    return part.view(*shape, *part.shape[1:]).transpose(*dims).reshape(part.shape)
