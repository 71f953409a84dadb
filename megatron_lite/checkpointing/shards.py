"""Parameters and optimizer states as the slices of global tensors that ranks hold, at one TP size and at another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megatron_lite.checkpointing.files import shard_file
from megatron_lite.config.checks import InputError
from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of


@dataclass(frozen=True, kw_only=True)
class SavedLayout:
    """How a saved parameter was split. pp_rank: which pipeline rank's files hold it."""

    global_shape: tuple[int, ...]
    tp_dim: int | None
    tp_blocks: int
    padded_length: int | None
    pp_rank: int = 0

    @classmethod
    def of(cls, spec: ParameterSpec) -> SavedLayout:
        """The layout of a parameter in this run."""
        return cls(global_shape=spec.global_shape, tp_dim=spec.tp_dim, tp_blocks=spec.tp_blocks,
                   padded_length=spec.padded_length)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], *, pp_rank: int) -> SavedLayout:
        """Reads what `to_plain` wrote, from the file of a pipeline rank."""
        return cls(global_shape=tuple(values["global_shape"]), tp_dim=values["tp_dim"], tp_blocks=values["tp_blocks"],
                   padded_length=values["padded_length"], pp_rank=pp_rank)

    def to_plain(self) -> dict[str, Any]:
        """A JSON object."""
        return {name: value for name, value in asdict(self).items() if name != "pp_rank"}

    def spec(self) -> ParameterSpec:
        """The split as a ParameterSpec."""
        return ParameterSpec(global_shape=self.global_shape, tp_dim=self.tp_dim, tp_blocks=self.tp_blocks,
                             padded_length=self.padded_length)


def layouts_of(model: nn.Module) -> dict[str, SavedLayout]:
    """The layout of every parameter that this pipeline rank saves, by name."""
    return {name: SavedLayout.of(spec_of(parameter)) for name, parameter in model.named_parameters()
            if not spec_of(parameter).is_copy}


def owned_rows(tensor: Tensor, spec: ParameterSpec, *, tp_rank: int, tp_size: int) -> Tensor | None:
    """What this rank saves of a local tensor: its rows without padding; None where another rank saves the tensor for all."""
    if spec.is_copy:
        return None
    if spec.tp_dim is None:
        return tensor.detach() if tp_rank == 0 else None
    rows = [tensor.detach().narrow(spec.tp_dim, span.local_start, span.length) for span in spec.spans(tp_rank, tp_size)]
    return torch.cat(rows, spec.tp_dim) if rows else tensor.detach().narrow(spec.tp_dim, 0, 0)


class ShardReader:
    """Reads local tensors out of the files of all ranks of a saved run, whatever its TP size. Use as a context manager."""

    def __init__(self, step: Path, kind: str, *, saved_tp_size: int) -> None:
        self._step, self._kind, self._saved_tp_size = step, kind, saved_tp_size
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has(self, key: str, saved: SavedLayout) -> bool:
        """Whether the file of TP rank 0 holds the key."""
        return key in self._file(self._path(saved, 0)).keys()  # noqa: SIM118  (safe_open is no mapping)

    def read(self, key: str, saved: SavedLayout, wanted: ParameterSpec, *, tp_rank: int, tp_size: int) -> Tensor:
        """This rank's shard of the global tensor `key`, on the CPU, with zero padding. InputError where a file is damaged."""
        try:
            local = self._read(key, saved, wanted, tp_rank=tp_rank, tp_size=tp_size)
        except RuntimeError as error:  # slices of other shapes than the metadata says
            raise InputError(f"{self._step}: the files do not hold {key} as metadata.json describes it "
                             f"({error})") from error
        if local.shape != wanted.local_shape(tp_size):
            raise InputError(f"{self._step}: {key} is {tuple(local.shape)} in the files, but "
                             f"{wanted.local_shape(tp_size)} in this model")
        return local

    def _read(self, key: str, saved: SavedLayout, wanted: ParameterSpec, *, tp_rank: int, tp_size: int) -> Tensor:
        if wanted.tp_dim is None:
            return self._slice(self._path(saved, 0), key, None)
        assert saved.tp_dim == wanted.tp_dim, key
        dim = wanted.tp_dim
        local: Tensor | None = None
        for source in range(self._saved_tp_size):
            position = 0  # where a source span stands in the source file's tensor
            for theirs in saved.spec().spans(source, self._saved_tp_size):
                for ours in wanted.spans(tp_rank, tp_size):
                    start = max(theirs.global_start, ours.global_start)
                    stop = min(theirs.global_start + theirs.length, ours.global_start + ours.length)
                    if start >= stop:
                        continue
                    offset = position + start - theirs.global_start
                    rows = self._slice(self._path(saved, source), key, (dim, offset, offset + stop - start))
                    if local is None:
                        local = torch.zeros(wanted.local_shape(tp_size), dtype=rows.dtype)
                    local.narrow(dim, ours.local_start + start - ours.global_start, stop - start).copy_(rows)
                position += theirs.length
        return torch.zeros(wanted.local_shape(tp_size)) if local is None else local

    def _path(self, saved: SavedLayout, tp_rank: int) -> Path:
        return self._step / shard_file(self._kind, saved.pp_rank, tp_rank, self._saved_tp_size)

    def _slice(self, path: Path, key: str, rows: tuple[int, int, int] | None) -> Tensor:
        try:
            if rows is None:
                return self._file(path).get_tensor(key)
            dim, start, stop = rows
            index = (slice(None),) * dim + (slice(start, stop),)
            return self._file(path).get_slice(key)[index]
        except SafetensorError as error:
            raise InputError(f"{path}: cannot read {key} ({error}): the checkpoint is damaged") from error

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path}: cannot be read ({error}): the checkpoint is incomplete or damaged") from error
        return self._files[path]
