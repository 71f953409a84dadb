"""Weights and optimizer states of a Megatron checkpoint, once a format has found their places.

The parameters' names of Megatron-LM's releases become the names of this project:

    release         names                                      norms before attention and MLP
    Megatron core   decoder.layers.0.mlp.linear_fc1.weight     of their own (local spec), or parts
                                                               of linear_qkv and linear_fc1 (TE)
    before          language_model.encoder.layers.0.mlp.dense_h_to_4h.weight

    experts                            the first matrix of expert 3, below decoder.layers.0.mlp
    SequentialMLP                      experts.local_experts.3.linear_fc1.weight
    TEGroupedMLP                       experts.linear_fc1.weight3
    GroupedMLP, all in one [h, E f]    experts.weight1
    torch_dist, all in one [E, f, h]   experts.experts.linear_fc1.weight

A torch_dist checkpoint may leave out the layer's number and stack all layers in one tensor.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.start import ITERATION, megatron_format, pointed_step
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.megatron.args import progress_of, vocabulary_of
from megatron_lite.convert.weights import (
    LAYERS,
    OUTPUT,
    WEIGHT,
    WORDS,
    WeightSource,
    check_held,
    check_layers,
    joined,
    layer_of,
    parameter_specs,
)

QKV = ".self_attention.linear_qkv."
MOST_UPDATES = 10**9 - 1
Ranks = tuple[int, ...]  # a TP rank, a pipeline rank and an expert rank
# By the parameter's name in the whole model, the part of every TP rank: a Stack, or something else
# with its `shape`, `dtype` and `read`.
Parts = Mapping[str, Sequence[Any]]


class Stack(NamedTuple):
    """The rows of a parameter, of one tensor or, if it is of experts, several: [E, out, in]."""

    parts: Sequence[Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(len, self.parts)), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self) -> Tensor:
        return torch.cat([*self.parts])


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
    with input_faults(f"{where}: "):
        specs = parameter_specs(model, padded, tp_size=tp_size)
    needed = {name: spec.local_shape(tp_size) for name, spec in specs.items()}
    check_held(where, weights, needed, "args")
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
        read = [one.read() for one in places[key][name]]
        if QKV in name:
            read = [_head_by_head(part, version, model.head_dim) for part in read]
        whole = joined(read, specs[name])
        whole = whole[:vocab_size] if name in (WORDS, OUTPUT) else whole
        return whole.float() if key else whole

    return WeightSource(
        model=model,
        true_vocab_size=vocab_size,
        dtypes={name: weights[name][0].dtype for name in specs},
        read=read,
        progress=progress_of(common, args, where),
        state_keys=tuple(key for key in places if key != WEIGHT),
        num_updates=updates,
        notes=tuple(notes),
    )


def _head_by_head(part: Tensor, version: float, width: int) -> Tensor:
    """Returns the rows of linear_qkv head by head. Before version 2.0 they had other orders."""
    if version >= 2.0:
        return part
    # version 0: [3, heads, d]; version 1.0: [heads, d, 3]
    shape, dims = ((3, -1, width), (0, 1)) if version == 0 else ((-1, width, 3), (1, 2))
    return part.view(*shape, *part.shape[1:]).transpose(*dims).reshape(part.shape)


# --- names ---

LONGEST_NAME = 1000
# Tensors without weights. TE keeps its FP8 scales as `_extra_state`, old releases their tables of
# the rotary embedding.
NO_WEIGHTS = re.compile(r"(.*\.)?(_extra_state(/.*)?|inv_freq|masked_bias)")
# In the names of the experts' parameters, here and in torch_dist, where those of all ranks are one.
EXPERTS, EXPERTS_THERE = ".mlp.experts.", ".mlp.experts.experts."
# Parts of names there and here, replaced in this order. A name begins with a point meanwhile.
OLDER = (
    (".language_model.embedding.", ".embedding."),
    (".language_model.encoder.", ".decoder."),
    (".language_model.transformer.", ".decoder."),
    (".language_model.output_layer.", ".output_layer."),
    (".word_embeddings_for_head.", ".output_layer."),
    (".decoder.final_norm.", ".decoder.final_layernorm."),
    (".attention.", ".self_attention."),
    (".input_norm.", ".input_layernorm."),
    (".post_attention_norm.", ".pre_mlp_layernorm."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    (".self_attention.query_key_value.", ".self_attention.linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
    (EXPERTS_THERE, EXPERTS),
)
# TE's fused layers hold the norms before them. torch_dist has these names for any layer spec.
FUSED_NORMS = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
ONE_EXPERT = re.compile(
    r"(.*\.mlp\.experts\.)(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d*)"
)
GROUPED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)weight([12])")


def our_name(name: str) -> str | None:
    """Returns the name here of a parameter in a checkpoint; None if it is no weight.

    A stacked name keeps no number: "decoder.layers.mlp.linear_fc1.weight".
    """
    name = re.sub(r"^(module\.)+", "", name)
    return None if NO_WEIGHTS.fullmatch(name) else _replaced(name, (*OLDER, *FUSED_NORMS))


def whole_parameters(
    held: Iterable[tuple[Ranks, str, Tensor]], model: ModelConfig, ep_size: int
) -> dict[str, list[Stack]]:
    """Returns the part of every TP rank by the parameter's name here.

    held: what each rank holds, by names there in which a layer has its number in the whole model.
    """
    found: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for (tp_rank, _, ep_rank), name, tensor in held:
        number = 0
        if one := ONE_EXPERT.fullmatch(name):
            name, number, tensor = f"{one[1]}{one[3]}", int(one[2] or one[4] or 0), tensor[None]
        elif grouped := GROUPED_EXPERTS.fullmatch(name):
            experts = (model.num_experts or 1) // ep_size
            rows = model.hidden_size if grouped[2] == "1" else tensor.shape[0] // experts
            name = f"{grouped[1]}linear_fc{grouped[2]}.weight"
            tensor = tensor.view(experts, rows, -1).transpose(1, 2)
        if EXPERTS in name or ep_rank == 0:  # the other expert ranks hold copies of all else
            found[name][tp_rank].append((ep_rank, number, tensor))
    whole: dict[str, list[Stack]] = {}
    for name, ranks in found.items():
        for pieces in ranks.values():
            pieces.sort(key=lambda piece: piece[:2])
            places = [piece[:2] for piece in pieces]
            size = 1 + places[-1][0]
            if places != [*itertools.product(range(size), range(len(places) // size))]:
                raise InputError(
                    f"{name}: is there twice, or its experts are not numbered from 0 to the last"
                )
        whole[name] = [Stack([piece[2] for piece in ranks[rank]]) for rank in sorted(ranks)]
    return whole


def has_stacks(model: ModelConfig) -> bool:
    """Returns whether a torch_dist checkpoint of a model stacks its layers in one tensor.

    Megatron-LM expects the layers one by one where only some of them may have experts.
    """
    return model.moe_layer_freq == 1


def dist_name(name: str, model: ModelConfig) -> str:
    """Returns the name of a parameter here in a torch_dist checkpoint that is written."""
    layer, own = layer_of(name)
    if layer is None:
        return name
    # Before experts the norm is a module of its own in each spec of layers.
    norms = FUSED_NORMS[: 1 if model.layer_has_experts(layer) else None]
    own = _replaced(own, [(ours, theirs) for theirs, ours in (*norms, (EXPERTS_THERE, EXPERTS))])
    return f"{LAYERS}{own}" if has_stacks(model) else f"{LAYERS}{layer}.{own}"


def _replaced(name: str, parts: Iterable[tuple[str, str]]) -> str:
    name = f".{name}"
    for old, new in parts:
        name = name.replace(old, new)
    return name[1:]


def has_decay(name: str, num_dims: int) -> bool:
    """Returns whether Megatron's optimizer decays a parameter."""
    return num_dims > 1 and not name.endswith(".bias")


def flat(values: Mapping[Any, Any], seen: set[int], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested dicts with their keys, joined with points.

    seen: the ids of all dicts that were read before, to which it adds its own.
    Raises ValueError for a dict that is read twice: a small file can hold one at very many places.
    """
    if id(values) in seen:
        raise ValueError("a state dict is at two places")
    seen.add(id(values))
    for key, value in values.items():
        if isinstance(key, str):
            name = f"{prefix}{key[:LONGEST_NAME]}"
            if isinstance(value, dict):
                yield from flat(value, seen, f"{name}.")
            else:
                yield name, value
