"""Reads and writes a checkpoint of this project, at any parallel sizes.

A run with --load continues what is written. Without optimizer states in the source, the step holds
the weights alone. Its metadata says so, and a run that loads it starts the states from zero at
iteration 0. With states the run continues where the other system stopped. The step never holds
random-number streams: those of other systems mean nothing here.
"""

from itertools import product
from pathlib import Path

import torch

from megatron_lite.checkpointing.metadata import (
    MANIFEST,
    Manifest,
    Metadata,
    layouts_to_json,
    row_of,
)
from megatron_lite.checkpointing.shards import kind_of, write_tensors
from megatron_lite.checkpointing.start import find_step
from megatron_lite.checkpointing.step_files import (
    CONFIG,
    METADATA,
    parameters_file,
    shard_file,
    step_directory,
)
from megatron_lite.config.checks import input_faults
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.config.hf_config import token_ids_of
from megatron_lite.config.input_file import read_json
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of, in_folder

from .target import json_bytes, new_step, stored_tokenizer
from .weights import WeightSource, check_number, is_buffer, parameter_specs, shards_of


def source(path: Path) -> WeightSource:
    """Opens the newest good step under a directory of `--save`.

    The step's checksums are verified. Raises InputError if there is no good step.
    """
    saved, notices = find_step(str(path))
    metadata, config, step = saved.metadata, saved.config, saved.path
    vocab_size = config.tokenizer.true_vocab_size
    check_number("layers", config.model.num_layers, len(saved.layouts), step / CONFIG)
    specs = parameter_specs(config.model, vocab_size)
    held = dict[str, set[str]]()
    if "optimizer" not in metadata.missing:
        held = {name: saved.states(name) for name in specs if not is_buffer(name)}
    keys = set[str]().union(*held.values())
    ids = step / TOKEN_IDS
    name, momentum = config.optimizer.optimizer, config.optimizer.sgd_momentum

    return WeightSource(
        model=config.model,
        true_vocab_size=vocab_size,
        dtypes={name: saved.dtype_of(name) for name in specs},
        read=lambda name: saved.read(name, specs[name.partition("/")[0]]),
        tokenizer=in_folder(step),
        token_ids=token_ids_of(read_json(ids)) if ids.exists() else {},
        progress=metadata.progress,
        state_keys=tuple(sorted(keys)),
        lacking={f"{name}/{key}" for name, own in held.items() for key in keys - own},
        optimizer=OptimizerConfig(optimizer=name, sgd_momentum=momentum),
        num_updates=metadata.num_updates,
        notes=notices,
    )


def write(source: WeightSource, path: Path, *, tp_size: int = 1, pp_size: int = 1) -> None:
    """Writes all that the source has into a new directory, which appears complete, or not at all.

    tp_size, pp_size: those of the configuration that is stored. A run reads its part of the files,
        at any parallel sizes.
    Each shard is written as a pipeline rank.
    Raises InputError if the model does not divide over the parallel sizes.
    """
    progress = source.progress
    final = step_directory(path.absolute(), progress.iteration)
    with input_faults("--to megatron-lite: "):
        config = RunConfig(  # of a run that could have saved the weights
            model=source.model,
            training=TrainingConfig(
                micro_batch_size=1,
                bf16=source.dtype == torch.bfloat16,
                fp16=source.dtype == torch.float16,
            ),
            optimizer=source.optimizer,
            data=DataConfig(seq_length=source.model.max_position_embeddings),
            tokenizer=config_of(source.tokenizer, final, source.true_vocab_size),
            parallel=ParallelConfig(
                tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size
            ),
        )
    shards = shards_of(source)
    kinds = ("model", *["optimizer"] * bool(source.state_keys))
    metadata = Metadata(
        progress=progress,
        tp_size=1,
        pp_size=len(shards),
        dp_size=1,
        cp_size=1,
        num_updates=source.num_updates,
        data={},
        missing=("rng",) if source.state_keys else ("optimizer", "rng"),
    )
    texts, _ = stored_tokenizer(source)
    texts[CONFIG] = config.to_json().encode()
    texts[METADATA] = metadata.to_json().encode()
    for number, shard in enumerate(shards):
        own = {name: source.specs[name] for name in shard if kind_of(name) == "model"}
        texts[parameters_file(number)] = layouts_to_json(own).encode()
    if source.token_ids:
        texts[TOKEN_IDS] = json_bytes(dict(source.token_ids))
    with new_step(path, progress.iteration) as step:
        for name, content in texts.items():
            (step / name).write_bytes(content)
        for (number, shard), kind in product(enumerate(shards), kinds):
            names = [name for name in shard if kind_of(name) == kind]
            tensors = {name: source.checked(name) for name in names}
            write_tensors(step / shard_file(kind, number, 0, 1), tensors)
        manifest = Manifest(progress.iteration, {one.name: row_of(one) for one in step.iterdir()})
        (step / MANIFEST).write_text(manifest.to_json())
