"""Weights and optimizer states of a Megatron checkpoint, once a format has found their places."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import read_input
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.megatron.args import progress_of, vocabulary_of
from megatron_lite.convert.weights import (
    OUTPUT,
    WEIGHT,
    WORDS,
    Described,
    check_layers,
    joined,
    parameter_specs,
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


def iteration_folder(path: Path) -> Path:
    """Returns the folder of the iteration that a directory's pointer names.

    A path without a pointer is the folder of an iteration itself. Raises InputError if the path is
    no directory, or if the pointer names nothing.
    """
    if not path.is_dir():
        raise InputError(f"--load {path}: no such directory")
    pointer = path / LATEST
    if not pointer.exists():
        return path
    text = read_input(pointer, 32).decode(errors="replace").strip()
    if not re.fullmatch(r"\d{1,9}|release", text):
        raise InputError(f"{pointer}: expected an iteration number or `release`, found {text!r}")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise InputError(f"{pointer}: names {text}, but {folder.name} does not exist")
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


class MegatronSource:
    """A directory of `--save` of Megatron-LM, or one iteration of it.

    where: its folder. common: values that are no tensors. args: the arguments of the run.
    tensors: the weights (WEIGHT) and the states that can be converted.
    updates: how many updates the optimizer made, or why its states cannot be converted.
    version: that of the layout of linear_qkv.
    Raises InputError if the weights are not those of the model that the arguments describe.
    """

    def __init__(
        self,
        where: str,
        common: Mapping[str, Any],
        args: Mapping[str, Any],
        model: ModelConfig,
        tensors: Mapping[str, Parts],
        updates: int | str,
        *,
        tp_size: int = 1,
        version: float = 3.0,
    ) -> None:
        self._where, self._tp_size, self._version = where, tp_size, version
        weights = dict(tensors[WEIGHT])
        if not model.untie_embeddings_and_output_weights:
            weights.pop(OUTPUT, None)  # the last stage's copy of the embedding
        words = weights.get(WORDS)
        if words is None or len(words[0].shape) != 2:
            raise InputError(f"{where}: holds no {WORDS}")
        check_layers(model.num_layers, len(weights), where)
        padded = sum(one.shape[0] for one in words)
        vocab_size, notes = vocabulary_of(args, padded)
        try:
            self._specs = parameter_specs(
                model, vocab_size, tp_size=tp_size, padded_vocab_size=padded
            )
        except ValueError as error:
            raise InputError(f"{where}: {error}") from error
        for what, names in (
            ("lacks", self._specs.keys() - weights.keys()),
            ("holds", weights.keys() - self._specs.keys()),
        ):
            if names:
                raise InputError(
                    f"{where}: {what} {min(names)}, unlike the model that its args describe"
                )
        self._tensors: Mapping[str, Parts] = {WEIGHT: weights}
        if isinstance(updates, int):
            self._tensors = {**tensors, WEIGHT: weights}
        else:
            notes = (*notes, f"{updates}: the weights alone are converted")
        self.described = Described(
            model=model,
            true_vocab_size=vocab_size,
            dtypes={name: weights[name][0].dtype for name in self._specs},
            progress=progress_of(common, args, where),
            state_keys=tuple(key for key in self._tensors if key != WEIGHT),
            num_updates=updates if isinstance(updates, int) else 0,
            notes=notes,
        )

    def read(self, name: str, key: str = WEIGHT) -> Tensor:
        """Returns one parameter, or one of its states in float32.

        Raises InputError if a rank holds another shape of it.
        """
        spec, places = self._specs[name], self._tensors[key][name]
        wanted = spec.local_shape(self._tp_size)
        for rank, one in enumerate(places):
            if one.shape != wanted:
                raise InputError(
                    f"{self._where}: {name} {key} of TP rank {rank} has the shape "
                    f"{tuple(one.shape)}, and the model of its args has {wanted}"
                )
        parts = [one if isinstance(one, Tensor) else one.read() for one in places]
        whole = joined([self._ordered(name, part) for part in parts], spec)
        return whole.float() if key else whole

    def _ordered(self, name: str, part: Tensor) -> Tensor:
        """Returns the rows of linear_qkv head by head. Before version 2.0 they had other orders."""
        if self._version >= 2.0 or QKV not in name:
            return part
        width, rest = self.described.model.head_dim, part.shape[1:]
        if self._version == 0:  # [3, heads, d]
            return part.view(3, -1, width, *rest).transpose(0, 1).reshape(part.shape)
        # version 1.0: [heads, d, 3]
        return part.view(-1, width, 3, *rest).transpose(1, 2).reshape(part.shape)
