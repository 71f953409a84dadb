"""Writes weights as a torch_dist checkpoint of Megatron-LM, which any layer spec and layout load.

Layers are stacked: a parameter of all layers is one tensor with the layers as its first dim, in one
chunk a layer. Each chunk is written as soon as it is read.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_lite.checkpointing.other_systems import DIST_METADATA
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.convert.megatron import written_args
from megatron_lite.convert.megatron.dist_source import COMMON, STATES
from megatron_lite.convert.megatron.parameter_names import LAYERS, OUTPUT, stacked_name
from megatron_lite.convert.parameters import parameter_specs
from megatron_lite.convert.staging import check_absent, complete_folder
from megatron_lite.convert.weight_formats import Described, WeightSource
from megatron_lite.data.durable_files import write_synced
from megatron_lite.parallel.torch_internals import storage_info

SHARDS = "__0_0.distcp"
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
VOCABULARY = ("embedding.word_embeddings.weight", OUTPUT)
# Megatron's local spec and TE's keep the norms under the names of TE's fused layers.
NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)


class DistTarget:
    """A directory as Megatron-LM's `--save` with `--ckpt-format torch_dist`.

    It does not exist yet. A run loads it at any parallel sizes.
    """

    def __init__(self, path: Path) -> None:
        check_absent(path)
        self._path = path

    def write(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        """Writes all that the source has. The directory appears complete, or not at all."""
        described = source.described
        written_args.check_exact(described, "megatron-dist")
        newest = written_args.newest(described)
        with complete_folder(self._path) as folder:
            step = folder / written_args.folder_of(newest)
            step.mkdir()
            with (step / SHARDS).open("wb") as file:
                shards = _DistShards(file, described)
                for weight in parameter_specs(described.model, described.true_vocab_size):
                    shards.add(weight, source.read(weight), "", advance)
                    for key in described.state_keys:
                        prefix = f"optimizer.state.{STATES[key]}."
                        shards.add(weight, source.read_state(weight, key), prefix, advance)
                shards.add_extra_states()
            with (step / DIST_METADATA).open("wb") as file:
                pickle.dump(shards.metadata(), file)
            torch.save(_common(described), step / COMMON)
            write_synced(step / "metadata.json", json.dumps(FORMAT).encode())
            write_synced(folder / LATEST, newest.encode())


def _common(described: Described) -> dict[str, Any]:
    values = written_args.common_values(described, tp_size=1, pp_size=1)
    if described.state_keys:
        optimizer: dict[str, Any] = {
            "state": {},
            "param_groups": [
                {**group, "step": described.num_updates} for group in written_args.groups()
            ],
        }
        nested = "master" in described.state_keys
        values["optimizer"] = {"optimizer": optimizer} if nested else optimizer
    return values


class _DistShards:
    """The file of all chunks, and their description in .metadata."""

    def __init__(self, file: BinaryIO, described: Described) -> None:
        self._file, self._described = file, described
        self._tensors: dict[str, Any] = {}
        self._places: dict[MetadataIndex, Any] = {}

    def add(self, name: str, values: Tensor, prefix: str, advance: Callable[[int], None]) -> None:
        """Writes one parameter or state, with padding if it is a row for each word."""
        if name in VOCABULARY:
            rows = written_args.padded_vocab_size(self._described, 1) - values.shape[0]
            values = torch.cat((values, values.new_zeros(rows, *values.shape[1:])))
        base, layer = stacked_name(name)
        for ours, theirs in NORMS:
            base = base.replace(ours, theirs) if layer is not None else base
        key = f"{prefix}{base}"
        shape: tuple[int, ...] = tuple(values.shape)
        offsets = (0,) * len(shape)
        if layer is not None:  # all layers are one tensor there, and this one is a chunk of it
            values, offsets = values.unsqueeze(0), (layer, *offsets)
            shape = (self._described.model.num_layers, *shape)
        entry = self._tensors.setdefault(
            key,
            TensorStorageMetadata(
                TensorProperties(dtype=values.dtype), torch.Size(shape), chunks=[]
            ),
        )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), values.shape))
        index = MetadataIndex(key, torch.Size(offsets), len(entry.chunks) - 1)
        self._places[index] = self._written(values)
        advance(values.numel() * values.element_size())

    def add_extra_states(self) -> None:
        """Writes the empty `_extra_state` of each linear layer, which Megatron-LM asks for."""
        for key in self._extra_states():
            self._tensors[key] = BytesStorageMetadata()
            buffer = io.BytesIO()
            torch.save([None], buffer)
            start = self._file.tell()
            self._file.write(buffer.getvalue())
            self._places[MetadataIndex(key)] = storage_info()(
                SHARDS, start, self._file.tell() - start
            )

    def metadata(self) -> Metadata:
        """Returns the contents of .metadata."""
        return Metadata(
            state_dict_metadata=self._tensors, storage_data=self._places, storage_meta=StorageMeta()
        )

    def _written(self, values: Tensor) -> Any:
        if values.untyped_storage().nbytes() > values.nbytes:
            values = values.clone()  # torch.save writes the whole storage of a view
        start = self._file.tell()
        torch.save(values, self._file)
        return storage_info()(SHARDS, start, self._file.tell() - start)

    def _extra_states(self) -> Iterator[str]:
        count = self._described.model.num_layers
        for linear in written_args.LINEARS:
            for layer in range(count):
                yield f"{LAYERS}{linear}.{written_args.EXTRA_STATE}/shard_{layer}_{count}"
