"""Reads weights and optimizer states of a legacy Megatron checkpoint, at any TP and PP size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.megatron.checkpoint_args import model_of, progress_of, vocabulary_of
from megatron_lite.convert.megatron.legacy_files import LegacyFiles
from megatron_lite.convert.megatron.legacy_states import States, read_states
from megatron_lite.convert.megatron.parameter_names import OUTPUT, flat, our_name
from megatron_lite.convert.megatron.torch_file import StoredTensor
from megatron_lite.convert.parameters import check_layers, parameter_specs
from megatron_lite.convert.weight_formats import Described
from megatron_lite.parallel.parameter_spec import ParameterSpec

WORDS = "embedding.word_embeddings.weight"
QKV = ".self_attention.linear_qkv."


@dataclass(frozen=True)
class StagePart:
    """The tensors that one TP rank holds of one pipeline stage.

    ranks: its TP rank and its pipeline rank. chunk: the number of its model chunk.
    tensors: by the names of the whole model, in the order of the model's parameters.
    """

    ranks: tuple[int, int]
    chunk: int
    tensors: Mapping[str, StoredTensor]


class LegacySource:
    """A directory of `--save` of Megatron-LM with `--ckpt-format torch`, or one iteration of it."""

    def __init__(self, path: Path) -> None:
        self._files = files = LegacyFiles.open(path)
        self._where = where = str(files.folder)
        model = model_of(files.args, where)
        stages = _stages(files, model)
        self._parts: dict[str, list[StoredTensor]] = {}
        for stage in stages:
            self._add(stage)
        if not model.untie_embeddings_and_output_weights:
            self._parts.pop(OUTPUT, None)  # the last stage's copy of the embedding
        check_layers(model.num_layers, len(self._parts), where)
        padded = self._padded()
        vocab_size, notes = vocabulary_of(files.args, padded)
        self._specs = _specs(model, vocab_size, padded, files.tp_size, where)
        self._check_names()
        states = read_states(files, [part for stage in stages for part in stage])
        self._states: States = states
        self._version = _version(files)
        self.described = Described(
            model=model,
            true_vocab_size=vocab_size,
            progress=progress_of(files.values[0, 0], files.args, where),
            state_keys=states.keys,
            num_updates=states.num_updates,
            num_bytes=self._num_bytes(states.keys),
            notes=(*notes, *states.notes),
        )

    def read(self, name: str) -> Tensor:
        """Returns one parameter. Raises InputError if a rank holds another shape of it."""
        return self._joined(name, name, self._found(name))

    def read_state(self, name: str, key: str) -> Tensor:
        """Returns one optimizer state of a parameter, in float32."""
        self._found(name)
        tensors = self._states.tensors[name, key]
        return self._joined(f"{name} ({key})", name, tensors).to(torch.float32)

    def _add(self, stage: list[StagePart]) -> None:
        for name in dict.fromkeys(name for part in stage for name in part.tensors):
            held = [part.tensors.get(name) for part in stage]
            tensors = [one for one in held if one is not None]
            if len(tensors) < len(held):
                raise InputError(
                    f"{self._where}: TP rank {held.index(None)} of pipeline rank "
                    f"{stage[0].ranks[1]} does not hold {name}"
                )
            self._parts.setdefault(name, tensors)

    def _padded(self) -> int:
        words = self._parts.get(WORDS)
        if words is None or len(words[0].shape) != 2:
            raise InputError(f"{self._where}: holds no {WORDS}")
        return sum(one.shape[0] for one in words)

    def _check_names(self) -> None:
        for what, names in (
            ("lacks", self._specs.keys() - self._parts.keys()),
            ("holds", self._parts.keys() - self._specs.keys()),
        ):
            if names:
                raise InputError(
                    f"{self._where}: {what} {min(names)}, unlike the model that its args describe"
                )

    def _found(self, name: str) -> list[StoredTensor]:
        found = self._parts.get(name)
        if found is None:
            raise InputError(f"{self._where}: holds no {name}")
        return found

    def _joined(self, what: str, name: str, tensors: list[StoredTensor]) -> Tensor:
        """Returns the whole tensor of which each TP rank has a part."""
        spec, size = self._specs[name], self._files.tp_size
        wanted = spec.local_shape(size)
        for rank, one in enumerate(tensors):
            if one.shape != wanted:
                raise InputError(
                    f"{self._where}: {what} of TP rank {rank} has the shape {one.shape}, and the "
                    f"model of its args has {wanted}"
                )
        if spec.tp_dim is None:
            return tensors[0].read().contiguous()
        whole = torch.empty(spec.global_shape, dtype=tensors[0].dtype)
        for rank, one in enumerate(tensors):
            part = self._ordered(name, one.read())
            for span in spec.spans(rank, size):
                whole.narrow(spec.tp_dim, span.global_start, span.length).copy_(
                    part.narrow(spec.tp_dim, span.local_start, span.length)
                )
        return whole

    def _ordered(self, name: str, part: Tensor) -> Tensor:
        """Returns the rows of linear_qkv head by head. Before version 2.0 they had other orders."""
        if self._version >= 2.0 or QKV not in name:
            return part
        width, rest = self.described.model.head_dim, part.shape[1:]
        if self._version == 0:  # [3, heads, d]
            return part.view(3, -1, width, *rest).transpose(0, 1).reshape(part.shape)
        # version 1.0: [heads, d, 3]
        return part.view(-1, width, 3, *rest).transpose(1, 2).reshape(part.shape)

    def _num_bytes(self, keys: tuple[str, ...]) -> int:
        sizes = {
            name: sum(_numel(one) * one.dtype.itemsize for one in tensors)
            for name, tensors in self._parts.items()
        }
        # Optimizer states are float32, whatever the dtype of the weights.
        states = sum(4 * _numel(one) for parts in self._parts.values() for one in parts)
        return sum(sizes.values()) + len(keys) * states


def _stages(files: LegacyFiles, model: ModelConfig) -> list[list[StagePart]]:
    """Returns the stages in the order of the model, each with the part of every TP rank."""
    first_layer = 0
    found = []
    seen: set[int] = set()
    chunks = {ranks: files.chunks(ranks) for ranks in files.values}
    count = len(chunks[0, 0])
    if any(len(one) != count for one in chunks.values()):
        raise InputError(f"{files.folder}: the ranks hold different numbers of model chunks")
    for chunk in range(count):  # stage number = chunk * PP + pipeline rank
        for pp_rank in range(files.pp_size):
            stage, layers = [], 0
            for tp_rank in range(files.tp_size):
                ranks = (tp_rank, pp_rank)
                tensors, own = _tensors(files, chunks[ranks][chunk], ranks, first_layer, seen)
                layers = max(layers, own)
                stage.append(StagePart(ranks, chunk, tensors))
            found.append(stage)
            first_layer += layers
    if first_layer != model.num_layers:
        raise InputError(
            f"{files.folder}: its files hold {first_layer} layers, and its args say num_layers = "
            f"{model.num_layers}"
        )
    return found


def _tensors(
    files: LegacyFiles, chunk: Any, ranks: tuple[int, int], first_layer: int, seen: set[int]
) -> tuple[dict[str, StoredTensor], int]:
    """Returns the tensors of a model chunk by their names in the whole model, and its layers."""
    where = f"{files.folder}: TP rank {ranks[0]}, pipeline rank {ranks[1]}"
    if not isinstance(chunk, dict):
        raise InputError(f"{where}: its model is no state dict")
    tensors, layers = {}, 0
    try:
        named = flat(chunk, seen)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    for key, value in named.items():
        name = our_name(key)
        if name is None or value is None:
            continue
        if not isinstance(value, StoredTensor) or name.stacked:
            raise InputError(f"{where}: {key} is no plain tensor of a layer")
        if name.layer is not None:
            layers = max(layers, name.layer + 1)
        tensors[name.whole(first_layer)] = value
    return tensors, layers


def _specs(
    model: ModelConfig, vocab_size: int, padded: int, tp_size: int, where: str
) -> dict[str, ParameterSpec]:
    try:
        return parameter_specs(model, vocab_size, tp_size=tp_size, padded_vocab_size=padded)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error


def _version(files: LegacyFiles) -> float:
    found = files.values[0, 0].get("checkpoint_version", 0)
    if type(found) not in (int, float) or found not in (0, 1, 2, 3):
        raise InputError(f"{files.folder}: its checkpoint_version must be 0, 1, 2 or 3")
    return float(found)


def _numel(tensor: StoredTensor) -> int:
    return int(torch.Size(tensor.shape).numel())
