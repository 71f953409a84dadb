"""Reads and writes a legacy checkpoint of Megatron-LM: one file for each TP and pipeline rank.

DIR/latest_checkpointed_iteration.txt              "40" or "release"
DIR/iter_0000040/mp_rank_00/model_optim_rng.pt     without pipeline parallelism
                 mp_rank_01_003/..                 TP rank 1 of pipeline rank 3

What is written is for Megatron's local layer spec. The files of all ranks are made first, with
empty places for their tensors (torch's `skip_data`). Each tensor is then read once, split, and
written to its places, so that only one is in memory.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted
from megatron_lite.config.stages import Stage
from megatron_lite.convert.megatron import args as megatron_args
from megatron_lite.convert.megatron.legacy_states import Named, read_states
from megatron_lite.convert.megatron.names import (
    EXTRA_STATE,
    LINEARS,
    flat,
    has_decay,
    in_order,
    our_name,
)
from megatron_lite.convert.megatron.source import iteration_folder, megatron_source
from megatron_lite.convert.megatron.torch_file import Window, read_torch_file
from megatron_lite.convert.staging import complete_folder
from megatron_lite.convert.weights import (
    LAYERS,
    OUTPUT,
    WEIGHT,
    WORDS,
    Advance,
    Described,
    WeightSource,
    copy_tensors,
    is_held,
    layer_of,
    refused,
    shard,
    split_over,
)
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.torch_internals import FakeTensorMode, tree_leaves

RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
CHUNK = re.compile(r"model\d{1,3}")

Ranks = tuple[int, int]  # a TP rank and a pipeline rank


def legacy_source(path: Path) -> WeightSource:
    """Opens the newest iteration under a directory, or one iteration's directory.

    Raises InputError if there is none, if a rank's file is missing, or if a file is damaged.
    """
    folder = iteration_folder(path, "megatron")
    with crafted(str(folder)):
        return _opened(folder)


def _opened(folder: Path) -> WeightSource:
    where, files = str(folder), _rank_files(folder)
    values = {ranks: read_torch_file(Window(file)) for ranks, file in sorted(files.items())}
    first = min(values)
    common = values[first]
    args = megatron_args.arguments_of(common, files[first])
    tp_size, pp_size = _sizes(where, args, values)
    # Folders of another run may lie beside those of this one.
    values = {(tp, pp): one for (tp, pp), one in values.items() if tp < tp_size and pp < pp_size}
    model = megatron_args.model_of(args, where)
    parts = _parts(where, values, pp_size, model.num_layers)
    weights: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in itertools.chain(*itertools.chain(*parts.values())):
        weights[name].append(tensor)
    for name, held in weights.items():
        if len(held) != tp_size:
            raise InputError(f"{where}: {len(held)} of {tp_size} TP ranks hold {name}")
    version = common.get("checkpoint_version", 0)
    if version not in (0, 1, 2, 3):
        raise InputError(f"{where}: its checkpoint_version must be 0, 1, 2 or 3")
    optimizers = {ranks: value.get("optimizer") for ranks, value in values.items()}
    return megatron_source(
        where,
        common,
        args,
        model,
        weights,
        lambda: read_states(optimizers, files, parts),
        tp_size=tp_size,
        version=version,
    )


def _rank_files(folder: Path) -> dict[Ranks, Path]:
    found = {}
    for file in sorted(folder.glob("mp_rank_*/model_*rng.pt"), reverse=True):
        name = RANK_FOLDER.fullmatch(file.parent.name)
        if name is not None and file.name in MODEL_FILES:
            found[int(name[1]), int(name[2] or 0)] = file
    if not found:
        raise InputError(
            f"{folder}: holds no mp_rank_*/{MODEL_FILES[0]}: copy all mp_rank_* folders, and the "
            f"{LATEST} beside the iterations"
        )
    return found


def _sizes(where: str, args: Mapping[str, Any], found: Mapping[Ranks, object]) -> tuple[int, int]:
    """Returns the TP and PP sizes of the run. Raises InputError if a rank's file is missing."""
    # Without the sizes in the arguments, the names of the folders show them.
    size_of = megatron_args.size_of
    tp_size = size_of(args, "tensor_model_parallel_size", "model_parallel_size")
    tp_size = tp_size or 1 + max(tp for tp, _ in found)
    pp_size = size_of(args, "pipeline_model_parallel_size") or 1 + max(pp for _, pp in found)
    count = sum(tp < tp_size and pp < pp_size for tp, pp in found)
    if count < tp_size * pp_size:
        raise InputError(
            f"{where}: was saved by TP {tp_size} x PP {pp_size} ranks, and holds {count} of their "
            "files: copy all mp_rank_* folders"
        )
    return tp_size, pp_size


def _parts(
    where: str, values: Mapping[Ranks, dict[str, Any]], pp_size: int, num_layers: int
) -> dict[Ranks, list[list[Named]]]:
    """Returns the tensors of each rank's model chunks, by their names in the whole model."""
    chunks = {ranks: _chunks(f"{where}: TP and PP rank {ranks}", values[ranks]) for ranks in values}
    # The TP ranks are in their order, in which the parts of a tensor are joined.
    found: dict[Ranks, list[list[Named]]] = {ranks: [] for ranks in sorted(values)}
    first_layer = 0
    seen: set[int] = set()
    # stage number = chunk * PP + pipeline rank
    for chunk, pp in itertools.product(range(max(map(len, chunks.values()))), range(pp_size)):
        layers = 0
        for ranks in found:
            if ranks[1] != pp:
                continue
            named = []
            for key, value in flat(chunks[ranks][chunk], seen):
                name = our_name(key)
                if name is None or value is None:
                    continue
                layer, own = layer_of(name)
                if not isinstance(value, Tensor) or (layer is None and name.startswith(LAYERS)):
                    raise InputError(f"{where}: {key} is no plain tensor of a layer")
                if layer is not None:
                    layers = max(layers, layer + 1)
                    name = f"{LAYERS}{first_layer + layer}.{own}"
                named.append((name, value))
            found[ranks].append(named)
        first_layer += layers
    if first_layer != num_layers:
        raise InputError(
            f"{where}: its files hold {first_layer} layers, and its args say num_layers = "
            f"{num_layers}"
        )
    return found


def _chunks(where: str, value: Mapping[Any, Any]) -> list[Any]:
    """Returns the model chunks of one rank in their order: one without virtual stages."""
    if "model" in value:
        return [value["model"]]
    count = sum(CHUNK.fullmatch(str(key)) is not None for key in value)
    if count == 0:
        raise InputError(f"{where}: its file holds no model")
    return [value[f"model{number}"] for number in range(count)]


# --- writing ---

Make = Callable[[str, str], Tensor]  # makes the place of a parameter's tensor


def write_legacy(
    source: WeightSource, path: Path, advance: Advance, *, tp_size: int = 1, pp_size: int = 1
) -> None:
    """Writes all that the source has into a new directory, as Megatron-LM's `--save` does with
    `--ckpt-format torch`. The directory appears complete, or not at all.

    Raises InputError if the model does not divide over the parallel sizes.
    """
    described = source.described
    megatron_args.check_exact(described, "megatron")
    if len(set(described.dtypes.values())) > 1:
        raise InputError(
            "--to megatron: the weights have several dtypes, and Megatron-LM has one: convert with "
            "--to hf"
        )
    padded = megatron_args.padded_vocab_size(described, tp_size)
    with refused("--to megatron"):
        specs, held = split_over(
            described.model, described.true_vocab_size, padded, tp_size=tp_size, pp_size=pp_size
        )
    places: dict[tuple[str, str], list[tuple[int, Tensor]]] = defaultdict(list)

    def put(name: str, key: str, whole: Tensor) -> None:
        for tp_rank, place in places[name, key]:
            place.copy_(shard(whole, specs[name], tp_rank, tp_size))

    newest, folder_name = megatron_args.newest(described)
    with complete_folder(path) as folder:
        for stage, tp_rank in itertools.product(held, range(tp_size)):
            rank = f"mp_rank_{tp_rank:02d}" + (f"_{stage.rank:03d}" if pp_size > 1 else "")
            file = folder / folder_name / rank / MODEL_FILES[0]
            file.parent.mkdir(parents=True)
            made: dict[int, tuple[str, str]] = {}

            def make(name: str, key: str, made: dict[int, tuple[str, str]] = made) -> Tensor:
                shape, dtype = specs[name].local_shape(tp_size), described.dtype_of(name, key)
                tensor = torch.empty(shape, dtype=dtype)
                made[id(tensor)] = (name, key)
                return tensor

            # Fake tensors have sizes and no numbers, so the whole model is never in memory. The
            # file gets room for each of them.
            with FakeTensorMode():
                value = _state_dict(described, specs, stage, tp_size, make)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(value, file)
            found = read_torch_file(Window(file), shared=True)
            for fake, tensor in zip(tree_leaves(value), tree_leaves(found), strict=True):
                if id(fake) in made:
                    places[made[id(fake)]].append((tp_rank, tensor))
        copy_tensors(source, put, advance)
        (folder / LATEST).write_text(newest)


def _state_dict(
    described: Described, specs: Mapping[str, ParameterSpec], stage: Stage, tp_size: int, make: Make
) -> dict[str, Any]:
    """Returns what the file of one TP rank of a pipeline stage holds."""
    model: dict[str, Any] = OrderedDict()
    names = [name for name in in_order(specs) if is_held(name, stage)]
    for name in names:
        layer, own = layer_of(name)
        key = name if layer is None else f"{LAYERS}{layer - stage.first_layer}.{own}"
        model[key] = make(name, WEIGHT)
    if OUTPUT not in specs and stage.is_last and not stage.is_first:
        names.append(WORDS)
        model[OUTPUT] = make(WORDS, WEIGHT)
    for layer, linear in itertools.product(range(stage.num_layers), LINEARS):
        model[f"{LAYERS}{layer}.{linear}.{EXTRA_STATE}"] = None
    if stage.is_last:
        model[f"output_layer.{EXTRA_STATE}"] = None
    value = megatron_args.common_values(described, tp_size=tp_size, pp_size=stage.count)
    value["model"] = model
    if described.state_keys:
        value["optimizer"] = _optimizer(described, specs, names, make)
    return value


def _optimizer(
    described: Described, specs: Mapping[str, ParameterSpec], names: Sequence[str], make: Make
) -> dict[str, Any]:
    """Returns the optimizer of one rank. It numbers its parameters, those with decay first."""
    by_decay = [
        [name for name in names if has_decay(name, len(specs[name].global_shape)) is decay]
        for decay in (True, False)
    ]
    groups, count = megatron_args.groups(described), itertools.count()
    for group, members in zip(groups, by_decay, strict=True):
        group["params"] = [next(count) for _ in members]
    states = {
        number: {key: make(name, key) for key in megatron_args.ADAM}
        for number, name in enumerate(itertools.chain(*by_decay))
    }
    inner = {"state": states, "param_groups": groups}
    if megatron_args.MASTER not in described.state_keys:
        return inner
    masters = [[make(name, megatron_args.MASTER) for name in members] for members in by_decay]
    return {"optimizer": inner, "fp32_from_fp16_params": masters}
