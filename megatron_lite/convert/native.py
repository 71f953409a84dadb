"""Reads and writes a checkpoint of this project, at any parallel sizes.

A run with --load continues what is written. Without optimizer states in the source, the step holds
the weights alone. Its metadata says so, and a run that loads it starts the states from zero at
iteration 0. With states the run continues where the other system stopped. The step never holds
random-number streams: those of other systems mean nothing here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpointing.manifest import MANIFEST, Manifest, row_of
from megatron_lite.checkpointing.metadata import Metadata, Progress, read_config
from megatron_lite.checkpointing.shards import SavedLayout, ShardReader
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
    parameter_specs,
    refused,
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

    tp_size, pp_size: those of the configuration that is stored, for which the printed commands are.
        The files are not split: a run reads its part of them, at any parallel sizes.
    Raises InputError if the model does not divide over the parallel sizes.
    """
    described = source.described
    has_states = bool(described.state_keys)
    progress = described.progress if has_states else Progress()
    step_name = step_directory(path, progress.iteration).name
    with refused("--to megatron-lite"):
        config = _config(described, path.absolute() / step_name, tp_size, pp_size)
        specs = parameter_specs(config.model, described.true_vocab_size)
    metadata = Metadata(
        progress=progress,
        tp_size=1,
        pp_size=1,
        dp_size=1,
        cp_size=1,
        num_updates=described.num_updates if has_states else 0,
        parameters={name: SavedLayout(spec) for name, spec in specs.items()},
        missing=("rng",) if has_states else ("optimizer", "rng"),
    )
    files = {kind: shard_file(kind, 0, 0, 1) for kind in ("model", "optimizer")}

    def place(name: str, key: str) -> tuple[str, str]:
        """Returns the file of a tensor, and its name there."""
        return (files["optimizer"], f"{name}/{key}") if key else (files["model"], name)

    tensors: dict[str, Tensors] = {file: {} for file in files.values()}
    for name, spec in specs.items():
        for key in described.keys_of(name):
            file, full = place(name, key)
            tensors[file][full] = (described.dtype_of(name, key), spec.global_shape)
    texts, _ = stored_tokenizer(described)
    texts[CONFIG] = config.to_json().encode()
    texts[METADATA] = metadata.to_json().encode()
    texts[parameters_file(0)] = metadata.parameters_to_json(0).encode()
    if described.token_ids:
        texts[TOKEN_IDS] = json_bytes(dict(described.token_ids))
    with complete_folder(path) as folder:
        step = folder / step_name
        step.mkdir()
        writes = {
            file: safetensors_file(step / file, own)
            for file, own in tensors.items()
            if file in metadata.expected_files()
        }

        def put(name: str, key: str, whole: Tensor) -> None:
            file, full = place(name, key)
            writes[file](full, whole)

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
