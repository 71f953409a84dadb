"""Writes a Hugging Face checkpoint, which AutoModelForCausalLM.from_pretrained opens.

It has config.json, safetensors of at most 5 GB with an index if they are several, and the files of
the tokenizer. Weights keep their dtype. Optimizer states are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_config import CONFIG, to_hf
from megatron_lite.convert.hf_layouts import LAYOUTS
from megatron_lite.convert.hf_source import INDEX, WEIGHTS
from megatron_lite.convert.hf_tensors import row_of, their_shapes
from megatron_lite.convert.parameters import parameter_specs
from megatron_lite.convert.safetensors_file import SafetensorsFile
from megatron_lite.convert.staging import check_absent, complete_folder
from megatron_lite.convert.stored_tokenizer import json_bytes, stored_tokenizer
from megatron_lite.convert.weight_formats import Described, WeightSource
from megatron_lite.data.durable_files import write_synced

SHARD_BYTES = 5 * 10**9


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
                torch_dtype=dtype, bos_token_id=None, eos_token_id=end, pad_token_id=None
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
    """The files of weights."""

    def __init__(self, folder: Path, family: str, described: Described, shard_bytes: int) -> None:
        self._folder, self._family, self._limit = folder, family, shard_bytes
        self._model = described.model
        specs = parameter_specs(self._model, described.true_vocab_size)
        self._shapes = {name: spec.global_shape for name, spec in specs.items()}
        self._theirs = their_shapes(family, self._shapes, self._model)
        self._weight_map: dict[str, int] = {}
        self._total = self._in_shard = 0
        self._number = 1

    def write(self, source: WeightSource, advance: Callable[[int], None]) -> str:
        """Writes all parameters. Returns the name of the dtype of most weights."""
        counts: Counter[str] = Counter()
        with ExitStack() as stack:
            file = stack.enter_context(self._open())
            for name in self._shapes:
                tensor = source.read(name)
                counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
                num_bytes = tensor.numel() * tensor.element_size()
                if self._in_shard and self._in_shard + num_bytes > self._limit:
                    self._number += 1
                    self._in_shard = 0
                    file = stack.enter_context(self._open())
                row = row_of(self._family, name)
                parts = LAYOUTS[row.layout].split(tensor, self._model)
                for part, values in zip(row.theirs, parts, strict=True):
                    file.write(part, values)
                    self._weight_map[part] = self._number
                self._in_shard += num_bytes
                self._total += num_bytes
                advance(num_bytes)
        self._name_files()
        return counts.most_common(1)[0][0]

    def _open(self) -> SafetensorsFile:
        # The header has room for all tensors: which ones this file gets depends on their dtypes.
        return SafetensorsFile(
            self._folder / f"shard-{self._number}", self._theirs, metadata={"format": "pt"}
        )

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
