"""The files of a legacy Megatron checkpoint: one folder for each TP and pipeline rank.

DIR/latest_checkpointed_iteration.txt              "40" or "release"
DIR/iter_0000040/mp_rank_00/model_optim_rng.pt     without pipeline parallelism
                 mp_rank_01_003/..                 TP rank 1 of pipeline rank 3
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpointing.other_systems import DIST_METADATA
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import read_input
from megatron_lite.convert.megatron.checkpoint_args import arguments_of, size_of
from megatron_lite.convert.megatron.torch_file import TorchFile, Window

RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
DISTRIBUTED_OPTIMIZER = ("distrib_optim.pt", "optim.pt")
CHUNK = re.compile(r"model(\d{0,3})")


@dataclass(frozen=True, kw_only=True)
class LegacyFiles:
    """All ranks' files of one iteration.

    folders: the folder of (TP rank, pipeline rank).
    values: what its file of the model holds.
    args: the arguments of the run that saved them.
    has_distributed_optimizer: whether optimizer states are in files of their own.
    """

    folder: Path
    folders: Mapping[tuple[int, int], Path]
    values: Mapping[tuple[int, int], dict[str, Any]]
    args: Mapping[str, Any]
    tp_size: int
    pp_size: int
    has_distributed_optimizer: bool

    @classmethod
    def open(cls, path: Path) -> LegacyFiles:
        """Opens the newest iteration under a directory, or one iteration's directory.

        Raises InputError if there is none, if a rank's file is missing, or if a file is damaged.
        """
        folder = iteration_folder(path)
        found = _rank_folders(folder)
        if not found:
            hint = ""
            if (folder / DIST_METADATA).exists():
                hint = ". It is a torch_dist checkpoint: use --from megatron-dist"
            raise InputError(f"{folder}: holds no mp_rank_* folder of Megatron-LM{hint}")
        values = {
            ranks: _value(_model_file(found[ranks]), str(found[ranks])) for ranks in sorted(found)
        }
        first = min(values)
        args = arguments_of(values[first], str(found[first]))
        tp_size = size_of(args, "tensor_model_parallel_size", "model_parallel_size")
        pp_size = size_of(args, "pipeline_model_parallel_size")
        # Without the sizes in the arguments, the names of the folders show them.
        tp_size = tp_size or 1 + max(tp for tp, _ in found)
        pp_size = pp_size or 1 + max(pp for _, pp in found)
        # The sizes may name more ranks than there are folders on earth: one too many is enough.
        every = ((tp, pp) for pp in range(pp_size) for tp in range(tp_size))
        wanted = list(itertools.islice(every, len(found) + 1))
        missing = next((ranks for ranks in wanted if ranks not in found), None)
        if missing is not None:
            raise InputError(
                f"{folder}: was saved by TP {tp_size} x PP {pp_size} ranks, and files are missing, "
                f"first that of TP rank {missing[0]}, pipeline rank {missing[1]}: copy all "
                "mp_rank_* folders"
            )
        return cls(
            folder=folder,
            folders={ranks: found[ranks] for ranks in wanted},
            values={ranks: values[ranks] for ranks in wanted},
            args=args,
            tp_size=tp_size,
            pp_size=pp_size,
            has_distributed_optimizer=any(
                (one / name).exists()
                for one in folder.iterdir()
                if one.is_dir()
                for name in DISTRIBUTED_OPTIMIZER
            ),
        )

    def chunks(self, ranks: tuple[int, int]) -> list[dict[str, Any]]:
        """Returns the model chunks of one rank in their order: one without virtual stages."""
        value = self.values[ranks]
        found = {
            int(name[1] or 0): value[name[0]]
            for key in value
            if isinstance(key, str) and (name := CHUNK.fullmatch(key)) is not None
        }
        if not found or sorted(found) != list(range(len(found))):
            raise InputError(
                f"{self.folder}: the file of TP rank {ranks[0]}, pipeline rank {ranks[1]} holds no "
                f"model, or not all of its chunks (got {sorted(found)})"
            )
        return [found[number] for number in sorted(found)]


def iteration_folder(path: Path) -> Path:
    """Returns the folder of the iteration that a directory's pointer names.

    A path without a pointer is the folder of an iteration itself. Raises InputError if the path is
    no directory, or if the pointer names nothing.
    """
    if not path.is_dir():
        raise InputError(f"--load {path}: no such directory")
    pointer = path / LATEST
    if not pointer.exists():
        return path
    text = read_input(pointer, 32).decode(errors="replace").strip()
    if not re.fullmatch(r"\d{1,9}|release", text):
        raise InputError(f"{pointer}: expected an iteration number or `release`, found {text!r}")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise InputError(f"{pointer}: names {text}, but {folder.name} does not exist")
    return folder


def _rank_folders(folder: Path) -> dict[tuple[int, int], Path]:
    found = {}
    for one in sorted(folder.iterdir()):
        name = RANK_FOLDER.fullmatch(one.name)
        if name is not None and _model_file(one) is not None:
            found[int(name[1]), int(name[2] or 0)] = one
    return found


def _model_file(folder: Path) -> Path | None:
    return next((folder / name for name in MODEL_FILES if os.path.lexists(folder / name)), None)


def _value(path: Path | None, where: str) -> dict[str, Any]:
    assert path is not None, where
    value = TorchFile(Window(path)).value
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds no state dict, but a {type(value).__name__}")
    return value
