"""Writes a Hugging Face checkpoint, which AutoModelForCausalLM.from_pretrained opens.

It has config.json, safetensors of at most 5 GB with an index if they are several, and the files of
the tokenizer. Weights keep their dtype. Optimizer states are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megatron_lite.checkpointing.step_files import write_synced
from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import to_hf
from megatron_lite.config.hf_file import CONFIG
from megatron_lite.convert.hf_layouts import LAYOUTS
from megatron_lite.convert.hf_source import INDEX, WEIGHTS
from megatron_lite.convert.hf_tensors import row_of
from megatron_lite.convert.parameters import parameter_specs
from megatron_lite.convert.safetensors_file import SafetensorsFile
from megatron_lite.convert.staging import check_absent, complete_folder
from megatron_lite.convert.stored_tokenizer import json_bytes, stored_tokenizer
from megatron_lite.convert.weight_formats import Described, WeightSource

SHARD_BYTES = 5 * 10**9
DTYPES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


class HfTarget:
    """A folder that does not exist yet.

    family: the model_type to write; None: the first that expresses the model exactly.
    shard_bytes: the largest size of a file. A single tensor may exceed it.
    """

    def __init__(
        self, path: Path, *, family: str | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        check_absent(path)
        self._path, self._family, self._shard_bytes = path, family, shard_bytes

    def write(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        """Writes the weights. The folder appears complete, or not at all.

        Raises InputError if no family, or not the given one, expresses the model exactly.
        """
        described = source.described
        try:
            config = to_hf(described.model, described.true_vocab_size, self._family)
        except ValueError as error:
            raise InputError(f"--to hf: {error}") from error
        tokenizer, end = stored_tokenizer(described)
        with complete_folder(self._path) as folder:
            shards = _SafetensorsParts(folder, config["model_type"], described, self._shard_bytes)
            dtype = shards.write(source, advance)
            config |= dict(
                torch_dtype=DTYPES[dtype], bos_token_id=None, eos_token_id=end, pad_token_id=None
            )
            config |= described.token_ids
            write_synced(folder / CONFIG, json_bytes(config))
            for name, content in tokenizer.items():
                write_synced(folder / name, content)
            if "tokenizer.json" in tokenizer and "tokenizer_config.json" not in tokenizer:
                # AutoTokenizer asks this file for the class.
                written = {"tokenizer_class": "PreTrainedTokenizerFast"}
                write_synced(folder / "tokenizer_config.json", json_bytes(written))


class _SafetensorsParts:
    """The files of weights, of which one is open at a time."""

    def __init__(self, folder: Path, family: str, described: Described, shard_bytes: int) -> None:
        self._folder, self._family, self._limit = folder, family, shard_bytes
        self._model = described.model
        specs = parameter_specs(self._model, described.true_vocab_size)
        self._shapes = {name: spec.global_shape for name, spec in specs.items()}
        self._theirs = self._their_shapes()
        self._weight_map: dict[str, int] = {}
        self._total = self._in_shard = 0
        self._number = 1

    def write(self, source: WeightSource, advance: Callable[[int], None]) -> torch.dtype:
        """Writes all parameters. Returns the dtype of most weights."""
        counts: dict[torch.dtype, int] = {}
        file = self._open()
        try:
            for name in self._shapes:
                tensor = source.read(name)
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
                num_bytes = tensor.numel() * tensor.element_size()
                if self._in_shard and self._in_shard + num_bytes > self._limit:
                    file.close()
                    self._number += 1
                    self._in_shard = 0
                    file = self._open()
                row = row_of(self._family, name)
                parts = LAYOUTS[row.layout].split(tensor, self._model)
                for part, values in zip(row.theirs, parts, strict=True):
                    file.write(part, values)
                    self._weight_map[part] = self._number
                self._in_shard += num_bytes
                self._total += num_bytes
                advance(num_bytes)
        except BaseException:
            file.abandon()
            raise
        file.close()
        self._name_files()
        return max(counts, key=lambda dtype: counts[dtype])

    def _open(self) -> SafetensorsFile:
        # The header has room for all tensors: which ones this file gets depends on their dtypes.
        return SafetensorsFile(
            self._folder / f"shard-{self._number}", self._theirs, metadata={"format": "pt"}
        )

    def _their_shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self._shapes.items():
            row = row_of(self._family, name)
            parts = LAYOUTS[row.layout].split(torch.empty(shape, device="meta"), self._model)
            found |= {part: tuple(one.shape) for part, one in zip(row.theirs, parts, strict=True)}
        return found

    def _name_files(self) -> None:
        if self._number == 1:
            (self._folder / "shard-1").rename(self._folder / WEIGHTS)
            return
        names = {}
        for number in range(1, self._number + 1):
            names[number] = f"model-{number:05d}-of-{self._number:05d}.safetensors"
            (self._folder / f"shard-{number}").rename(self._folder / names[number])
        weight_map = {name: names[number] for name, number in self._weight_map.items()}
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        write_synced(self._folder / INDEX, json_bytes(index))
