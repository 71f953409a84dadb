"""Reads weights and optimizer states of a torch_dist checkpoint of Megatron-LM."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.metadata import MOST_UPDATES
from megatron_lite.config.checks import InputError
from megatron_lite.convert.megatron.checkpoint_args import (
    arguments_of,
    model_of,
    progress_of,
    vocabulary_of,
)
from megatron_lite.convert.megatron.dist_files import DistTensor, common_values, tensors_of
from megatron_lite.convert.megatron.legacy_files import iteration_folder
from megatron_lite.convert.megatron.legacy_source import WORDS
from megatron_lite.convert.megatron.legacy_states import WEIGHTS_ONLY
from megatron_lite.convert.megatron.parameter_names import OUTPUT, layer_name, our_name
from megatron_lite.convert.megatron.torch_file import StoredTensor
from megatron_lite.convert.parameters import check_layers, parameter_specs
from megatron_lite.convert.weight_formats import Described

# The names of optimizer states in the checkpoint, by their names here.
STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master": "fp32_param"}
READ_STATES = {theirs: key for key, theirs in STATES.items()} | {"param": "master"}
STATE = re.compile(r"(?:chained_0\.)?optimizer\.state\.(\w+)\.(.+)")
MODEL = re.compile(r"(?:model\d{0,3}\.)?(.+)")


class StackedTensor(NamedTuple):
    """A parameter's tensor, and its number in the first dim if the layers are stacked there."""

    tensor: DistTensor
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.layer is None else self.tensor.shape[1:]

    def read(self) -> Tensor:
        return self.tensor.read(self.layer)


class DistSource:
    """A directory of `--save` of Megatron-LM with `--ckpt-format torch_dist`, or one iteration."""

    def __init__(self, path: Path) -> None:
        folder = iteration_folder(path)
        self._where = where = str(folder)
        tensors = tensors_of(folder)
        common = common_values(folder)
        args = arguments_of(common, where)
        model = model_of(args, where)
        # Layers may be stacked in one tensor, but each has at least one number.
        numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
        check_layers(model.num_layers, numbers, where)
        self._places, self._states = _places(tensors, model.num_layers, where)
        if not model.untie_embeddings_and_output_weights:
            self._places.pop(OUTPUT, None)
        words = self._places.get(WORDS)
        if words is None or len(words.shape) != 2:
            raise InputError(f"{where}: holds no {WORDS}")
        vocab_size, notes = vocabulary_of(args, words.shape[0])
        self._padded = words.shape[0]
        self._specs = parameter_specs(model, vocab_size)
        self._check_names()
        keys, num_updates, reason = self._readable_states(tensors, common)
        if reason:
            notes = (*notes, f"{reason}: {WEIGHTS_ONLY}")
        self.described = Described(
            model=model,
            true_vocab_size=vocab_size,
            progress=progress_of(common, args, where),
            state_keys=keys,
            num_updates=num_updates,
            num_bytes=self._num_bytes(keys),
            notes=notes,
        )

    def read(self, name: str) -> Tensor:
        """Returns one parameter. Raises InputError if the checkpoint has another shape of it."""
        return self._read(name, name, self._found(name))

    def read_state(self, name: str, key: str) -> Tensor:
        """Returns one optimizer state of a parameter, in float32."""
        self._found(name)
        return self._read(name, f"{name} ({key})", self._states[key][name]).to(torch.float32)

    def _found(self, name: str) -> StackedTensor:
        found = self._places.get(name)
        if found is None:
            raise InputError(f"{self._where}: holds no {name}")
        return found

    def _read(self, name: str, what: str, place: StackedTensor) -> Tensor:
        self._check_shape(name, what, place)
        wanted = self._specs[name].global_shape
        whole = place.read()
        return whole if whole.shape == wanted else whole[: wanted[0]].contiguous()

    def _check_shape(self, name: str, what: str, place: StackedTensor) -> None:
        wanted = self._specs[name].global_shape
        if name in (WORDS, OUTPUT):  # with padding
            wanted = (self._padded, *wanted[1:])
        if place.shape != wanted:
            raise InputError(
                f"{self._where}: {what} has the shape {place.shape}, and the model of its args has "
                f"{wanted}"
            )

    def _check_names(self) -> None:
        for what, names in (
            ("lacks", self._specs.keys() - self._places.keys()),
            ("holds", self._places.keys() - self._specs.keys()),
        ):
            if names:
                raise InputError(
                    f"{self._where}: {what} {min(names)}, unlike the model that its args describe"
                )

    def _readable_states(
        self, tensors: Mapping[str, DistTensor], common: Mapping[str, Any]
    ) -> tuple[tuple[str, ...], int, str]:
        """Returns the states that every parameter has, the updates, and why there are none."""
        if not any("optimizer." in name for name in tensors):
            return (), 0, "the checkpoint holds no optimizer states"
        keys = tuple(
            key
            for key in STATES
            if all(
                name in self._states.get(key, {}) and self._states[key][name].shape == place.shape
                for name, place in self._places.items()
            )
        )
        if not {"exp_avg", "exp_avg_sq"} <= set(keys):
            return (
                (),
                0,
                "the optimizer states are not kept by parameter (as those of the distributed "
                "optimizer are without --dist-ckpt-optim-fully-reshardable)",
            )
        updates = _updates(common.get("optimizer"))
        if updates is None:
            return (), 0, "the checkpoint does not say how many updates the optimizer made"
        return keys, updates, ""

    def _num_bytes(self, keys: tuple[str, ...]) -> int:
        states = [self._states[key][name] for key in keys for name in self._places]
        return sum(
            torch.Size(place.shape).numel() * place.tensor.dtype.itemsize
            for place in (*self._places.values(), *states)
        )


def _places(
    tensors: Mapping[str, DistTensor], num_layers: int, where: str
) -> tuple[dict[str, StackedTensor], dict[str, dict[str, StackedTensor]]]:
    """Returns the places of parameters by name, and of optimizer states by state and name."""
    weights: dict[str, StackedTensor] = {}
    states: dict[str, dict[str, StackedTensor]] = {}
    for full, tensor in tensors.items():
        into = weights
        name = full
        if "optimizer." in full:
            state = STATE.fullmatch(full)
            if state is None or state[1] not in READ_STATES:
                continue
            into, name = states.setdefault(READ_STATES[state[1]], {}), state[2]
        elif full.startswith(("rng_state", "rerun_state", "opt_param_scheduler")):
            continue
        found = our_name(MODEL.fullmatch(name)[1])  # type: ignore[index]
        if found is None:
            continue
        if not found.stacked:
            into[found.whole()] = StackedTensor(tensor)
            continue
        if not tensor.shape or tensor.shape[0] != num_layers:
            if into is not weights:
                continue  # of an optimizer that shards its states: they are not read
            raise InputError(
                f"{where}: {full} has the shape {tensor.shape}, and the first dim must be the "
                f"{num_layers} layers of the model"
            )
        for layer in range(num_layers):
            into[layer_name(layer, found.name)] = StackedTensor(tensor, layer)
    return weights, states


def _updates(optimizer: Any) -> int | None:
    """Returns how many updates an optimizer made, from its values that are no tensors."""
    found: set[int] = set()
    inner = optimizer
    for _ in range(3):  # the values of some optimizers are nested
        if not isinstance(inner, dict):
            break
        state = inner.get("state")
        groups = inner.get("param_groups")
        steps = [group.get("step") for group in groups or () if isinstance(group, dict)]
        if isinstance(state, dict):
            steps.append(state.get("common_step"))
        for step in steps:
            if isinstance(step, StoredTensor) and step.shape in ((), (1,)):
                step = int(step.read().item())
            if type(step) is int and 0 <= step <= MOST_UPDATES:
                found.add(step)
        inner = inner.get("optimizer")
    return found.pop() if len(found) == 1 else None
