"""Reads and writes a checkpoint of this project, at any parallel sizes.

A run with --load continues what is written. Without optimizer states in the source, the step holds
the weights alone. Its metadata says so, and a run that loads it starts the states from zero at
iteration 0. With states the run continues where the other system stopped. The step never holds
random-number streams: those of other systems mean nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpointing.manifest import MANIFEST, Manifest, row_of
from megatron_lite.checkpointing.metadata import Metadata, Progress, read_config
from megatron_lite.checkpointing.shards import SavedLayout, ShardReader, owned_rows
from megatron_lite.checkpointing.start import find_step
from megatron_lite.checkpointing.step_files import (
    CONFIG,
    LATEST,
    METADATA,
    parameters_file,
    shard_file,
)
from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.config.hf_config import token_ids_of
from megatron_lite.config.input_file import read_json
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import stages
from megatron_lite.config.training import TrainingConfig
from megatron_lite.convert.safetensors_file import safetensors_files
from megatron_lite.convert.staging import complete_folder
from megatron_lite.convert.stored_tokenizer import json_bytes, stored_tokenizer
from megatron_lite.convert.weights import (
    WEIGHT,
    Advance,
    Described,
    WeightSource,
    check_layers,
    copy_tensors,
    is_held,
    parameter_specs,
    shard,
)
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of, in_folder


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
        step, notices = find_step(str(path))
        metadata, config = Metadata.read(step), read_config(step)
        self._parameters = metadata.parameters
        self._weights, self._states = (
            ShardReader(step, kind, saved_tp_size=metadata.tp_size)
            for kind in ("model", "optimizer")
        )
        check_layers(config.model.num_layers, len(self._parameters), step / CONFIG)
        specs = parameter_specs(config.model, config.tokenizer.true_vocab_size)
        missing = specs.keys() - self._parameters.keys()
        if missing:
            raise InputError(
                f"{step}: parameter {min(missing)} is missing, which the model of {CONFIG} has"
            )
        keys: list[str] = []
        if "optimizer" not in metadata.missing:
            first, layout = next(iter(self._parameters.items()))
            keys = [
                key
                for key in self._states.suffixes(first, layout)
                if all(self._states.has(f"{name}/{key}", self._parameters[name]) for name in specs)
            ]
        tokenizer, ids = in_folder(step), step / TOKEN_IDS
        if not tokenizer and config.tokenizer.tokenizer_type != "NullTokenizer":
            notices = (
                *notices,
                f"{step} is older than checkpoints with a tokenizer: copy its files by hand",
            )
        self.described = Described(
            model=config.model,
            true_vocab_size=config.tokenizer.true_vocab_size,
            dtypes={name: self._weights.dtype_of(name, self._parameters[name]) for name in specs},
            tokenizer=tokenizer,
            token_ids=token_ids_of(read_json(ids)) if ids.exists() else {},
            progress=metadata.progress,
            state_keys=tuple(keys),
            num_updates=metadata.num_updates,
            notes=notices,
        )

    def read(self, name: str, key: str = WEIGHT) -> Tensor:
        """Returns one parameter, or one of its states in float32."""
        saved = self._parameters[name]
        reader, full = (self._states, f"{name}/{key}") if key else (self._weights, name)
        tensor = reader.read(
            full, saved, replace(saved.spec, padded_length=None), tp_rank=0, tp_size=1
        )
        return tensor.float() if key else tensor


def write_native(
    source: WeightSource, path: Path, advance: Advance, *, tp_size: int = 1, pp_size: int = 1
) -> None:
    """Writes all that the source has into a new directory, which appears complete, or not at all.

    tp_size, pp_size: over how many files the weights are split. A run loads them at any other
        parallel sizes too.
    Raises InputError if the model does not divide over the parallel sizes.
    """
    described = source.described
    progress = described.progress if described.state_keys else Progress()
    step_name = f"iter_{progress.iteration:07d}"
    try:
        config = RunConfig(
            model=described.model,
            training=TrainingConfig(
                micro_batch_size=1,
                bf16=described.dtype == torch.bfloat16,
                fp16=described.dtype == torch.float16,
            ),
            data=DataConfig(seq_length=described.model.max_position_embeddings),
            tokenizer=config_of(
                described.tokenizer, path.absolute() / step_name, described.true_vocab_size
            ),
            parallel=ParallelConfig(
                tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size
            ),
        )
        padded = config.tokenizer.padded_vocab_size(tp_size)
        specs = parameter_specs(
            config.model, described.true_vocab_size, tp_size=tp_size, padded_vocab_size=padded
        )
        held = stages(config.parallel, config.model.num_layers)
    except ValueError as error:
        raise InputError(f"--to megatron-lite: {error}") from error
    layouts = {
        name: SavedLayout(spec, stage.rank)
        for stage in held
        for name, spec in specs.items()
        if is_held(name, stage)
    }
    metadata = Metadata(
        progress=progress,
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=1,
        cp_size=1,
        num_updates=described.num_updates if described.state_keys else 0,
        parameters=layouts,
        missing=("rng",) if described.state_keys else ("optimizer", "rng"),
    )
    texts = {
        **stored_tokenizer(described).contents,
        CONFIG: config.to_json().encode(),
        METADATA: metadata.to_json().encode(),
    }
    if described.token_ids:
        texts[TOKEN_IDS] = json_bytes(dict(described.token_ids))

    def places(name: str, key: str) -> Iterator[tuple[int, str, str]]:
        """Yields the TP ranks that hold a part of a tensor, with its file and its name there."""
        kind, full = ("optimizer", f"{name}/{key}") if key else ("model", name)
        for tp_rank in range(1 if specs[name].tp_dim is None else tp_size):
            yield tp_rank, shard_file(kind, layouts[name].pp_rank, tp_rank, tp_size), full

    tensors: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for rank in range(pp_size):
        own = {name: layout for name, layout in layouts.items() if layout.pp_rank == rank}
        text = replace(metadata, parameters=own).parameters_to_json()
        texts[parameters_file(rank)] = text.encode()
        for kind in ("model", "optimizer")[: len(described.keys)]:  # also of ranks without tensors
            tensors |= {shard_file(kind, rank, tp_rank, tp_size): {} for tp_rank in range(tp_size)}
    for name, layout in layouts.items():
        for key in described.keys:
            for tp_rank, file, full in places(name, key):
                shape = layout.file_shape(tp_rank, tp_size)
                tensors[file][full] = (described.dtype_of(name, key), shape)

    with complete_folder(path) as folder:
        step = folder / step_name
        step.mkdir()
        with safetensors_files(step, tensors) as write:

            def put(name: str, key: str, whole: Tensor) -> None:
                spec = specs[name]
                for tp_rank, file, full in places(name, key):
                    local = shard(whole, spec, tp_rank, tp_size)
                    rows = owned_rows(local, spec, tp_rank=tp_rank, tp_size=tp_size)
                    assert rows is not None
                    write(file, full, rows)

            copy_tensors(source, put, advance)
        for name, content in texts.items():
            (step / name).write_bytes(content)
        manifest = Manifest(progress.iteration, {one.name: row_of(one) for one in step.iterdir()})
        (step / MANIFEST).write_text(manifest.to_json())
        (folder / LATEST).write_text(str(progress.iteration))
