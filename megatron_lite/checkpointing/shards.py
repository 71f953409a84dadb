"""Parameters and optimizer states as the shards of global tensors that tensor-parallel ranks hold.

A step that was saved at one TP size can be read at another.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.checkpointing.metadata import Metadata, SavedLayout
from megatron_lite.checkpointing.step_files import shard_file
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import open_input, regular_path
from megatron_lite.data.durable_files import sync
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.state import ParallelState

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def open_tensors(path: Path) -> Any:
    """Opens a safetensors file. Raises InputError if it is none, and as `open_input` does."""
    open_input(path).close()  # its errors say more than those of the library
    with naming(path):
        return safe_open(regular_path(path), framework="pt")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file, whose contents are then on the disk. No two share memory."""
    path.touch()
    # save_file makes the file readable by its owner only. This is the mode that the umask allows.
    mode = path.stat().st_mode
    save_file({key: one.cpu().contiguous() for key, one in tensors.items()}, path, metadata)
    path.chmod(mode)
    sync(path)


def kind_of(key: str) -> str:
    """Returns the kind of file that holds a tensor: "model", or "optimizer" for NAME/STATE."""
    return "optimizer" if "/" in key else "model"


class ShardReader:
    """Reads this rank's tensors from the files of a run that was saved at any TP size.

    A key is the NAME of a parameter, or NAME/STATE.
    metadata: that of the step.
    """

    def __init__(self, step: Path, metadata: Metadata) -> None:
        self._step, self._parameters = step, metadata.parameters
        self._saved_tp_size = metadata.tp_size
        self._file = cache(open_tensors)

    def states(self, name: str) -> set[str]:
        """Returns STATE for each key NAME/STATE of a parameter in the file of TP rank 0."""
        start = f"{name}/"
        keys = self._file(self._path(start, 0)).keys()
        return {key.removeprefix(start) for key in keys if key.startswith(start)}

    def read(
        self, key: str, wanted: ParameterSpec, parallel: ParallelState | None = None
    ) -> Tensor:
        """Returns this rank's shard of the global tensor `key`, on the CPU, with zero padding.

        parallel: None for the whole tensor.

        Raises InputError if a file does not hold the tensor as the metadata describes it, or if the
        metadata describes another split than this model's.
        """
        saved = self._layout(key).spec
        theirs, ours = ((one.global_shape, one.tp_dim, one.tp_blocks) for one in (saved, wanted))
        if theirs != ours:
            raise InputError(
                f"{self._step}: {key} has global shape, tp_dim and tp_blocks {theirs}, this "
                f"model has {ours}"
            )
        dtype, tp_rank, tp_size, ep_rank, ep_size = self.dtype_of(key), 0, 1, 0, 1
        if parallel is not None:
            own_place = parallel.holding(wanted)
            tp_rank, tp_size = own_place.tp_rank, own_place.tp_size
            ep_rank, ep_size = own_place.ep_rank, own_place.ep_size
        dim, shape = wanted.tp_dim, wanted.local_shape(tp_size, ep_size)
        experts: tuple[slice, ...] = ()  # they are dim 0, and their channels are split
        if wanted.of_experts:
            experts = (slice(ep_rank * shape[0], (ep_rank + 1) * shape[0]),)
        if dim is None:
            return self._slice(key, 0, experts)
        local = torch.zeros(shape, dtype=dtype)
        # Every span has a place in the global tensor. The overlap of a saved span and a wanted span
        # is copied, which works for any pair of TP sizes. Padding is in no span and stays zero.
        for source in range(self._saved_tp_size):
            position = 0  # where the span begins in the tensor of the source file
            for span in saved.spans(source, self._saved_tp_size):
                for own in wanted.spans(tp_rank, tp_size):
                    start = max(span.global_start, own.global_start)
                    stop = min(span.global_start + span.length, own.global_start + own.length)
                    if start < stop:
                        first = position + start - span.global_start
                        index = (slice(None),) * dim + (slice(first, first + stop - start),)
                        index = (*experts, *index[len(experts) :])
                        rows = self._slice(key, source, index)
                        place = own.local_start + start - own.global_start
                        local.narrow(dim, place, stop - start).copy_(rows)
                position += span.length
        return local

    def dtype_of(self, key: str) -> torch.dtype:
        """Returns the dtype of a tensor.

        Raises InputError unless every file holds its part in the right shape, in floating point,
        and in the same dtype.
        """
        dtypes, saved, size = set(), self._layout(key).spec, self._saved_tp_size
        dim = saved.tp_dim
        for tp_rank in range(1 if dim is None else size):
            path = self._path(key, tp_rank)
            with naming(path, key):
                part = self._file(path).get_slice(key)
            expected = [*saved.global_shape]
            if dim is not None:  # its rows without padding
                expected[dim] = sum(span.length for span in saved.spans(tp_rank, size))
            found, dtype = part.get_shape(), part.get_dtype()
            if [*found] != expected:
                raise InputError(
                    f"{path}: {key} must have the shape {tuple(expected)} that metadata describes "
                    f"(got {tuple(found)}): the checkpoint is damaged"
                )
            dtypes.add(dtype)
            if dtype not in FLOATS or len(dtypes) > 1:
                raise InputError(
                    f"{path}: {key} must hold one of {', '.join(FLOATS)}, the same in all files "
                    f"(got {dtype}): the checkpoint is damaged"
                )
        return FLOATS[dtypes.pop()]

    def _layout(self, key: str) -> SavedLayout:
        return self._parameters[key.partition("/")[0]]

    def _path(self, key: str, tp_rank: int) -> Path:
        pp_rank = self._layout(key).pp_rank
        return self._step / shard_file(kind_of(key), pp_rank, tp_rank, self._saved_tp_size)

    def _slice(self, key: str, tp_rank: int, index: tuple[slice, ...]) -> Tensor:
        path = self._path(key, tp_rank)
        with naming(path, key):
            file = self._file(path)
            return file.get_slice(key)[index] if index else file.get_tensor(key)


@contextmanager
def naming(path: Path, key: str = "its header") -> Iterator[None]:
    """Makes an InputError of an error of the library about a tensor of the file."""
    try:
        yield
    except SafetensorError as error:
        raise InputError(
            f"{path}: cannot read {key} ({error}): it is missing, truncated or damaged, or no "
            "safetensors file"
        ) from error
