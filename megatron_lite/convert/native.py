"""Reads and writes a checkpoint of this project, at any parallel sizes.

A run with --load continues what is written. Without optimizer states in the source, the step holds
the weights alone. Its metadata says so, and a run that loads it starts the states from zero at
iteration 0. With states the run continues where the other system stopped. The step never holds
random-number streams: those of other systems mean nothing here.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpointing.metadata import MANIFEST, Manifest, Metadata, read_config, row_of
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
from megatron_lite.config.checks import input_faults
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.config.hf_config import token_ids_of
from megatron_lite.config.input_file import read_json
from megatron_lite.config.invocation import shell_lines, subcommand, training_command
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.convert.target import (
    Tensors,
    complete_folder,
    create_files,
    json_bytes,
    stored_tokenizer,
)
from megatron_lite.convert.weights import (
    Advance,
    WeightSource,
    check_layers,
    copy_tensors,
    is_buffer,
    parameter_specs,
)
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of, in_folder


def native_source(path: Path) -> WeightSource:
    """Opens the newest good step under a directory of `--save`.

    The step's checksums are verified. Raises InputError if there is no good step.
    """
    step, notices = find_step(str(path))
    metadata, config = Metadata.read(step), read_config(step)
    parameters, vocab_size = metadata.parameters, config.tokenizer.true_vocab_size
    weights, states = (
        ShardReader(step, kind, saved_tp_size=metadata.tp_size) for kind in ("model", "optimizer")
    )
    check_layers(config.model.num_layers, len(parameters), step / CONFIG)
    specs = parameter_specs(config.model, vocab_size)
    trained = [name for name in specs if not is_buffer(name)]
    keys = []
    if "optimizer" not in metadata.missing:
        common = (set(states.states(name, parameters[name])) for name in trained)
        keys = sorted(set.intersection(*common))
    ids = step / TOKEN_IDS

    def read(name: str) -> Tensor:
        parameter, _, key = name.partition("/")
        place = (parameters[parameter], specs[parameter])
        whole = (states if key else weights).read(name, *place, tp_rank=0, tp_size=1)
        return whole.float() if key else whole

    return WeightSource(
        model=config.model,
        true_vocab_size=vocab_size,
        dtypes={name: weights.dtype_of(name, parameters[name]) for name in specs},
        read=read,
        tokenizer=in_folder(step),
        token_ids=token_ids_of(read_json(ids)) if ids.exists() else {},
        progress=metadata.progress,
        state_keys=tuple(keys),
        num_updates=metadata.num_updates,
        notes=notices,
    )


def write_native(
    source: WeightSource, path: Path, advance: Advance, *, tp_size: int = 1, pp_size: int = 1
) -> None:
    """Writes all that the source has into a new directory, which appears complete, or not at all.

    tp_size, pp_size: those of the configuration that is stored, for which the printed commands are.
        The files are not split: a run reads its part of them, at any parallel sizes.
    Raises InputError if the model does not divide over the parallel sizes.
    """
    progress = source.progress
    step_name = step_directory(path, progress.iteration).name
    with input_faults("--to megatron-lite: "):
        config = _config(source, path.absolute() / step_name, tp_size, pp_size)
    metadata = Metadata(
        progress=progress,
        tp_size=1,
        pp_size=1,
        dp_size=1,
        cp_size=1,
        num_updates=source.num_updates,
        parameters={name: SavedLayout(spec) for name, spec in source.specs.items()},
        missing=("rng",) if source.state_keys else ("optimizer", "rng"),
    )
    files: dict[str, Tensors] = defaultdict(dict)
    for name, dtype, shape in source.tensors():
        kind = "optimizer" if "/" in name else "model"
        files[shard_file(kind, 0, 0, 1)][name] = (dtype, shape)
    texts, _ = stored_tokenizer(source)
    texts[CONFIG] = config.to_json().encode()
    texts[METADATA] = metadata.to_json().encode()
    texts[parameters_file(0)] = metadata.parameters_to_json(0).encode()
    if source.token_ids:
        texts[TOKEN_IDS] = json_bytes(dict(source.token_ids))
    with complete_folder(path) as folder:
        step = folder / step_name
        step.mkdir()
        copy_tensors(source, create_files(step, files, texts), advance)
        manifest = Manifest(progress.iteration, {one.name: row_of(one) for one in step.iterdir()})
        (step / MANIFEST).write_text(manifest.to_json())
        (folder / LATEST).write_text(str(progress.iteration))


def _config(source: WeightSource, step: Path, tp_size: int, pp_size: int) -> RunConfig:
    """Returns the configuration of a run that could have saved the weights in `step`."""
    return RunConfig(
        model=source.model,
        training=TrainingConfig(
            micro_batch_size=1,
            bf16=source.dtype == torch.bfloat16,
            fp16=source.dtype == torch.float16,
        ),
        data=DataConfig(seq_length=source.model.max_position_embeddings),
        tokenizer=config_of(source.tokenizer, step, source.true_vocab_size),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size
        ),
    )


USUAL_LENGTH = 2048  # the longest --seq-length that is proposed
NUM_ITERATIONS = 1000
LEARNING_RATE = "1e-5"  # low: the weights are trained, and no warm-up is proposed


def next_lines(save: Path) -> Iterator[str]:
    """Yields the commands that train and generate with a checkpoint that was just written.

    The shape of the model, its precision and its tokenizer come from the checkpoint, so that the
    commands run as printed once `preprocess` has made the data.
    """
    step = find_step(str(save)).step
    config, done = read_config(step), Metadata.read(step).progress.iteration
    reads_ids = config.tokenizer.tokenizer_type == "NullTokenizer"
    train = (
        *training_command(config.parallel.model_ranks),
        *("--config-json", str(step / CONFIG), "--load", str(save)),
        # The file has it too. Who writes a command of his own must not miss it.
        *(["--bf16"] * config.training.bf16 + ["--fp16"] * config.training.fp16),
        *("--seq-length", str(min(config.data.seq_length, USUAL_LENGTH))),
        *("--data-path", "text_text_document"),
        *("--train-iters", str(done + NUM_ITERATIONS), "--lr", LEARNING_RATE),
        *("--save", f"{save}-trained"),
    )
    prompt = "1 2 3" if reads_ids else "Once upon a time"
    generate = (*subcommand("generate"), "--load", str(save), "--prompt", prompt)
    yield ""
    if reads_ids:
        yield "The source has no tokenizer. A text is token ids in the commands below."
    yield f"To train further, on data that `preprocess` made with the tokenizer of {step}:"
    yield shell_lines(train)
    yield "To generate:"
    yield shell_lines(generate)
