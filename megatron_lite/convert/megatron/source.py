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

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.start import ITERATION, megatron_format, pointed_step
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError, Values
from megatron_lite.config.input_file import crafted
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.weights import (
    LAYERS,
    OUTPUT,
    WORDS,
    Shape,
    WeightSource,
    check_held,
    is_buffer,
    layer_of,
    parameter_specs,
)

from .args import ADAM, MASTER, TABLES, progress_of, vocabulary_of

MOST_UPDATES = 10**9 - 1


class Chunk(NamedTuple):
    """A block of a tensor. offsets, sizes: its place along each dim. read: returns its numbers."""

    offsets: Shape
    sizes: Shape
    read: Callable[[], Tensor]


class Chunked(NamedTuple):
    """A whole tensor, which the files hold in chunks."""

    shape: Shape
    dtype: torch.dtype
    chunks: Sequence[Chunk]

    def checked(self, name: str) -> Chunked:
        """Returns it. Raises ValueError unless the chunks lie inside, and have as many numbers."""
        for offsets, sizes, _ in self.chunks:
            ends = map(sum, zip(offsets, sizes, strict=True))
            if any(end > whole for end, whole in zip(ends, self.shape, strict=True)):
                raise ValueError(f"a chunk of {name} lies outside of the tensor")
        covered = sum(math.prod(chunk.sizes) for chunk in self.chunks)
        if covered != (numel := math.prod(self.shape)):
            raise ValueError(f"the chunks of {name} hold {covered} of its {numel} numbers")
        return self

    def read(self) -> Tensor:
        """Returns the numbers. Those that no chunk holds are NaN."""
        whole = torch.full(self.shape, math.nan, dtype=self.dtype)
        for offsets, sizes, read in self.chunks:
            place = zip(offsets, sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in place)] = read()
        return whole


# By the name in the whole model, as in WeightSource.
Parameters = dict[str, Chunked]


class Unmapped(InputError):
    """A reason for which optimizer states cannot be mapped to parameters."""


def need(condition: bool, reason: str) -> None:
    """Raises Unmapped unless the condition holds."""
    if not condition:
        raise Unmapped(reason)


def opened(path: Path, name: str, read: Callable[[Path], WeightSource]) -> WeightSource:
    """Returns what `read` makes of the folder of the iteration that a directory's pointer names.

    A path without a pointer is the folder of an iteration itself. name: that of the format.
    Raises InputError if the path is no directory of the format, or if the pointer names nothing.
    """
    if not path.is_dir():
        raise InputError(f"--load {path}: no such directory")
    has_pointer = (path / LATEST).exists()
    folder = pointed_step(path, "release") if has_pointer else path
    found = megatron_format(folder)
    if found != name:
        raise InputError(
            f"{folder}: holds no checkpoint of the format {name}"
            f"{f': it is one of --from {found}' if found else ''}"
        )
    inside = [one.name for one in path.iterdir() if ITERATION.fullmatch(one.name)]
    if inside and not has_pointer:
        raise InputError(
            f"--load {path}: lacks {LATEST}, which names the iteration to read: copy that file "
            f"too, or give the folder of one iteration, such as --load {path / max(inside)}"
        )
    with crafted(str(folder)):
        return read(folder)


def updates_of(groups: list[Any], states: Mapping[Any, Any]) -> int:
    """Returns how many updates an optimizer made. Raises Unmapped if that is not clear."""
    holders = [*groups, *states.values(), {"step": states.get("common_step")}]
    found = [one.get("step") for one in holders if isinstance(one, dict)]
    steps = {float(step) for step in found if step is not None}
    step = steps.pop() if len(steps) == 1 else -1.0
    is_known = step.is_integer() and 0 <= step <= MOST_UPDATES
    need(is_known, "they do not say how many updates were made")
    return int(step)


def megatron_source(
    where: str,
    common: Values,
    args: Values,
    model: ModelConfig,
    weights: Parameters,
    states: Callable[[], tuple[Parameters, int]],
) -> WeightSource:
    """Returns the weights of a checkpoint, and its optimizer states if they can be mapped.

    where: its folder. common: values that are no tensors. args: the arguments of the run.
    states: returns the optimizer states, and how many updates the optimizer made. It raises
        Unmapped if they cannot be converted.
    Raises InputError if the weights are not those of the model that the arguments describe.
    """
    if not model.untie_embeddings_and_output_weights:
        weights.pop(OUTPUT, None)  # with tied embeddings the last stage has a copy of them
    padded = weights[WORDS].shape[0]
    vocab_size, notes = vocabulary_of(args, padded)
    specs = parameter_specs(model, padded)
    check_held(where, weights, {name: spec.global_shape for name, spec in specs.items()}, "args")
    found: Parameters = {}
    updates = 0
    try:
        found, updates = states()
        keys = [
            key
            for key in (*ADAM, MASTER)
            if all(
                (one := found.get(f"{name}/{key}")) and one.shape == weight.shape
                for name, weight in weights.items()
                if not is_buffer(name)
            )
        ]
        need({*ADAM} <= {*keys}, "some parameters have none, or those of another shape")
    except Unmapped as reason:
        keys = []
        notes.append(
            f"the optimizer states are left out ({reason}): the weights alone are converted"
        )

    def read(name: str) -> Tensor:
        parameter, _, key = name.partition("/")
        whole = (found if key else weights)[name].read()
        return whole[:vocab_size] if parameter in (WORDS, OUTPUT) else whole

    return WeightSource(
        model=model,
        true_vocab_size=vocab_size,
        dtypes={name: one.dtype for name, one in weights.items()},
        read=read,
        progress=progress_of(common, args, where),
        state_keys=tuple(keys),
        num_updates=updates,
        notes=tuple(notes),
    )


# --- names ---

LONGEST_NAME = 1000
# Tensors without weights. TE keeps its FP8 scales as `_extra_state`, old releases their tables of
# the rotary embedding.
NO_WEIGHTS = re.compile(r"(.*\.)?(_extra_state(/.*)?|inv_freq|masked_bias)")
EXPERTS = ".mlp.experts."  # in the names of their parameters


def our_name(name: str) -> str | None:
    """Returns the name here of a parameter in a checkpoint; None if it is no weight.

    A stacked name keeps no number: "decoder.layers.mlp.linear_fc1.weight".
    """
    name = re.sub(r"^(module\.)+", "", name)
    return (
        None if NO_WEIGHTS.fullmatch(name) else _replaced(name, TABLES["names"] | TABLES["norms"])
    )


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
    places = {ours: theirs for theirs, ours in TABLES["norms"].items()}
    # Down projections have no norm in them, nor has linear_qkv that of queries.
    latents = model.multi_latent_attention
    del places[".input_layernorm." if latents else ".self_attention.q_layernorm."]
    if model.layer_has_experts(layer):
        del places[".pre_mlp_layernorm."]  # a module of its own in each spec of layers
    own = _replaced(own, {**places, EXPERTS: ".mlp.experts.experts."})
    return f"{LAYERS}{own}" if has_stacks(model) else f"{LAYERS}{layer}.{own}"


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    name = f".{name}"  # a name in the table begins with a point
    for old, new in parts.items():
        name = name.replace(old, new)
    return name[1:]


def is_in_group(name: str, num_dims: int, *, decays: bool) -> bool:
    """Returns whether a parameter is in the group of Megatron's optimizer with weight decay, or
    without it."""
    return not is_buffer(name) and (num_dims > 1 and not name.endswith(".bias")) == decays


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
