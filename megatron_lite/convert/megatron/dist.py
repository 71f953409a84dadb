"""Reads and writes a torch_dist checkpoint of Megatron-LM, a distributed checkpoint of torch (DCP).

iter_0000040/.metadata        a pickle: the shape of each tensor, its chunks, and where they are
             __0_0.distcp     chunks, each as a file of torch.save at some byte of this one
             common.pt        what is no tensor: the arguments, the iteration, step counts
             metadata.json    the name of the format

torch's own reader unpickles .metadata, which can run any code. This one runs none. Any layer spec
and layout loads what is written: a parameter of all layers is one tensor with the layers as its
first dim, in one chunk a layer, unless only some layers have experts: then it has a tensor for each
layer, and no stack is expected.
"""

import copyreg
import json
import math
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp

from megatron_lite.checkpointing.metadata import MOST_DIMS, MOST_ELEMENTS
from megatron_lite.checkpointing.start import DIST_METADATA
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted, input_size, read_input
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.weights import LAYERS, WORDS, Shape, WeightSource, check_number, layer_of
from megatron_lite.parallel.torch_internals import storage_info

from . import args as megatron_args
from .source import (
    EXPERTS,
    Chunk,
    Chunked,
    Parameters,
    dist_name,
    has_stacks,
    megatron_source,
    need,
    opened,
    our_name,
    updates_of,
)
from .torch_file import DTYPES, LONGEST_NAME, MOST_BYTES, Window, read_pickle, read_torch_file

MOST_NESTED = 4  # levels of the values of an optimizer
COMMON, SHARDS = "common.pt", "__0_0.distcp"
# The names of optimizer states in the checkpoint, by those here.
STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "fp32_param"}
KEYS = {"param": "master"} | {theirs: key for key, theirs in STATES.items()}
NAME = re.compile(r"(?:(?:chained_0\.)?optimizer\.state\.(\w+)\.)?(?:model\d{0,3}\.)?(.+)")
LINEAR = re.compile(r"\.linear_\w+\.weight$")
OTHERS = re.compile(r"optimizer\.|^(rng_state|rerun_state|opt_param_scheduler)")


def source(path: Path) -> WeightSource:
    """Opens a directory of `--save` with `--ckpt-format torch_dist`, or one iteration of it.

    Raises InputError if it is missing, damaged, or of another kind.
    """
    return opened(path, "megatron-dist", _opened)


def _opened(folder: Path) -> WeightSource:
    where, tensors = str(folder), _tensors_of(folder)
    common = read_torch_file(Window(folder / COMMON))
    args = megatron_args.arguments_of(common, folder / COMMON)
    model = megatron_args.model_of(args, where)
    # Layers may be stacked in one tensor, but each has at least one number.
    numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
    check_number("layers", model.num_layers, numbers, where)
    weights: Parameters = {}
    saved: Parameters = {}
    for full, tensor in tensors.items():
        state, name = NAME.fullmatch(full).groups()  # type: ignore[union-attr]
        ours, key = our_name(name), f"/{KEYS.get(state, state)}" if state else ""
        if ours is None or OTHERS.search(name):
            continue
        held = saved if state else weights
        if not ours.startswith(LAYERS) or layer_of(ours)[0] is not None:
            held[ours + key] = tensor
        elif tensor.shape[:1] == (model.num_layers,):
            for layer, part in enumerate(_layers(tensor)):
                held[ours.replace(LAYERS, f"{LAYERS}{layer}.", 1) + key] = part
        else:
            raise InputError(
                f"{where}: {full} has the shape {tensor.shape}, and the first dim must be the "
                f"{model.num_layers} layers of the model"
            )

    def states() -> tuple[Parameters, int]:
        need(
            f"{WORDS}/exp_avg" in saved,
            "the checkpoint holds no optimizer states that are kept by parameter, as those of the "
            "distributed optimizer are with --dist-ckpt-optim-fully-reshardable",
        )
        optimizer = common
        for _ in range(MOST_NESTED):
            if "param_groups" not in optimizer:
                optimizer = optimizer.get("optimizer") or {}
        need("param_groups" in optimizer, "the checkpoint does not say how many updates were made")
        return saved, updates_of(optimizer["param_groups"], optimizer.get("state") or {})

    return megatron_source(where, common, args, model, weights, states)


def _layers(stack: Chunked) -> Iterator[Chunked]:
    """Yields the tensor of each layer of a stack."""
    # A chunk that holds numbers holds at least one for each of its rows, so this takes no more
    # time than the numbers take bytes.
    chunks = defaultdict(list)
    for chunk in stack.chunks:
        for row in range(chunk.sizes[0]):
            part = Chunk(chunk.offsets[1:], chunk.sizes[1:], partial(_row, chunk, row))
            chunks[chunk.offsets[0] + row].append(part)
    for layer in range(stack.shape[0]):
        yield Chunked(stack.shape[1:], stack.dtype, chunks[layer])


def _row(chunk: Chunk, row: int) -> Tensor:
    return chunk.read()[row]


def _tensors_of(folder: Path) -> Parameters:
    """Returns all tensors by name, from .metadata alone."""
    path = folder / DIST_METADATA
    found = read_pickle(read_input(path, MOST_BYTES), str(path))
    with crafted(f"{path}: its description of tensors"):
        windows = {}
        lengths: Counter[Path] = Counter()
        for key, place in found.storage_data.items():
            name = place.relative_path
            # A name with folders could point at any file of this machine.
            if name != Path(name).name or getattr(place, "transform_descriptors", None):
                raise ValueError("a chunk is outside of the folder, compressed or encrypted")
            window = Window(folder / name, *_sizes((place.offset, place.length)))
            windows[_place(key.fqn, getattr(key, "offset", None))] = window
            lengths[window.path] += place.length
        # Chunks that share bytes would let a small file hold very many of them.
        for shard, length in lengths.items():
            if length > input_size(shard):
                raise ValueError(f"the chunks in {shard.name} have more bytes than the file")
        return {
            name: _tensor(name, one, windows)
            for name, one in found.state_dict_metadata.items()
            if one.kind.endswith(".TensorStorageMetadata")
        }


def _place(name: Any, offsets: Any) -> str:
    """Returns a key for a chunk: a text, since a file can choose numbers whose hashes collide."""
    if type(name) is not str or len(name) > LONGEST_NAME:
        raise ValueError("a tensor has no name")
    return f"{None if offsets is None else _sizes(offsets)} of {name}"


def _tensor(name: str, found: Any, windows: Mapping[str, Window]) -> Chunked:
    shape, properties = _sizes(found.size), found.properties
    # The state of TensorProperties is a tuple or a dict.
    dtype = DTYPES[(getattr(properties, "dtype", None) or properties.state[0]).kind]
    chunks = []
    for one in found.chunks:
        offsets, sizes = _sizes(one.offsets), _sizes(one.sizes)
        window = windows.get(_place(name, offsets))
        if window is None or math.prod(sizes) * dtype.itemsize > (window.length or 0):
            raise ValueError(f"a chunk of {name} is in no file")
        if math.prod(sizes):
            chunks.append(Chunk(offsets, sizes, partial(_read, window, name, sizes, dtype)))
    return Chunked(shape, dtype, chunks).checked(name)


def _read(window: Window, name: str, sizes: Shape, dtype: torch.dtype) -> Tensor:
    value = read_torch_file(window)
    if not isinstance(value, Tensor) or (value.dtype, value.shape) != (dtype, sizes):
        raise InputError(
            f"{window}: must hold a chunk {sizes} of {name}: the checkpoint is damaged"
        )
    return value


def _sizes(value: Any) -> Shape:
    if type(value) is not tuple or len(value) > MOST_DIMS:
        raise ValueError("a shape is no list of numbers")
    if any(type(size) is not int or not 0 <= size <= MOST_ELEMENTS for size in value):
        raise ValueError("a shape or a place has numbers of no checkpoint")
    return value


# --- writing ---


def write(source: WeightSource, path: Path) -> None:
    """Writes all that the source has into a new directory, as Megatron-LM's `--save` does with
    `--ckpt-format torch_dist`. The directory appears complete, or not at all."""
    megatron_args.check_exact(source, "megatron-dist")
    model, padded = source.model, megatron_args.padded_vocab_size(source, 1)
    tensors: dict[str, Any] = {}
    places = {}
    with megatron_args.new_iteration(source, path) as step:
        with (step / SHARDS).open("wb") as file:

            def save(name: str, value: Any, offsets: torch.Size | None = None) -> None:
                start = file.tell()
                torch.save(value, file)
                place = storage_info()(SHARDS, start, file.tell() - start)
                places[dcp.MetadataIndex(name, offsets)] = place

            for stored in source.sizes:
                name, _, key = stored.partition("/")
                values = source.checked(stored)
                values = megatron_args.with_padding(name, values, padded)
                shape, offsets, (layer, _) = values.shape, (0,) * values.dim(), layer_of(name)
                if layer is not None and has_stacks(model):  # a chunk of the tensor of all layers
                    values, offsets = values[None], (layer, *offsets)
                    shape = torch.Size((model.num_layers, *shape))
                full = dist_name(name, model)
                full = f"optimizer.state.{STATES[key]}.{full}" if key else full
                whole = dcp.TensorStorageMetadata(dcp.TensorProperties(values.dtype), shape, [])
                chunk = dcp.ChunkStorageMetadata(torch.Size(offsets), values.shape)
                tensors.setdefault(full, whole).chunks.append(chunk)
                save(full, values.clone(), chunk.offsets)  # of a view, all values would be saved
            for full in (one for name in source.specs for one in _extra_states(name, model)):
                tensors[full] = dcp.BytesStorageMetadata()
                save(full, [None])
        metadata = dcp.Metadata(tensors, storage_data=places)
        with (step / DIST_METADATA).open("wb") as file:
            pickler = pickle.Pickler(file)
            pickler.dispatch_table = copyreg.dispatch_table | {
                dcp.TensorProperties: _without_strides
            }
            pickler.dump(metadata)
        common = megatron_args.common_values(source, tp_size=1, pp_size=1)
        if source.state_keys:
            optimizer = {"state": {}, "param_groups": megatron_args.groups(source)}
            nested = megatron_args.MASTER in source.state_keys
            common["optimizer"] = {"optimizer": optimizer} if nested else optimizer
        torch.save(common, step / COMMON)
        (step / "metadata.json").write_text(json.dumps(megatron_args.TABLES["format"]))


def _extra_states(name: str, model: ModelConfig) -> Iterator[str]:
    """Yields the names of the `_extra_state` of a linear layer, by the name of its weight.

    Megatron-LM asks for it. It is empty without FP8. Each layer of a stack and each expert has one.
    """
    layer, _ = layer_of(name)
    if layer is None or not LINEAR.search(name):
        return
    is_stacked, of_experts = has_stacks(model), EXPERTS in name
    count = (model.num_experts or 1) if of_experts else 1
    sizes = [model.num_layers] * is_stacked + [count] * of_experts or [1]
    for expert in range(count):
        numbers = [layer] * is_stacked + [expert] * of_experts or [0]
        yield (
            f"{dist_name(name, model).removesuffix('weight')}_extra_state/shard_"
            f"{'_'.join('.'.join(map(str, one)) for one in (numbers, sizes))}"
        )


def _without_strides(properties: Any) -> Any:
    """Returns the reduced form of properties without the strides, the last value of their state
    since torch 2.15: an older torch cannot read them."""
    made, kind, state, *_ = properties.__reduce_ex__(2)
    return made, kind, state[:5]
