"""Parameters and optimizer states as the shards of global tensors that tensor-parallel ranks hold.

A step that was saved at one TP size can be read at another.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import open_input, regular_path
from megatron_lite.data.durable_files import sync
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.state import ParallelState

from .metadata import Metadata, damaged, parse_json, read_config, saved_spec
from .step_files import parameters_file, shard_file

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
WHOLE = SimpleNamespace(tp_rank=0, tp_size=1, ep_rank=0, ep_size=1)  # one rank that holds all


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


class SavedLayout(NamedTuple):
    """The layout of a saved parameter.

    spec: of which the fields FIELDS count.
    pp_rank: the pipeline rank whose files hold the parameter.
    """

    spec: ParameterSpec
    pp_rank: int


class SavedStep:
    """A step that is read: its JSON files at once, and tensors when they are asked for.

    A key is the NAME of a parameter, or NAME/STATE.
    layouts: that of each parameter, by name.
    Raises InputError if a JSON file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.metadata, self.config = path, Metadata.read(path), read_config(path)
        self.layouts: dict[str, SavedLayout] = {}
        self._file = cache(open_tensors)
        for pp_rank in range(self.metadata.pp_size):
            file = path / parameters_file(pp_rank)
            with damaged(file):
                for name, values in parse_json(file).items():
                    spec = saved_spec(values, name, self.metadata.tp_size)
                    self.layouts[name] = SavedLayout(spec, pp_rank)

    def states(self, name: str) -> set[str]:
        """Returns STATE for each key NAME/STATE of a parameter in the file of TP rank 0."""
        start = f"{name}/"
        keys = self._file(self._path(start, 0)).keys()
        return {key.removeprefix(start) for key in keys if key.startswith(start)}

    def dtype_of(self, key: str) -> torch.dtype:
        """Returns the dtype of a tensor. Raises InputError as `read` does."""
        return self._parts(key)[0]

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
                f"{self.path}: {key} has global shape, tp_dim and tp_blocks {theirs}, this "
                f"model has {ours}"
            )
        dtype, parts = self._parts(key)
        own_place = parallel.holding(wanted) if parallel else WHOLE
        dim, shape = wanted.tp_dim, wanted.local_shape(own_place.tp_size, own_place.ep_size)
        index = [slice(None)] * len(shape)
        if wanted.of_experts:  # they are dim 0, and their channels are split
            first = own_place.ep_rank * shape[0]
            index[0] = slice(first, first + shape[0])
        if dim is None:
            return parts[0][tuple(index)]
        local = torch.zeros(shape, dtype=dtype)
        # Every span has a place in the global tensor. The overlap of a saved span and a wanted span
        # is copied, which works for any pair of TP sizes. Padding is in no span and stays zero.
        for source, part in enumerate(parts):
            position = 0  # where the span begins in the tensor of the source file
            for span in saved.spans(source, len(parts)):
                for own in wanted.spans(own_place.tp_rank, own_place.tp_size):
                    start = max(span.global_start, own.global_start)
                    stop = min(span.global_start + span.length, own.global_start + own.length)
                    if start < stop:
                        first = position + start - span.global_start
                        index[dim] = slice(first, first + stop - start)
                        place = own.local_start + start - own.global_start
                        local.narrow(dim, place, stop - start).copy_(part[tuple(index)])
                position += span.length
        return local

    def _parts(self, key: str) -> tuple[torch.dtype, list[Any]]:
        """Returns the dtype of a tensor, and what reads its part in the file of each TP rank.

        Raises InputError unless every file holds its part in the right shape, in floating point,
        and in the same dtype.
        """
        parts, dtypes = list[Any](), set()
        saved, size = self._layout(key).spec, self.metadata.tp_size
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
            parts.append(part)
        return FLOATS[dtype], parts

    def _layout(self, key: str) -> SavedLayout:
        return self.layouts[key.partition("/")[0]]

    def _path(self, key: str, tp_rank: int) -> Path:
        pp_rank = self._layout(key).pp_rank
        return self.path / shard_file(kind_of(key), pp_rank, tp_rank, self.metadata.tp_size)


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
