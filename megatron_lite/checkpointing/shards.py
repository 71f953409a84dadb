"""Parameters and optimizer states as the shards of global tensors that tensor-parallel ranks hold.

A step that was saved at one TP size can be read at another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megatron_lite.checkpointing.layout import SavedLayout
from megatron_lite.checkpointing.step_files import shard_file
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import open_input, regular_path
from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def layouts_of(model: nn.Module) -> dict[str, SavedLayout]:
    """Returns the layout of every parameter that this pipeline rank saves, by name."""
    return {
        name: SavedLayout.of(spec_of(parameter))
        for name, parameter in model.named_parameters()
        if not spec_of(parameter).is_copy
    }


def owned_rows(tensor: Tensor, spec: ParameterSpec, *, tp_rank: int, tp_size: int) -> Tensor | None:
    """Returns the part of a local tensor that this rank saves: its rows without padding.

    Returns None if another rank saves the tensor. A tensor that is not split is saved by TP rank 0
    only, and the last stage's copy of a tied embedding is not saved.
    """
    if spec.is_copy:
        return None
    if spec.tp_dim is None:
        return tensor.detach() if tp_rank == 0 else None
    rows = [
        tensor.detach().narrow(spec.tp_dim, span.local_start, span.length)
        for span in spec.spans(tp_rank, tp_size)
    ]
    return torch.cat(rows, spec.tp_dim) if rows else tensor.detach().narrow(spec.tp_dim, 0, 0)


def open_tensors(path: Path) -> Any:
    """Opens a safetensors file. Raises SafetensorError if it is none, and as `open_input` does."""
    open_input(path).close()  # its errors say more than those of the library
    return safe_open(regular_path(path), framework="pt")


class ShardReader:
    """Reads this rank's tensors from the files of a run that was saved at any TP size.

    Use it as a context manager.

    kind: "model" or "optimizer".
    saved_tp_size: the TP size of the run that saved the step.
    """

    def __init__(self, step: Path, kind: str, *, saved_tp_size: int) -> None:
        self._step, self._kind, self._saved_tp_size = step, kind, saved_tp_size
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has(self, key: str, saved: SavedLayout) -> bool:
        """Returns whether the file of TP rank 0 holds the key."""
        keys = self._file(self._path(saved, 0)).keys()  # safe_open is no mapping
        return key in keys

    def suffixes(self, name: str, saved: SavedLayout) -> list[str]:
        """Returns STATE for each key NAME/STATE of a parameter in the file of TP rank 0."""
        return sorted(
            key.removeprefix(f"{name}/")
            for key in self._file(self._path(saved, 0)).keys()  # noqa: SIM118, no mapping
            if key.startswith(f"{name}/")
        )

    def read(
        self, key: str, saved: SavedLayout, wanted: ParameterSpec, *, tp_rank: int, tp_size: int
    ) -> Tensor:
        """Returns this rank's shard of the global tensor `key`, on the CPU, with zero padding.

        Raises InputError if a file does not hold the tensor as the metadata describes it, or if the
        metadata describes another split than this model's.
        """
        theirs = (saved.global_shape, saved.tp_dim, saved.tp_blocks)
        ours = (wanted.global_shape, wanted.tp_dim, wanted.tp_blocks)
        if theirs != ours:
            raise InputError(
                f"{self._step}: {key} has global shape, tp_dim and tp_blocks {theirs}, this "
                f"model has {ours}"
            )
        dtype = self._check_files(key, saved)
        if wanted.tp_dim is None:
            return self._slice(self._path(saved, 0), key, None)
        dim = wanted.tp_dim
        local = torch.zeros(wanted.local_shape(tp_size), dtype=dtype)
        # Every span has a place in the global tensor. The overlap of a saved span and a wanted span
        # is copied, which works for any pair of TP sizes. Padding is in no span and stays zero.
        for source in range(self._saved_tp_size):
            position = 0  # where the span begins in the tensor of the source file
            for span in saved.spec().spans(source, self._saved_tp_size):
                for own in wanted.spans(tp_rank, tp_size):
                    start = max(span.global_start, own.global_start)
                    stop = min(span.global_start + span.length, own.global_start + own.length)
                    if start >= stop:
                        continue
                    offset = position + start - span.global_start
                    rows = self._slice(
                        self._path(saved, source), key, (dim, offset, offset + stop - start)
                    )
                    local.narrow(
                        dim, own.local_start + start - own.global_start, stop - start
                    ).copy_(rows)
                position += span.length
        return local

    def _check_files(self, key: str, saved: SavedLayout) -> torch.dtype:
        """Returns the dtype of a tensor.

        Raises InputError unless every file holds its part in the right shape, in floating point,
        and in the same dtype.
        """
        dtypes = set()
        for tp_rank in range(1 if saved.tp_dim is None else self._saved_tp_size):
            path = self._path(saved, tp_rank)
            expected = saved.file_shape(tp_rank, self._saved_tp_size)
            part = self._entry(path, key)
            if tuple(part.get_shape()) != expected:
                raise InputError(
                    f"{path}: {key} must have the shape {expected} that metadata describes (got "
                    f"{tuple(part.get_shape())}): the checkpoint is damaged"
                )
            if part.get_dtype() not in FLOATS:
                raise InputError(
                    f"{path}: {key} must hold one of {', '.join(FLOATS)} (got {part.get_dtype()}): "
                    "the checkpoint is damaged"
                )
            dtypes.add(part.get_dtype())
        if len(dtypes) > 1:
            raise InputError(
                f"{self._step}: {key} must have one dtype in all files (got "
                f"{', '.join(sorted(dtypes))}): the checkpoint is damaged"
            )
        return FLOATS[dtypes.pop()]

    def _path(self, saved: SavedLayout, tp_rank: int) -> Path:
        return self._step / shard_file(self._kind, saved.pp_rank, tp_rank, self._saved_tp_size)

    def _entry(self, path: Path, key: str) -> Any:
        with _naming(path, f"read {key}"):
            return self._file(path).get_slice(key)

    def _slice(self, path: Path, key: str, rows: tuple[int, int, int] | None) -> Tensor:
        with _naming(path, f"read {key}"):
            if rows is None:
                return self._file(path).get_tensor(key)
            dim, start, stop = rows
            index = (slice(None),) * dim + (slice(start, stop),)
            return self._file(path).get_slice(key)[index]

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            with _naming(path, "be read"):
                self._files[path] = self._stack.enter_context(open_tensors(path))
        return self._files[path]


@contextmanager
def _naming(path: Path, what: str) -> Iterator[None]:
    """Makes an InputError of an error of the library: the file cannot `what`."""
    try:
        yield
    except SafetensorError as error:
        raise InputError(f"{path}: cannot {what} ({error}): the checkpoint is damaged") from error
