"""Reads a Hugging Face checkpoint: config.json, safetensors in one file or several, a tokenizer.

Opening reads the headers of all files. Missing, unexpected and misshapen tensors are refused before
any work is done. Pickled weights (pytorch_model.bin) are never read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS, open_tensors
from megatron_lite.config import plain
from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import CONFIG, exact_fields, read_hf_file
from megatron_lite.config.input_file import read_input
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.plain import shown
from megatron_lite.convert.hf_layouts import LAYOUTS
from megatron_lite.convert.hf_tensors import (
    BUFFERS,
    EMBEDDING,
    base_of,
    head_of,
    known_name,
    row_of,
    their_shapes,
)
from megatron_lite.convert.parameters import check_layers, parameter_specs
from megatron_lite.convert.weight_formats import Described
from megatron_lite.data.tokenizer_files import in_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
MOST_NAMED = 5
LARGEST_INDEX = 2**26


class TensorInFile(NamedTuple):
    """A tensor in a file: its name there, its dtype as safetensors spells it, and its shape."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


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
        self._files: dict[Path, Any] = {}
        mapped = read_hf_file(path)
        self._family = mapped.family
        fields = exact_fields(mapped, path / CONFIG)
        try:
            self._model = ModelConfig(**fields)
        except ValueError as error:
            raise InputError(f"{path / CONFIG}: {error}") from error
        self._places = self._find(path)
        self._head = head_of(self._family)
        check_layers(self._model.num_layers, len(self._places), path / CONFIG)
        specs = parameter_specs(self._model, mapped.vocab_size)
        self._rows = {name: row_of(self._family, name) for name in specs}
        self._check({name: spec.global_shape for name, spec in specs.items()})
        self.described = Described(
            model=self._model,
            true_vocab_size=mapped.vocab_size,
            tokenizer=in_folder(path),
            token_ids=mapped.token_ids,
            num_bytes=sum(
                math.prod(place.shape) * FLOATS[place.dtype].itemsize
                for row in self._rows.values()
                for place in (self._places[part] for part in row.theirs)
            ),
            notes=mapped.notes,
        )

    def read(self, name: str) -> Tensor:
        """Returns one parameter, in the dtype of the file."""
        row = self._rows[name]
        parts = [self._tensor(part) for part in row.theirs]
        if len({part.dtype for part in parts}) > 1:
            raise InputError(f"{', '.join(row.theirs)} must have one dtype")
        if name == EMBEDDING and self._is_tied and self._head in self._places:
            self._check_tied(parts[0])
        return LAYOUTS[row.layout].join(parts, self._model)

    def read_state(self, name: str, key: str) -> Tensor:
        """Raises InputError, since a Hugging Face checkpoint has no optimizer states."""
        raise InputError(f"{name}/{key}: this format has no optimizer states")

    @property
    def _is_tied(self) -> bool:
        return not self._model.untie_embeddings_and_output_weights

    def _check_tied(self, embedding: Tensor) -> None:
        if not torch.equal(embedding, self._tensor(self._head)):
            raise InputError(
                f"{CONFIG} says tie_word_embeddings true, but {self._head} differs from the "
                "embedding: correct one of them"
            )

    def _find(self, folder: Path) -> dict[str, TensorInFile]:
        """Returns where each tensor lies, by the name under which it is known here."""
        found: dict[str, TensorInFile] = {}
        for file in _weight_files(folder):
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118, no mapping
                part = opened.get_slice(name)
                found[name] = TensorInFile(file, name, part.get_dtype(), tuple(part.get_shape()))
        base = base_of(self._family)
        has_base = any(name.startswith(base) for name in found)
        return {
            known_name(self._family, name, has_base=has_base): place
            for name, place in found.items()
        }

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raises InputError for tensors that are missing, not expected, or do not map."""
        expected = {part for row in self._rows.values() for part in row.theirs}
        _refuse(f"{self._folder}: tensors missing from the files", expected - self._places.keys())
        # Files of a tied model may hold the head too. It must then equal the embedding (`read`).
        unexpected = self._places.keys() - expected - {self._head}
        if self._head in self._places and self._head not in expected and not self._is_tied:
            unexpected.add(self._head)
        _refuse(
            f"{self._folder}: tensors in the files, and a {self._family} of this {CONFIG} has none "
            "of that name",
            {name for name in unexpected if not BUFFERS.search(name)},
        )
        for part, shape in their_shapes(self._family, shapes, self._model).items():
            place = self._places[part]
            if place.shape != shape:
                raise InputError(
                    f"{place.file}: {place.name} has the shape {place.shape}, but {CONFIG} "
                    f"describes {shape}: they belong to different models"
                )
            if place.dtype not in FLOATS:
                raise InputError(
                    f"{place.file}: {place.name} has the dtype {place.dtype}, only "
                    f"{', '.join(FLOATS)} are read: convert quantised weights to one of them first"
                )

    def _tensor(self, name: str) -> Tensor:
        place = self._places[name]
        try:
            return self._open(place.file).get_tensor(place.name)
        except SafetensorError as error:
            raise _unreadable(place.file, error) from error

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = open_tensors(file).__enter__()
            except SafetensorError as error:
                raise _unreadable(file, error) from error
        return self._files[file]


def _weight_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / INDEX):
        return _indexed(folder)
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


def _indexed(folder: Path) -> list[Path]:
    """Returns the files that the index names."""
    try:
        weight_map = plain.field(
            plain.parse_object(read_input(folder / INDEX, LARGEST_INDEX)), "weight_map"
        )
        names = sorted({str(name) for name in plain.as_object(weight_map, "weight_map").values()})
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"weight_map names {shown(repr(name))}, which is no file's name")
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{folder / INDEX}: {error}") from error
    return [folder / name for name in names]


def _refuse(what: str, names: Iterable[str]) -> None:
    faults = sorted(names)
    if faults:
        more = f" and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        raise InputError(f"{what}: {shown(', '.join(faults[:MOST_NAMED]))}{more}")


def _unreadable(file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file}: cannot be read ({error}): it is missing, truncated or no safetensors file. Get "
        "it again"
    )
