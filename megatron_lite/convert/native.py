"""Reads and writes a checkpoint of this project, at any parallel sizes.

A run with --load continues what is written. Without optimizer states in the source, the step holds
the weights alone. Its metadata says so, and a run that loads it starts the states from zero at
iteration 0. With states the run continues where the other system stopped. The step never holds
random-number streams: those of other systems mean nothing here.
"""

from __future__ import annotations

from collections import defaultdict
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
    step_directory,
)
from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.config.hf_config import token_ids_of
from megatron_lite.config.input_file import read_json
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.convert.target import (
    Tensors,
    complete_folder,
    json_bytes,
    safetensors_file,
    stored_tokenizer,
)
from megatron_lite.convert.weights import (
    WEIGHT,
    WORDS,
    Advance,
    Described,
    WeightSource,
    check_layers,
    check_names,
    copy_tensors,
    is_buffer,
    is_held,
    parameter_specs,
    refused,
    shard,
    split_over,
)
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of, in_folder


def native_source(path: Path) -> WeightSource:
    """Opens the newest good step under a directory of `--save`.

    The step's checksums are verified. Raises InputError if there is no good step.
    """
    if not path.is_dir():
        raise InputError(
            f"--load {path}: no such directory (the format megatron-lite is a directory that a "
            "training run with --save has written)"
        )
    step, notices = find_step(str(path))
    metadata, config = Metadata.read(step), read_config(step)
    parameters, vocab_size = metadata.parameters, config.tokenizer.true_vocab_size
    weights, states = (
        ShardReader(step, kind, saved_tp_size=metadata.tp_size) for kind in ("model", "optimizer")
    )
    check_layers(config.model.num_layers, len(parameters), step / CONFIG)
    specs = parameter_specs(config.model, vocab_size)
    held = parameters.keys() & specs.keys()
    check_names(step, held, specs.keys(), f"the model of its {CONFIG}")
    keys: list[str] = []
    if "optimizer" not in metadata.missing:
        keys = [
            key
            for key in states.suffixes(WORDS, parameters[WORDS])
            if all(
                states.has(f"{name}/{key}", parameters[name])
                for name in specs
                if not is_buffer(name)
            )
        ]
    tokenizer, ids = in_folder(step), step / TOKEN_IDS
    if not tokenizer and config.tokenizer.tokenizer_type != "NullTokenizer":
        note = f"{step} is older than checkpoints with a tokenizer: copy its files by hand"
        notices = (*notices, note)

    def read(name: str, key: str = WEIGHT) -> Tensor:
        saved = parameters[name]
        reader, full = (states, f"{name}/{key}") if key else (weights, name)
        whole = replace(saved.spec, padded_length=None)
        tensor = reader.read(full, saved, whole, tp_rank=0, tp_size=1)
        return tensor.float() if key else tensor

    described = Described(
        model=config.model,
        true_vocab_size=vocab_size,
        dtypes={name: weights.dtype_of(name, parameters[name]) for name in specs},
        tokenizer=tokenizer,
        token_ids=token_ids_of(read_json(ids)) if ids.exists() else {},
        progress=metadata.progress,
        state_keys=tuple(keys),
        num_updates=metadata.num_updates,
        notes=notices,
    )
    return WeightSource(described, read)


def write_native(
    source: WeightSource, path: Path, advance: Advance, *, tp_size: int = 1, pp_size: int = 1
) -> None:
    """Writes all that the source has into a new directory, which appears complete, or not at all.

    tp_size, pp_size: over how many files the weights are split. A run loads them at any other
        parallel sizes too.
    Raises InputError if the model does not divide over the parallel sizes.
    """
    described = source.described
    has_states = bool(described.state_keys)
    progress = described.progress if has_states else Progress()
    step_name = step_directory(path, progress.iteration).name
    with refused("--to megatron-lite"):
        config = _config(described, path.absolute() / step_name, tp_size, pp_size)
        padded = config.tokenizer.rows(tp_size)
        specs, stages = split_over(
            config.model, described.true_vocab_size, padded, tp_size=tp_size, pp_size=pp_size
        )
    metadata = Metadata(
        progress=progress,
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=1,
        cp_size=1,
        num_updates=described.num_updates if has_states else 0,
        parameters={
            name: SavedLayout(spec, stage.rank)
            for stage in stages
            for name, spec in specs.items()
            if is_held(name, stage)
        },
        missing=("rng",) if has_states else ("optimizer", "rng"),
    )

    def places(name: str, key: str) -> Iterator[tuple[int, str, str]]:
        """Yields the TP ranks that hold a part of a tensor, with its file and its name there."""
        kind, full = ("optimizer", f"{name}/{key}") if key else ("model", name)
        for tp_rank in range(1 if specs[name].tp_dim is None else tp_size):
            yield (
                tp_rank,
                shard_file(kind, metadata.parameters[name].pp_rank, tp_rank, tp_size),
                full,
            )

    tensors: dict[str, Tensors] = defaultdict(dict)
    for name, key in ((one, key) for one in specs for key in described.keys_of(one)):
        layout = metadata.parameters[name]
        for tp_rank, file, full in places(name, key):
            shape = layout.file_shape(tp_rank, tp_size)
            tensors[file][full] = (described.dtype_of(name, key), shape)
    texts, _ = stored_tokenizer(described)
    texts[CONFIG] = config.to_json().encode()
    texts[METADATA] = metadata.to_json().encode()
    if described.token_ids:
        texts[TOKEN_IDS] = json_bytes(dict(described.token_ids))
    for rank in range(pp_size):
        texts[parameters_file(rank)] = metadata.parameters_to_json(rank).encode()
    with complete_folder(path) as folder:
        step = folder / step_name
        step.mkdir()
        # Also ranks without tensors have files.
        writes = {
            file: safetensors_file(step / file, tensors[file])
            for file in metadata.expected_files()
            if file.endswith(".safetensors")
        }

        def put(name: str, key: str, whole: Tensor) -> None:
            for tp_rank, file, full in places(name, key):
                local = shard(whole, specs[name], tp_rank, tp_size)
                rows = owned_rows(local, specs[name], tp_rank=tp_rank, tp_size=tp_size)
                assert rows is not None
                writes[file](full, rows)

        copy_tensors(source, put, advance)
        for name, content in texts.items():
            (step / name).write_bytes(content)
        manifest = Manifest(progress.iteration, {one.name: row_of(one) for one in step.iterdir()})
        (step / MANIFEST).write_text(manifest.to_json())
        (folder / LATEST).write_text(str(progress.iteration))


def _config(described: Described, step: Path, tp_size: int, pp_size: int) -> RunConfig:
    """Returns the configuration of a run that could have saved the weights in `step`."""
    return RunConfig(
        model=described.model,
        training=TrainingConfig(
            micro_batch_size=1,
            bf16=described.dtype == torch.bfloat16,
            fp16=described.dtype == torch.float16,
        ),
        data=DataConfig(seq_length=described.model.max_position_embeddings),
        tokenizer=config_of(described.tokenizer, step, described.true_vocab_size),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size
        ),
    )
