"""Reads and writes a Hugging Face checkpoint: config.json, safetensors, the files of a tokenizer.

Opening reads the headers of all files. Missing, unexpected and misshapen tensors are refused before
any work is done. Pickled weights (pytorch_model.bin) are never read. What is written opens with
AutoModelForCausalLM.from_pretrained: files of at most 5 GB, with an index if they are several.
Weights keep their dtype. Optimizer states are left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS, open_tensors
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
)
from megatron_lite.data.tokenizer_files import in_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MOST_NAMED = 5
LARGEST_INDEX = 2**26
SHARD_BYTES = 5 * 10**9


class TensorInFile(NamedTuple):
    """A tensor in a file: its name there, and the library's object that reads it."""

    file: Path
    name: str
    values: Any

    def read(self) -> Tensor:
        with _reading(self.file):
            return self.values[:]


class HfSource:
    """A folder as `save_pretrained` writes it.

    Raises InputError for a family or a value that does not map, with the reason, and for files that
    are missing, truncated or of another model.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise InputError(
                f"--load {path}: no such directory (the format hf is a folder with {CONFIG} and "
                "safetensors files; nothing is downloaded)"
            )
        self._folder = path
        mapped = read_hf_file(path)
        self._family, fields = mapped.family, exact_fields(mapped, path / CONFIG)
        try:
            model = ModelConfig(**fields)
        except ValueError as error:
            raise InputError(f"{path / CONFIG}: {error}") from error
        self._places = self._find()
        check_layers(model.num_layers, len(self._places), path / CONFIG)
        specs = parameter_specs(model, mapped.vocab_size)
        self._shapes = their_shapes(
            self._family, {name: spec.global_shape for name, spec in specs.items()}, model
        )
        self._check(is_tied=OUTPUT not in specs)
        places = {name: self._places[next(iter(parts))] for name, parts in self._shapes.items()}
        self.described = Described(
            model=model,
            true_vocab_size=mapped.vocab_size,
            dtypes={name: FLOATS[place.values.get_dtype()] for name, place in places.items()},
            tokenizer=in_folder(path),
            token_ids=mapped.token_ids,
            notes=mapped.notes,
        )

    def read(self, name: str, key: str = WEIGHT) -> Tensor:
        """Returns one parameter, in the dtype of the file. There are no states."""
        row = row_of(self._family, name)
        parts = [self._places[part].read() for part in row.theirs]
        head = head_of(self._family)
        has_copy = name == WORDS and OUTPUT not in self._shapes and head in self._places
        if has_copy and not torch.equal(parts[0], self._places[head].read()):
            raise InputError(
                f"{CONFIG} says tie_word_embeddings true, but {head} differs from the embedding: "
                "correct one of them"
            )
        return LAYOUTS[row.layout].join(parts, self.described.model)

    def _find(self) -> dict[str, TensorInFile]:
        """Returns where each tensor lies, by the name under which it is known here."""
        found: dict[str, TensorInFile] = {}
        for file in _weight_files(self._folder):
            with _reading(file):
                opened = open_tensors(file).__enter__()
                for name in opened.keys():  # noqa: SIM118, no mapping
                    found[name] = TensorInFile(file, name, opened.get_slice(name))
        base = f"{FAMILIES[self._family].tensors.base}."
        has_base = any(name.startswith(base) for name in found)
        return {
            known_name(self._family, name, has_base=has_base): place
            for name, place in found.items()
        }

    def _check(self, *, is_tied: bool) -> None:
        """Raises InputError for tensors that are missing, not expected, or do not map."""
        expected = {part for parts in self._shapes.values() for part in parts}
        _refuse(f"{self._folder}: tensors missing from the files", expected - self._places.keys())
        # Files of a tied model may hold the head too. It must then equal the embedding (`read`).
        allowed = expected | ({head_of(self._family)} if is_tied else set())
        _refuse(
            f"{self._folder}: tensors in the files, and a {self._family} of this {CONFIG} has none "
            "of that name",
            {name for name in self._places.keys() - allowed if not BUFFERS.search(name)},
        )
        for parts in self._shapes.values():
            dtypes = {self._places[part].values.get_dtype() for part in parts}
            for part, shape in parts.items():
                file, name, values = self._places[part]
                found = tuple(values.get_shape())
                if found != shape:
                    raise InputError(
                        f"{file}: {name} has the shape {found}, but {CONFIG} describes {shape}: "
                        "they belong to different models"
                    )
                if not dtypes <= FLOATS.keys() or len(dtypes) > 1:
                    raise InputError(
                        f"{file}: {name} has the dtype {values.get_dtype()}, only "
                        f"{', '.join(FLOATS)} are read, and one for all parts of a matrix: convert "
                        "quantised weights to one of them first"
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


def _refuse(what: str, names: Iterable[str]) -> None:
    faults = sorted(names)
    if faults:
        more = f" and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        raise InputError(f"{what}: {shown(', '.join(faults[:MOST_NAMED]))}{more}")


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Makes an InputError, which names the file, of an error of the library."""
    try:
        yield
    except SafetensorError as error:
        raise InputError(
            f"{file}: cannot be read ({error}): it is missing, truncated or no safetensors file. "
            "Get it again"
        ) from error


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
    try:
        config = to_hf(model, described.true_vocab_size, family)
    except ValueError as error:
        raise InputError(f"--to hf: {error}") from error
    tokenizer, end = stored_tokenizer(described)
    name_there = config["model_type"]
    shapes = {name: spec.global_shape for name, spec in described.specs.items()}
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    total = in_shard = 0
    for name, parts in their_shapes(name_there, shapes, model).items():
        dtype = described.dtypes[name]
        num_bytes = math.prod(shapes[name]) * dtype.itemsize
        if in_shard and in_shard + num_bytes > shard_bytes:
            shards.append({})
            in_shard = 0
        shards[-1].update({part: (dtype, shape) for part, shape in parts.items()})
        in_shard += num_bytes
        total += num_bytes
    count = len(shards)
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    names = [WEIGHTS] if count == 1 else names
    weight_map = {part: name for name, parts in zip(names, shards, strict=True) for part in parts}
    texts = dict(tokenizer)
    config |= dict(torch_dtype=str(described.dtype).removeprefix("torch."))
    config |= dict(bos_token_id=None, eos_token_id=end, pad_token_id=None)
    config |= described.token_ids
    texts[CONFIG] = json_bytes(config)
    if count > 1:
        texts[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
    if "tokenizer.json" in tokenizer and "tokenizer_config.json" not in tokenizer:
        # AutoTokenizer asks this file for the class.
        texts["tokenizer_config.json"] = json_bytes({"tokenizer_class": "PreTrainedTokenizerFast"})
    tensors = dict(zip(names, shards, strict=True))
    with complete_folder(path) as folder:
        with safetensors_files(folder, tensors, {"format": "pt"}) as write:

            def put(name: str, key: str, tensor: Tensor) -> None:
                row = row_of(name_there, name)
                values = LAYOUTS[row.layout].split(tensor, model)
                for part, value in zip(row.theirs, values, strict=True):
                    write(weight_map[part], part, value)

            copy_tensors(source, put, advance, [WEIGHT])
        for name, content in texts.items():
            (folder / name).write_bytes(content)
