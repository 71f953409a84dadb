"""Reads and writes a Hugging Face checkpoint: config.json, safetensors, the files of a tokenizer.

Opening reads the headers of all files. Missing, unexpected and misshapen tensors are refused before
any work is done. Pickled weights (pytorch_model.bin) are never read. What is written opens with
AutoModelForCausalLM.from_pretrained: files of at most 5 GB, with an index if they are several.
Weights keep their dtype. Optimizer states are left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS, naming, open_tensors
from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import CONFIG, exact_fields, read_hf_file, to_hf
from megatron_lite.config.hf_families import FAMILIES
from megatron_lite.config.input_file import crafted, read_json
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.plain import shown
from megatron_lite.convert.hf_tensors import (
    BUFFERS,
    LAYOUTS,
    head_of,
    known_name,
    row_of,
    their_shapes,
)
from megatron_lite.convert.safetensors_file import safetensors_files
from megatron_lite.convert.staging import complete_folder
from megatron_lite.convert.stored_tokenizer import json_bytes, stored_tokenizer
from megatron_lite.convert.weights import (
    OUTPUT,
    WEIGHT,
    WORDS,
    Advance,
    Described,
    WeightSource,
    check_layers,
    copy_tensors,
    parameter_specs,
    refused,
)
from megatron_lite.data.tokenizer_files import in_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MOST_NAMED = 5
LARGEST_INDEX = 2**26
SHARD_BYTES = 5 * 10**9


class TensorInFile(NamedTuple):
    """A tensor in a file, as the library's object that reads it."""

    file: Path
    name: str
    values: Any

    def read(self) -> Tensor:
        with naming(self.file, self.name):
            return self.values[:]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.get_shape())

    @property
    def dtype(self) -> str:
        return str(self.values.get_dtype())


def hf_source(path: Path) -> WeightSource:
    """Opens a folder as `save_pretrained` writes it.

    Raises InputError for a family or a value that does not map, with the reason, and for files that
    are missing, truncated or of another model.
    """
    if not path.is_dir():
        raise InputError(
            f"--load {path}: no such directory (the format hf is a folder with {CONFIG} and "
            "safetensors files; nothing is downloaded)"
        )
    mapped = read_hf_file(path)
    family = mapped.family
    with refused(str(path / CONFIG)):
        model = ModelConfig(**exact_fields(mapped, path / CONFIG))
    places = _places(path, family)
    check_layers(model.num_layers, len(places), path / CONFIG)
    specs = parameter_specs(model, mapped.vocab_size)
    shapes = their_shapes(family, {name: spec.global_shape for name, spec in specs.items()}, model)
    head, is_tied = head_of(family), OUTPUT not in specs
    # Files of a tied model may hold the head too. It must then equal the embedding (`read`).
    held = places.keys() - ({head} if is_tied else set())
    _check_names(path, family, held, {part for parts in shapes.values() for part in parts})
    for parts in shapes.values():
        _check_parts([(places[part], shape) for part, shape in parts.items()])

    def read(name: str, key: str = WEIGHT) -> Tensor:
        row = row_of(family, name)
        parts = [places[part].read() for part in row.theirs]
        has_copy = name == WORDS and is_tied and head in places
        if has_copy and not torch.equal(parts[0], places[head].read()):
            raise InputError(
                f"{CONFIG} says tie_word_embeddings true, but {head} differs from the embedding: "
                "correct one of them"
            )
        return LAYOUTS[row.layout].join(parts, model)

    described = Described(
        model=model,
        true_vocab_size=mapped.vocab_size,
        dtypes={name: FLOATS[places[min(parts)].dtype] for name, parts in shapes.items()},
        tokenizer=in_folder(path),
        token_ids=mapped.token_ids,
        notes=mapped.notes,
    )
    return WeightSource(described, read)


def _places(folder: Path, family: str) -> dict[str, TensorInFile]:
    """Returns where each tensor lies, by the name under which it is known here."""
    found: dict[str, TensorInFile] = {}
    for file in _weight_files(folder):
        with naming(file):
            opened = open_tensors(file)
            for name in opened.keys():  # noqa: SIM118, no mapping
                found[name] = TensorInFile(file, name, opened.get_slice(name))
    has_base = any(name.startswith(f"{FAMILIES[family]['base']}.") for name in found)
    return {known_name(family, name, has_base=has_base): one for name, one in found.items()}


def _check_names(folder: Path, family: str, held: Set[str], needed: Set[str]) -> None:
    """Raises InputError for tensors that are missing, or not expected."""
    for what, names in (
        ("tensors missing from the files", needed - held),
        (
            f"tensors in the files, and a {family} of this {CONFIG} has none of that name",
            {name for name in held - needed if not BUFFERS.search(name)},
        ),
    ):
        if names:
            faults = sorted(names)
            more = f" and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
            raise InputError(f"{folder}: {what}: {shown(', '.join(faults[:MOST_NAMED]))}{more}")


def _check_parts(parts: Sequence[tuple[TensorInFile, tuple[int, ...]]]) -> None:
    """Raises InputError unless the parts of a parameter have their shapes, and one dtype."""
    dtypes = {place.dtype for place, _ in parts}
    for place, shape in parts:
        if place.shape != shape:
            raise InputError(
                f"{place.file}: {place.name} has the shape {place.shape}, but {CONFIG} describes "
                f"{shape}: they belong to different models"
            )
        if not dtypes <= FLOATS.keys() or len(dtypes) > 1:
            raise InputError(
                f"{place.file}: {place.name} has the dtype {place.dtype}, only {', '.join(FLOATS)} "
                "are read, and one for all parts of a matrix: convert quantised weights to one of "
                "them first"
            )


def _weight_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / INDEX):
        with crafted(str(folder / INDEX)):
            weight_map = read_json(folder / INDEX, LARGEST_INDEX)["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
            for name in names:
                if Path(name).name != name:
                    raise ValueError(f"weight_map names {name!r}, which is no file's name")
        return [folder / name for name in names]
    if os.path.lexists(folder / WEIGHTS):
        return [folder / WEIGHTS]
    pickles = [name for name in PICKLES if (folder / name).exists()]
    if pickles:
        raise InputError(
            f"{folder / pickles[0]} is pickled, and reading a pickle may run any code: convert it "
            "with transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), "
            "where you trust its author"
        )
    raise InputError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")


def write_hf(
    source: WeightSource,
    path: Path,
    advance: Advance,
    *,
    family: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the weights into a new folder, which appears complete, or not at all.

    family: the model_type to write; None: the first that expresses the model exactly.
    shard_bytes: the largest size of a file. A single tensor may exceed it.
    Raises InputError if no family, or not the given one, expresses the model exactly.
    """
    described = source.described
    model = described.model
    with refused("--to hf"):
        config = to_hf(model, described.true_vocab_size, family)
    tokenizer, end = stored_tokenizer(described)
    family = config["model_type"]
    shapes = {name: spec.global_shape for name, spec in described.specs.items()}
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    sizes = [0]
    for name, parts in their_shapes(family, shapes, model).items():
        dtype = described.dtypes[name]
        num_bytes = math.prod(shapes[name]) * dtype.itemsize
        if sizes[-1] and sizes[-1] + num_bytes > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1].update({part: (dtype, shape) for part, shape in parts.items()})
        sizes[-1] += num_bytes
    count = len(shards)
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    tensors = dict(zip(names if count > 1 else [WEIGHTS], shards, strict=True))
    weight_map = {part: file for file, parts in tensors.items() for part in parts}
    config |= dict(bos_token_id=None, eos_token_id=end, pad_token_id=None)
    config |= dict(torch_dtype=str(described.dtype).removeprefix("torch."), **described.token_ids)
    texts = {**tokenizer, CONFIG: json_bytes(config)}
    if count > 1:
        total = {"total_size": sum(sizes)}
        texts[INDEX] = json_bytes({"metadata": total, "weight_map": weight_map})
    if "tokenizer.json" in tokenizer and "tokenizer_config.json" not in tokenizer:
        # AutoTokenizer asks this file for the class.
        texts["tokenizer_config.json"] = json_bytes({"tokenizer_class": "PreTrainedTokenizerFast"})
    with complete_folder(path) as folder:
        with safetensors_files(folder, tensors, {"format": "pt"}) as write:

            def put(name: str, key: str, tensor: Tensor) -> None:
                row = row_of(family, name)
                values = LAYOUTS[row.layout].split(tensor, model)
                for part, value in zip(row.theirs, values, strict=True):
                    write(weight_map[part], part, value)

            copy_tensors(source, put, advance, [WEIGHT])
        for name, content in texts.items():
            (folder / name).write_bytes(content)
