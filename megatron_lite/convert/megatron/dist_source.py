"""Reads a torch_dist checkpoint of Megatron-LM, which is a distributed checkpoint of torch (DCP).

iter_0000040/.metadata        a pickle: the shape of each tensor, its chunks, and where they are
             __0_0.distcp     chunks, each as a file of torch.save at some byte of this one
             common.pt        what is no tensor: the arguments, the iteration, step counts
             metadata.json    the name of the format

torch's own reader unpickles .metadata, which can run any code. This one runs none.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.other_systems import DIST_METADATA
from megatron_lite.checkpointing.shards import MOST_DIMS, MOST_ELEMENTS
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted, input_size, read_input
from megatron_lite.convert.megatron.checkpoint_args import arguments_of, model_of
from megatron_lite.convert.megatron.legacy_source import iteration_folder
from megatron_lite.convert.megatron.legacy_states import updates_of
from megatron_lite.convert.megatron.parameter_names import layer_name, our_name
from megatron_lite.convert.megatron.pickles import (
    LONGEST_NAME,
    MOST_BYTES,
    PickledObject,
    read_pickle,
)
from megatron_lite.convert.megatron.source import Found, MegatronSource, States, Unmapped
from megatron_lite.convert.megatron.torch_file import DTYPES, TORCH_NAMES, Window, read_torch_file
from megatron_lite.convert.parameters import check_layers

COMMON = "common.pt"
# The names of optimizer states in the checkpoint, by their names here.
STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "fp32_param"}
READ_STATES = {theirs: key for key, theirs in STATES.items()} | {"param": "master"}
NAME = re.compile(r"(?:(?:chained_0\.)?optimizer\.state\.(\w+)\.)?(?:model\d{0,3}\.)?(.+)")
NO_PARAMETERS = ("rng_state", "rerun_state", "opt_param_scheduler")


class Chunk(NamedTuple):
    """A block of a tensor. offsets, sizes: its place along each dim. window: its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    window: Window


@dataclass(frozen=True)
class DistTensor:
    """One tensor of the checkpoint, in chunks in the order of their first rows."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, index: int | None = None) -> Tensor:
        """Returns the tensor, or its part at an index of the first dim.

        Raises InputError if a chunk has another shape. Numbers that no chunk holds are NaN.
        """
        # Rows [first, last) of the first dim are wanted. A tensor without dims is one row.
        shape = self.shape or (1,)
        first, last = (0, shape[0]) if index is None else (index, index + 1)
        nothing = math.nan if self.dtype.is_floating_point else 0
        whole = torch.full((last - first, *shape[1:]), nothing, dtype=self.dtype)
        longest = max(chunk.sizes[0] for chunk in self.chunks)
        begin, end = (
            bisect_left(self.chunks, row, key=lambda chunk: chunk.offsets[0])
            for row in (first - longest + 1, last)
        )
        for chunk in self.chunks[begin:end]:
            start = max(first, chunk.offsets[0])
            stop = min(last, chunk.offsets[0] + chunk.sizes[0])
            place = whole[start - first : max(start, stop) - first]
            for dim in range(1, len(shape)):
                place = place.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            if place.numel():
                place.copy_(self._values(chunk)[start - chunk.offsets[0] : stop - chunk.offsets[0]])
        return whole.reshape(self.shape) if index is None else whole[0]

    def _values(self, chunk: Chunk) -> Tensor:
        return self._only if len(self.chunks) == 1 else self._opened(chunk)

    @cached_property
    def _only(self) -> Tensor:
        return self._opened(self.chunks[0])

    def _opened(self, chunk: Chunk) -> Tensor:
        value = read_torch_file(chunk.window)
        if (
            not isinstance(value, Tensor)
            or (value.shape or (1,)) != chunk.sizes
            or value.dtype != self.dtype
        ):
            raise InputError(
                f"{chunk.window}: must hold a chunk {chunk.sizes} of {self.name}: the checkpoint "
                "is damaged"
            )
        return value.reshape(chunk.sizes)


class LayerOfStack(NamedTuple):
    """A parameter's tensor, and its number in the first dim if the layers are stacked there."""

    tensor: DistTensor
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.layer is None else self.tensor.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        return self.tensor.read(self.layer)


Places = dict[str, list[LayerOfStack]]


def dist_source(path: Path) -> MegatronSource:
    """Opens a directory of `--save` with `--ckpt-format torch_dist`, or one iteration of it.

    Raises InputError if it is missing, damaged, or of another kind.
    """
    folder = iteration_folder(path)
    where = str(folder)
    tensors = _tensors_of(folder)
    common = read_torch_file(Window(folder / COMMON))
    args = arguments_of(common, f"{folder / COMMON}")
    model = model_of(args, where)
    # Layers may be stacked in one tensor, but each has at least one number.
    numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
    check_layers(model.num_layers, numbers, where)
    weights, states = _places(tensors, model.num_layers, where)
    try:
        found = _states(weights, states, common.get("optimizer"), tensors)
    except Unmapped as reason:
        found = States.missing(reason)
    return MegatronSource(
        Found(where=where, common=common, args=args, model=model, weights=weights, states=found)
    )


def _places(
    tensors: Mapping[str, DistTensor], num_layers: int, where: str
) -> tuple[Places, dict[str, Places]]:
    """Returns the places of parameters, and those of optimizer states by state."""
    weights: Places = {}
    states: dict[str, Places] = {}
    for full, tensor in tensors.items():
        state, name = NAME.fullmatch(full).groups()  # type: ignore[union-attr]
        is_state = "optimizer." in full
        found = our_name(name)
        if (
            found is None
            or full.startswith(NO_PARAMETERS)
            or (is_state and state not in READ_STATES)
        ):
            continue
        into = states.setdefault(READ_STATES[state], {}) if is_state else weights
        if not found.stacked:
            into[found.whole()] = [LayerOfStack(tensor)]
        elif tensor.shape[:1] == (num_layers,):
            for layer in range(num_layers):
                into[layer_name(layer, found.name)] = [LayerOfStack(tensor, layer)]
        elif not is_state:  # an optimizer that shards its states: they are not read
            raise InputError(
                f"{where}: {full} has the shape {tensor.shape}, and the first dim must be the "
                f"{num_layers} layers of the model"
            )
    return weights, states


def _states(
    weights: Places, states: Mapping[str, Places], optimizer: Any, names: Mapping[str, object]
) -> States:
    """Returns the states that every parameter has. Raises Unmapped if they cannot be read."""
    if not any("optimizer." in name for name in names):
        raise Unmapped("the checkpoint holds no optimizer states")
    parts = {
        key: states[key]
        for key in STATES
        if key in states
        and all(
            name in states[key] and states[key][name][0].shape == own.shape
            for name, (own,) in weights.items()
        )
    }
    if not {"exp_avg", "exp_avg_sq"} <= parts.keys():
        raise Unmapped(
            "the optimizer states are not kept by parameter (as those of the distributed optimizer "
            "are without --dist-ckpt-optim-fully-reshardable)"
        )
    while isinstance(optimizer, dict) and "param_groups" not in optimizer:
        optimizer = optimizer.get("optimizer")  # the values of some optimizers are nested
    if not isinstance(optimizer, dict) or not isinstance(optimizer["param_groups"], list):
        raise Unmapped("the checkpoint does not say how many updates the optimizer made")
    state = optimizer.get("state")
    updates = updates_of(optimizer["param_groups"], state if isinstance(state, dict) else {})
    return States(num_updates=updates, parts=parts)


def _tensors_of(folder: Path) -> dict[str, DistTensor]:
    """Returns all tensors by name, from .metadata alone."""
    path = folder / DIST_METADATA
    if not path.exists():
        legacy = any(folder.glob("mp_rank_*"))
        hint = "; its mp_rank_* folders have the format --from megatron" if legacy else ""
        raise InputError(
            f"{folder}: holds no {DIST_METADATA}: it is no torch_dist checkpoint{hint}"
        )
    value = read_pickle(read_input(path, MOST_BYTES), str(path), names=TORCH_NAMES)
    with crafted(f"{path}: its description of tensors"):
        windows = {
            _place(key.fields["fqn"], key.fields.get("offset")): _window(folder, place.fields)
            for key, place in value.fields["storage_data"].items()
        }
        # Chunks that share bytes would let a small file hold very many of them.
        lengths: Counter[Path] = Counter()
        for window in windows.values():
            lengths[window.path] += window.length or 0
        for shard, length in lengths.items():
            if length > input_size(shard):
                raise ValueError(f"the chunks in {shard.name} have more bytes than the file")
        return {
            name: _tensor(name, found.fields, windows)
            for name, found in value.fields["state_dict_metadata"].items()
            if isinstance(found, PickledObject) and found.kind.endswith(".TensorStorageMetadata")
        }


def _place(name: Any, offsets: Any) -> str:
    """Returns a key for a chunk: a text, since a file can choose numbers whose hashes collide."""
    if type(name) is not str or len(name) > LONGEST_NAME:
        raise ValueError("a tensor has no name")
    return f"{None if offsets is None else _sizes(offsets)} of {name}"


def _window(folder: Path, place: Mapping[str, Any]) -> Window:
    name, start, length = (place[key] for key in ("relative_path", "offset", "length"))
    # A name with folders could point at any file of this machine.
    if type(name) is not str or name != Path(name).name or name in ("", ".", ".."):
        raise ValueError("a chunk is outside of the folder")
    if type(start) is not int or type(length) is not int or min(start, length) < 0:
        raise ValueError(f"a chunk of {name} has no place")
    if place.get("transform_descriptors"):
        raise ValueError("its chunks are compressed or encrypted")
    return Window(folder / name, start, length)


def _tensor(name: str, found: Mapping[str, Any], windows: Mapping[str, Window]) -> DistTensor:
    shape, properties = _sizes(found["size"]), found["properties"]
    # The state of TensorProperties is a tuple or a dict.
    dtype = (properties.fields.get("dtype") or properties.state[0]).text
    if dtype not in DTYPES:
        raise ValueError(f"{name} is of another kind than plain tensors")
    chunks = []
    for one in found["chunks"]:
        offsets, sizes = _sizes(one.fields["offsets"]), _sizes(one.fields["sizes"])
        if any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"a chunk of {name} lies outside of the tensor")
        window = windows.get(_place(name, offsets))
        if window is None or math.prod(sizes) * DTYPES[dtype].itemsize > (window.length or 0):
            raise ValueError(f"a chunk of {name} is in no file")
        chunks.append(Chunk(offsets or (0,), sizes or (1,), window))
    covered, numel = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(shape)
    if covered != numel:
        raise ValueError(f"the chunks of {name} hold {covered} of its {numel} numbers")
    return DistTensor(
        name, shape, DTYPES[dtype], tuple(sorted(chunks, key=lambda one: one.offsets))
    )


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MOST_DIMS:
        raise ValueError("a shape is no list of numbers")
    if any(type(size) is not int or not 0 <= size <= MOST_ELEMENTS for size in value):
        raise ValueError("a shape has sizes of no tensor")
    return value
