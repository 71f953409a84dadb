"""Weights and optimizer states of a Megatron checkpoint, once a format has found their places."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.megatron.checkpoint_args import progress_of, vocabulary_of
from megatron_lite.convert.megatron.parameter_names import OUTPUT
from megatron_lite.convert.parameters import check_layers, parameter_specs
from megatron_lite.convert.weight_formats import Described

WORDS = "embedding.word_embeddings.weight"
QKV = ".self_attention.linear_qkv."


# By the parameter's name in the whole model, the part of every TP rank: a tensor, or something with
# a tensor's `shape` and `dtype` that `read` reads.
Parts = Mapping[str, Sequence[Any]]


class Unmapped(ValueError):
    """A reason for which optimizer states cannot be mapped to parameters."""


@dataclass(frozen=True, kw_only=True)
class States:
    """The optimizer states that can be converted: by state and parameter, every rank's part."""

    num_updates: int = 0
    parts: Mapping[str, Parts] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @staticmethod
    def missing(reason: object) -> States:
        """Returns no states, and a note with the reason."""
        return States(notes=(f"{reason}: the weights alone are converted",))


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint's contents.

    where: its folder. common: values that are no tensors. args: the arguments of the run.
    version: that of the layout of linear_qkv.
    """

    where: str
    common: Mapping[str, Any]
    args: Mapping[str, Any]
    model: ModelConfig
    weights: Parts
    states: States
    tp_size: int = 1
    version: float = 3.0


class MegatronSource:
    """A directory of `--save` of Megatron-LM, or one iteration of it.

    Raises InputError if the weights are not those of the model that the arguments describe.
    """

    def __init__(self, found: Found) -> None:
        self._found, self._where = found, found.where
        self._weights = dict(found.weights)
        model = found.model
        if not model.untie_embeddings_and_output_weights:
            self._weights.pop(OUTPUT, None)  # the last stage's copy of the embedding
        words = self._weights.get(WORDS)
        if words is None or len(words[0].shape) != 2:
            raise InputError(f"{self._where}: holds no {WORDS}")
        check_layers(model.num_layers, len(self._weights), self._where)
        padded = sum(one.shape[0] for one in words)
        vocab_size, notes = vocabulary_of(found.args, padded)
        try:
            self._specs = parameter_specs(
                model, vocab_size, tp_size=found.tp_size, padded_vocab_size=padded
            )
        except ValueError as error:
            raise InputError(f"{self._where}: {error}") from error
        self._check_names()
        states = found.states
        self.described = Described(
            model=model,
            true_vocab_size=vocab_size,
            progress=progress_of(found.common, found.args, self._where),
            state_keys=tuple(states.parts),
            num_updates=states.num_updates,
            num_bytes=sum(
                math.prod(part.shape) * part.dtype.itemsize
                for parts in (self._weights, *states.parts.values())
                for name in self._weights
                for part in parts[name]
            ),
            notes=(*notes, *states.notes),
        )

    def read(self, name: str) -> Tensor:
        """Returns one parameter. Raises InputError if a rank holds another shape of it."""
        return self._whole(name, name, self._weights)

    def read_state(self, name: str, key: str) -> Tensor:
        """Returns one optimizer state of a parameter, in float32."""
        return self._whole(f"{name} ({key})", name, self._found.states.parts[key]).float()

    def _check_names(self) -> None:
        for what, names in (
            ("lacks", self._specs.keys() - self._weights.keys()),
            ("holds", self._weights.keys() - self._specs.keys()),
        ):
            if names:
                raise InputError(
                    f"{self._where}: {what} {min(names)}, unlike the model that its args describe"
                )

    def _whole(self, what: str, name: str, places: Parts) -> Tensor:
        """Returns the whole tensor of which each TP rank has a part."""
        if name not in places:
            raise InputError(f"{self._where}: holds no {name}")
        spec, size = self._specs[name], self._found.tp_size
        wanted = spec.local_shape(size)
        for rank, one in enumerate(places[name]):
            if one.shape != wanted:
                raise InputError(
                    f"{self._where}: {what} of TP rank {rank} has the shape {tuple(one.shape)}, "
                    f"and the model of its args has {wanted}"
                )
        parts = (
            self._ordered(name, one if isinstance(one, Tensor) else one.read())
            for one in places[name]
        )
        if spec.tp_dim is None:
            return next(parts).contiguous()
        whole = torch.empty(spec.global_shape, dtype=places[name][0].dtype)
        for rank, part in enumerate(parts):
            for span in spec.spans(rank, size):
                whole.narrow(spec.tp_dim, span.global_start, span.length).copy_(
                    part.narrow(spec.tp_dim, span.local_start, span.length)
                )
        return whole

    def _ordered(self, name: str, part: Tensor) -> Tensor:
        """Returns the rows of linear_qkv head by head. Before version 2.0 they had other orders."""
        if self._found.version >= 2.0 or QKV not in name:
            return part
        width, rest = self._found.model.head_dim, part.shape[1:]
        if self._found.version == 0:  # [3, heads, d]
            return part.view(3, -1, width, *rest).transpose(0, 1).reshape(part.shape)
        # version 1.0: [heads, d, 3]
        return part.view(-1, width, 3, *rest).transpose(1, 2).reshape(part.shape)
