"""Reads the weights and optimizer states of a checkpoint of this project, at any parallel sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing.metadata import Metadata, read_config
from megatron_lite.checkpointing.shards import ShardReader
from megatron_lite.checkpointing.start import find_step
from megatron_lite.checkpointing.step_files import CONFIG
from megatron_lite.config import plain
from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import token_ids_of
from megatron_lite.config.input_file import read_input
from megatron_lite.config.plain import LARGEST_TEXT
from megatron_lite.convert.weight_formats import Described
from megatron_lite.data.tokenizer_files import TOKEN_IDS, in_folder


class NativeSource:
    """The newest good step under a directory of `--save`.

    The step's checksums are verified. Raises InputError if there is no good step.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise InputError(
                f"--load {path}: no such directory (the format megatron-lite is a directory that "
                "a training run with --save has written)"
            )
        self._step, notices = find_step(str(path))
        self._metadata = Metadata.read(self._step)
        config = read_config(self._step)
        self._weights, self._states = (
            ShardReader(self._step, kind, saved_tp_size=self._metadata.tp_size)
            for kind in ("model", "optimizer")
        )
        tokenizer = in_folder(self._step)
        if not tokenizer and config.tokenizer.tokenizer_type != "NullTokenizer":
            notices = (
                *notices,
                f"{self._step} is older than checkpoints with a tokenizer: copy its files by hand",
            )
        self.described = Described(
            model=config.model,
            true_vocab_size=config.tokenizer.true_vocab_size,
            tokenizer=tokenizer,
            token_ids=_token_ids(self._step / TOKEN_IDS),
            progress=self._metadata.progress,
            state_keys=self._state_keys(),
            num_updates=self._metadata.num_updates,
            num_bytes=sum(path.stat().st_size for path in self._step.glob("*_pp*.safetensors")),
            notes=notices,
        )

    def read(self, name: str) -> Tensor:
        """Returns one parameter. Raises InputError if the step does not hold it."""
        return self._read(self._weights, name, name)

    def read_state(self, name: str, key: str) -> Tensor:
        """Returns one optimizer state of a parameter, in float32."""
        return self._read(self._states, name, f"{name}/{key}").to(torch.float32)

    def _read(self, reader: ShardReader, name: str, key: str) -> Tensor:
        saved = self._metadata.parameters.get(name)
        if saved is None:
            raise InputError(
                f"{self._step}: parameter {name} is missing, which the model of {CONFIG} has"
            )
        wanted = replace(saved.spec(), padded_length=None)
        return reader.read(key, saved, wanted, tp_rank=0, tp_size=1)

    def _state_keys(self) -> tuple[str, ...]:
        """Returns the states that every parameter has, in the order of the first parameter."""
        if "optimizer" in self._metadata.missing:
            return ()
        common: list[str] | None = None
        for name, saved in self._metadata.parameters.items():
            keys = self._states.suffixes(name, saved)
            common = keys if common is None else [key for key in common if key in keys]
        return tuple(common or ())


def _token_ids(path: Path) -> dict[str, Any]:
    """Returns the ids of special tokens that a conversion from Hugging Face has stored."""
    return token_ids_of(plain.parse_object(read_input(path, LARGEST_TEXT))) if path.exists() else {}
