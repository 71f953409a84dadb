"""Writes weights as a checkpoint of this project, which a run with --load continues.

Without optimizer states in the source, the step holds the weights alone. Its metadata says so, and
a run that loads it starts the states from zero at iteration 0. With states the run continues where
the other system stopped. The step never holds random-number streams: those of other systems mean
nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpointing.manifest import MANIFEST, Manifest, row_of
from megatron_lite.checkpointing.metadata import Metadata, Progress
from megatron_lite.checkpointing.shards import SavedLayout
from megatron_lite.checkpointing.step_files import (
    CONFIG,
    LATEST,
    METADATA,
    parameters_file,
    shard_file,
)
from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.convert.parameters import parameter_specs, pipeline_rank_of
from megatron_lite.convert.safetensors_file import SafetensorsFile
from megatron_lite.convert.staging import check_absent, complete_folder
from megatron_lite.convert.stored_tokenizer import json_bytes, stored_tokenizer
from megatron_lite.convert.weight_formats import Described, WeightSource
from megatron_lite.data.durable_files import write_synced
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of
from megatron_lite.parallel.parameter_spec import ParameterSpec

Files = dict[tuple[str, int, int], SafetensorsFile]
BF16, FP16 = torch.bfloat16, torch.float16


class NativeTarget:
    """A checkpoint directory that does not exist yet.

    tp_size, pp_size: over how many files the weights are split. A run loads them at any other
        parallel sizes too.
    """

    def __init__(self, path: Path, *, tp_size: int = 1, pp_size: int = 1) -> None:
        check_absent(path)
        self._path = path
        self._parallel = ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size
        )

    def write(self, source: WeightSource, advance: Callable[[int], None]) -> None:
        """Writes all that the source has. The directory appears complete, or not at all.

        Raises InputError if the model does not divide over the parallel sizes.
        """
        described = source.described
        progress = described.progress if described.state_keys else None
        progress = progress or Progress()
        step_name = f"iter_{progress.iteration:07d}"
        tokenizer = stored_tokenizer(described).contents
        if described.token_ids:
            tokenizer[TOKEN_IDS] = json_bytes(dict(described.token_ids))
        try:
            config = self._config(described, self._path.absolute() / step_name)
            specs = self._specs(config)
        except ValueError as error:
            raise InputError(f"--to megatron-lite: {error}") from error
        with complete_folder(self._path) as folder:
            step = folder / step_name
            step.mkdir()
            dtype = self._write_tensors(step, source, specs, advance)
            training = replace(config.training, bf16=dtype == BF16, fp16=dtype == FP16)
            config = replace(config, training=training)
            layouts = self._layouts(specs, config)
            metadata = self._metadata(described, progress, layouts)
            texts = {CONFIG: config.to_json(), METADATA: metadata.to_json()}
            for rank in range(metadata.pp_size):
                own = {name: one for name, one in layouts.items() if one.pp_rank == rank}
                texts[parameters_file(rank)] = replace(
                    metadata, parameters=own
                ).parameters_to_json()
            for name, content in (
                *((name, text.encode()) for name, text in texts.items()),
                *tokenizer.items(),
            ):
                write_synced(step / name, content)
            rows = {path.name: row_of(path) for path in step.iterdir()}
            manifest = Manifest(progress.iteration, rows)
            write_synced(step / MANIFEST, manifest.to_json().encode())
            write_synced(folder / LATEST, str(progress.iteration).encode())

    def _config(self, described: Described, step: Path) -> RunConfig:
        return RunConfig(
            model=described.model,
            training=TrainingConfig(micro_batch_size=1),
            data=DataConfig(seq_length=described.model.max_position_embeddings),
            tokenizer=config_of(described.tokenizer, step, described.true_vocab_size),
            parallel=self._parallel,
        )

    def _specs(self, config: RunConfig) -> dict[str, ParameterSpec]:
        tp_size = self._parallel.tensor_model_parallel_size
        return parameter_specs(
            config.model,
            config.tokenizer.true_vocab_size,
            tp_size=tp_size,
            padded_vocab_size=config.tokenizer.padded_vocab_size(tp_size),
        )

    def _layouts(
        self, specs: Mapping[str, ParameterSpec], config: RunConfig
    ) -> dict[str, SavedLayout]:
        return {
            name: replace(
                SavedLayout.of(spec),
                pp_rank=pipeline_rank_of(name, self._parallel, config.model.num_layers),
            )
            for name, spec in specs.items()
        }

    def _metadata(
        self, described: Described, progress: Progress, layouts: Mapping[str, SavedLayout]
    ) -> Metadata:
        return Metadata(
            progress=progress,
            tp_size=self._parallel.tensor_model_parallel_size,
            pp_size=self._parallel.pipeline_model_parallel_size,
            dp_size=1,
            cp_size=1,
            num_updates=described.num_updates if described.state_keys else 0,
            parameters=layouts,
            missing=("rng",) if described.state_keys else ("optimizer", "rng"),
        )

    def _write_tensors(
        self,
        step: Path,
        source: WeightSource,
        specs: Mapping[str, ParameterSpec],
        advance: Callable[[int], None],
    ) -> torch.dtype:
        """Writes the tensors, one at a time. Returns the dtype of most weights."""
        num_layers, keys = source.described.model.num_layers, source.described.state_keys
        counts: Counter[torch.dtype] = Counter()
        with ExitStack() as stack:
            files = self._open(step, specs, num_layers, keys, stack)
            for name, spec in specs.items():
                rank = pipeline_rank_of(name, self._parallel, num_layers)
                weight = source.read(name)
                counts[weight.dtype] += weight.numel()
                self._write_parts(files, "model", rank, name, weight, spec)
                advance(weight.numel() * weight.element_size())
                del weight
                for key in keys:
                    state = source.read_state(name, key)
                    self._write_parts(files, "optimizer", rank, f"{name}/{key}", state, spec)
                    advance(state.numel() * state.element_size())
        return counts.most_common(1)[0][0]

    def _open(
        self,
        step: Path,
        specs: Mapping[str, ParameterSpec],
        num_layers: int,
        keys: tuple[str, ...],
        stack: ExitStack,
    ) -> Files:
        tp_size = self._parallel.tensor_model_parallel_size
        shapes: dict[tuple[str, int, int], dict[str, tuple[int, ...]]] = {}
        for pp_rank in range(self._parallel.pipeline_model_parallel_size):
            for tp_rank in range(tp_size):
                for kind in ("model", *(["optimizer"] if keys else [])):
                    shapes[kind, pp_rank, tp_rank] = {}
        for name, spec in specs.items():
            rank = pipeline_rank_of(name, self._parallel, num_layers)
            for tp_rank in range(tp_size if spec.tp_dim is not None else 1):
                shape = SavedLayout.of(spec).file_shape(tp_rank, tp_size)
                shapes["model", rank, tp_rank][name] = shape
                for key in keys:
                    shapes["optimizer", rank, tp_rank][f"{name}/{key}"] = shape
        return {
            place: stack.enter_context(SafetensorsFile(step / shard_file(*place, tp_size), names))
            for place, names in shapes.items()
        }

    def _write_parts(
        self, files: Files, kind: str, pp_rank: int, key: str, whole: Tensor, spec: ParameterSpec
    ) -> None:
        tp_size = self._parallel.tensor_model_parallel_size
        # The source's tensor has no padding, so each rank's rows are taken by their global places.
        for tp_rank in range(tp_size if spec.tp_dim is not None else 1):
            files[kind, pp_rank, tp_rank].write(key, _rows_of(whole, spec, tp_rank, tp_size))


def _rows_of(whole: Tensor, spec: ParameterSpec, tp_rank: int, tp_size: int) -> Tensor:
    """Returns the part of a whole, unpadded tensor that one TP rank's file holds."""
    if spec.tp_dim is None:
        return whole
    rows = [
        whole.narrow(spec.tp_dim, span.global_start, span.length)
        for span in spec.spans(tp_rank, tp_size)
    ]
    if len(rows) == 1:
        return rows[0]
    return torch.cat(rows, spec.tp_dim) if rows else whole.narrow(spec.tp_dim, 0, 0)
