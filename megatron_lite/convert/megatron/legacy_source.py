"""Reads a legacy Megatron checkpoint: one file for each TP and pipeline rank.

DIR/latest_checkpointed_iteration.txt              "40" or "release"
DIR/iter_0000040/mp_rank_00/model_optim_rng.pt     without pipeline parallelism
                 mp_rank_01_003/..                 TP rank 1 of pipeline rank 3
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lite.checkpointing.other_systems import DIST_METADATA
from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import read_input
from megatron_lite.convert.megatron.checkpoint_args import arguments_of, model_of, size_of
from megatron_lite.convert.megatron.legacy_states import DISTRIBUTED_OPTIMIZER, read_states
from megatron_lite.convert.megatron.parameter_names import flat, our_name
from megatron_lite.convert.megatron.source import Found, MegatronSource
from megatron_lite.convert.megatron.torch_file import Window, read_torch_file

RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
CHUNK = re.compile(r"model(\d{0,3})")

Ranks = tuple[int, int]  # a TP rank and a pipeline rank


class StagePart(NamedTuple):
    """The tensors that one TP rank holds of one pipeline stage, in the order of the model."""

    ranks: Ranks
    tensors: Mapping[str, Tensor]


def legacy_source(path: Path) -> MegatronSource:
    """Opens the newest iteration under a directory, or one iteration's directory.

    Raises InputError if there is none, if a rank's file is missing, or if a file is damaged.
    """
    folder = iteration_folder(path)
    where = str(folder)
    files = _rank_files(folder)
    values = {ranks: _state_dict(file) for ranks, file in sorted(files.items())}
    first = min(values)
    args = arguments_of(values[first], str(files[first]))
    tp_size, pp_size = _sizes(where, args, values)
    # Folders of another run may lie beside those of this one.
    values = {(tp, pp): one for (tp, pp), one in values.items() if tp < tp_size and pp < pp_size}
    model = model_of(args, where)
    stages = _stages(where, values, tp_size, pp_size, model.num_layers)
    weights: dict[str, list[Tensor]] = {}
    for stage in stages:
        for name in dict.fromkeys(name for part in stage for name in part.tensors):
            held = [part.tensors.get(name) for part in stage]
            if any(one is None for one in held):
                rank = next(rank for rank, one in enumerate(held) if one is None)
                raise InputError(
                    f"{where}: TP rank {rank} of pipeline rank {stage[0].ranks[1]} does not hold "
                    f"{name}"
                )
            weights.setdefault(name, [one for one in held if one is not None])
    version = values[first].get("checkpoint_version", 0)
    if type(version) not in (int, float) or version not in (0, 1, 2, 3):
        raise InputError(f"{where}: its checkpoint_version must be 0, 1, 2 or 3")
    distributed = any((one.parent / DISTRIBUTED_OPTIMIZER).exists() for one in files.values())
    saved = {
        ranks: (files[ranks].parent, value.get("optimizer")) for ranks, value in values.items()
    }
    parts = [part for stage in stages for part in stage]
    return MegatronSource(
        Found(
            where=where,
            common=values[first],
            args=args,
            model=model,
            weights=weights,
            states=read_states(saved, parts, distributed=distributed),
            tp_size=tp_size,
            version=version,
        )
    )


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


def _rank_files(folder: Path) -> dict[Ranks, Path]:
    found = {}
    for one, file in itertools.product(sorted(folder.iterdir()), reversed(MODEL_FILES)):
        name = RANK_FOLDER.fullmatch(one.name)
        if name is not None and os.path.lexists(one / file):
            found[int(name[1]), int(name[2] or 0)] = one / file
    if not found:
        hint = ""
        if (folder / DIST_METADATA).exists():
            hint = ". It is a torch_dist checkpoint: use --from megatron-dist"
        raise InputError(f"{folder}: holds no mp_rank_* folder of Megatron-LM{hint}")
    return found


def _state_dict(path: Path) -> dict[str, Any]:
    value = read_torch_file(Window(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds no state dict, but a {type(value).__name__}")
    return value


def _sizes(where: str, args: Mapping[str, Any], found: Mapping[Ranks, object]) -> tuple[int, int]:
    """Returns the TP and PP sizes of the run. Raises InputError if a rank's file is missing."""
    # Without the sizes in the arguments, the names of the folders show them.
    tp_size = size_of(args, "tensor_model_parallel_size", "model_parallel_size")
    tp_size = tp_size or 1 + max(tp for tp, _ in found)
    pp_size = size_of(args, "pipeline_model_parallel_size") or 1 + max(pp for _, pp in found)
    # The sizes may name more ranks than there are folders on earth: the first missing one ends it.
    every = ((tp, pp) for pp in range(pp_size) for tp in range(tp_size))
    missing = next((ranks for ranks in every if ranks not in found), None)
    if missing is not None:
        raise InputError(
            f"{where}: was saved by TP {tp_size} x PP {pp_size} ranks, and files are missing, "
            f"first that of TP rank {missing[0]}, pipeline rank {missing[1]}: copy all "
            "mp_rank_* folders"
        )
    return tp_size, pp_size


def _stages(
    where: str, values: Mapping[Ranks, dict[str, Any]], tp_size: int, pp_size: int, num_layers: int
) -> list[list[StagePart]]:
    """Returns the stages in the order of the model, each with the part of every TP rank."""
    ranks = list(itertools.product(range(pp_size), range(tp_size)))
    chunks = {
        (tp, pp): _chunks(f"{where}: TP rank {tp}, pipeline rank {pp}", values[tp, pp])
        for pp, tp in ranks
    }
    count = len(chunks[0, 0])
    if any(len(one) != count for one in chunks.values()):
        raise InputError(f"{where}: the ranks hold different numbers of model chunks")
    found: list[list[StagePart]] = []
    first_layer = layers = 0
    seen: set[int] = set()
    # stage number = chunk * PP + pipeline rank
    for chunk, (pp, tp) in itertools.product(range(count), ranks):
        if tp == 0:
            found.append([])
            first_layer, layers = first_layer + layers, 0
        place = f"{where}: TP rank {tp}, pipeline rank {pp}"
        tensors, own = _tensors(place, chunks[tp, pp][chunk], first_layer, seen)
        layers = max(layers, own)
        found[-1].append(StagePart((tp, pp), tensors))
    if first_layer + layers != num_layers:
        raise InputError(
            f"{where}: its files hold {first_layer + layers} layers, and its args say num_layers = "
            f"{num_layers}"
        )
    return found


def _chunks(where: str, value: dict[str, Any]) -> list[Any]:
    """Returns the model chunks of one rank in their order: one without virtual stages."""
    found = {
        int(name[1] or 0): value[name[0]]
        for key in value
        if isinstance(key, str) and (name := CHUNK.fullmatch(key)) is not None
    }
    if not found or sorted(found) != list(range(len(found))):
        raise InputError(
            f"{where}: its file holds no model, or not all of its chunks (got {sorted(found)})"
        )
    return [found[number] for number in sorted(found)]


def _tensors(
    where: str, chunk: Any, first_layer: int, seen: set[int]
) -> tuple[dict[str, Tensor], int]:
    """Returns the tensors of a model chunk by their names in the whole model, and its layers."""
    if not isinstance(chunk, dict):
        raise InputError(f"{where}: its model is no state dict")
    tensors, layers = {}, 0
    try:
        named = flat(chunk, seen)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    for key, value in named.items():
        name = our_name(key)
        if name is None or value is None:
            continue
        if not isinstance(value, Tensor) or name.stacked:
            raise InputError(f"{where}: {key} is no plain tensor of a layer")
        if name.layer is not None:
            layers = max(layers, name.layer + 1)
        tensors[name.whole(first_layer)] = value
    return tensors, layers
