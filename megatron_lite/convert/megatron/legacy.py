"""Reads and writes a legacy checkpoint of Megatron-LM: one file for each TP and pipeline rank.

DIR/latest_checkpointed_iteration.txt              "40" or "release"
DIR/iter_0000040/mp_rank_00/model_optim_rng.pt     without pipeline parallelism
                 mp_rank_01_003/..                 TP rank 1 of pipeline rank 3
                 mp_rank_01_003_002/..             and expert rank 2, with expert parallelism

What is written is for Megatron's local layer spec, with a module for each expert. The files of all
ranks are made first, with empty places for their tensors (torch's `skip_data`). Each tensor is then
read once, split, and written to its places, so that only one is in memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpointing.step_files import LATEST
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import crafted
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import Stage, stages
from megatron_lite.convert.megatron import args as megatron_args
from megatron_lite.convert.megatron.legacy_states import Named, read_states
from megatron_lite.convert.megatron.source import (
    EXPERTS,
    Ranks,
    flat,
    has_decay,
    iteration_folder,
    megatron_source,
    our_name,
    whole_parameters,
)
from megatron_lite.convert.megatron.torch_file import Window, read_torch_file
from megatron_lite.convert.target import complete_folder
from megatron_lite.convert.weights import (
    LAYERS,
    OUTPUT,
    WEIGHT,
    WORDS,
    Advance,
    Described,
    WeightSource,
    copy_tensors,
    is_buffer,
    is_held,
    layer_of,
    parameter_specs,
    refused,
    shard,
)
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.torch_internals import FakeTensorMode, tree_leaves, tree_map

RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
CHUNKS = tuple(f"model{number}" for number in range(1000))  # of virtual stages


def legacy_source(path: Path) -> WeightSource:
    """Opens the newest iteration under a directory, or one iteration's directory.

    Raises InputError if there is none, if a rank's file is missing, or if a file is damaged.
    """
    folder = iteration_folder(path, "megatron")
    with crafted(str(folder)):
        return _opened(folder)


def _opened(folder: Path) -> WeightSource:
    where, files = str(folder), dict(_rank_files(folder))
    if not files:
        raise InputError(
            f"{where}: holds no mp_rank_*/{MODEL_FILES[0]}: copy all mp_rank_* folders"
        )
    common = read_torch_file(Window(files[min(files)]))
    args = megatron_args.arguments_of(common, files[min(files)])
    ep_size = megatron_args.size_of(args, "expert_model_parallel_size") or 1
    expert_tp_size = megatron_args.size_of(args, "expert_tensor_parallel_size")
    named = {_ranks(numbers, ep_size > 1): file for numbers, file in files.items()}
    # Without the sizes in the arguments, the names of the folders show them.
    tp_size, pp_size = (
        megatron_args.size_of(args, *names) or 1 + max(ranks[axis] for ranks in named)
        for axis, names in enumerate(
            (
                ("tensor_model_parallel_size", "model_parallel_size"),
                ("pipeline_model_parallel_size",),
            )
        )
    )
    sizes = (tp_size, pp_size, ep_size)
    if args.get("num_experts") and expert_tp_size not in (None, tp_size):
        raise InputError(
            f"{where}: its experts are split over {expert_tp_size} TP ranks, and all else over "
            f"{tp_size}: save the checkpoint with --ckpt-format torch_dist, which any layout reads"
        )
    # Folders of another run may lie beside those of this one.
    named = {
        ranks: file
        for ranks, file in sorted(named.items())
        if all(rank < size for rank, size in zip(ranks, sizes, strict=True))
    }
    if len(named) < math.prod(sizes):
        raise InputError(
            f"{where}: was saved by TP {tp_size} x PP {pp_size} ranks"
            f"{f' x EP {ep_size}' * (ep_size > 1)}, and holds {len(named)} of their files: copy "
            "all mp_rank_* folders"
        )
    values = {ranks: read_torch_file(Window(file)) for ranks, file in named.items()}
    model = megatron_args.model_of(args, where)
    parts = _parts(where, values, model.num_layers)
    held = [
        (ranks, name, tensor)
        for ranks, chunks in parts.items()
        for name, tensor in itertools.chain(*chunks)
    ]
    weights = whole_parameters(held, model, ep_size)
    for name, of_ranks in weights.items():
        if len(of_ranks) != tp_size:
            raise InputError(f"{where}: {len(of_ranks)} of {tp_size} TP ranks hold {name}")
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
        lambda: read_states(optimizers, named, parts, model),
        tp_size=tp_size,
        version=version,
    )


def _rank_files(folder: Path) -> Iterator[tuple[tuple[int, ...], Path]]:
    """Yields each rank's file with the numbers of its folder; the one that counts comes last."""
    for file in sorted(folder.glob("mp_rank_*/model_*rng.pt"), reverse=True):
        name = RANK_FOLDER.fullmatch(file.parent.name)
        if name is not None and file.name in MODEL_FILES:
            yield tuple(int(number) for number in name.groups() if number), file


def _ranks(numbers: tuple[int, ...], has_expert_ranks: bool) -> Ranks:
    """Returns the ranks that the numbers of a folder mean. Axes of size 1 have no number."""
    tp_rank, *others = numbers
    expert_rank = others.pop() if has_expert_ranks and others else 0
    return tp_rank, others[0] if others else 0, expert_rank


def _parts(
    where: str, values: Mapping[Ranks, dict[str, Any]], num_layers: int
) -> dict[Ranks, list[list[Named]]]:
    """Returns the tensors of each rank's model chunks, by their names in the whole model."""
    chunks = {
        # Without virtual stages there is one chunk.
        ranks: [one[key] for key in ("model", *CHUNKS) if key in one]
        for ranks, one in values.items()
    }
    most = max(map(len, chunks.values()))
    for ranks, own in chunks.items():
        if len(own) != most or most == 0:
            raise InputError(
                f"{where}: the file of TP and PP rank {ranks[:2]} holds {len(own)} model chunks, "
                f"and others {most}: copy all mp_rank_* folders of one run"
            )
    found: dict[Ranks, list[list[Named]]] = {ranks: [] for ranks in values}
    first_layer, seen = 0, set[int]()
    pp_ranks = sorted({pp for _, pp, _ in values})
    # stage number = chunk * PP + pipeline rank
    for chunk, pp_rank in itertools.product(range(most), pp_ranks):
        layers = 0
        for ranks in (ranks for ranks in values if ranks[1] == pp_rank):
            named = []
            for key, value in flat(chunks[ranks][chunk], seen):
                name = our_name(key)
                if name is None or value is None:
                    continue
                layer, rest = layer_of(name)
                if not isinstance(value, Tensor) or (layer is None and name.startswith(LAYERS)):
                    raise InputError(f"{where}: {key} is no plain tensor of a layer")
                if layer is not None:
                    layers = max(layers, layer + 1)
                    name = f"{LAYERS}{first_layer + layer}.{rest}"
                named.append((name, value))
            found[ranks].append(named)
        first_layer += layers
    if first_layer != num_layers:
        raise InputError(
            f"{where}: its files hold {first_layer} layers, and its args say num_layers = "
            f"{num_layers}"
        )
    return found


# --- writing ---


# The order of a layer's modules in Megatron-LM, which numbers the optimizer states.
ORDER = (
    *("input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
    *("mlp.router", "mlp.experts", "mlp.shared_experts"),
)


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a state dict: that of a parameter, or of one of its states.

    expert: the number of the expert, of whose own tensor it is the place.
    """

    name: str
    key: str = WEIGHT
    expert: int | None = None

    @property
    def number(self) -> tuple[Any, ...]:
        """The place among those of a model, in the order of Megatron-LM's modules."""
        layer, rest = layer_of(self.name)
        if layer is None:
            return (0 if self.name.startswith("embedding.") else 2,)
        module, _, kind = rest.rpartition(".")
        # In each module the weight comes before the bias.
        place = next(number for number, one in enumerate(ORDER) if module.startswith(one))
        return 1, layer, place, self.expert or 0, module, kind == "bias"

    def theirs(self, first_layer: int) -> str:
        """Returns the name in the file of a stage that begins with the layer `first_layer`."""
        layer, rest = layer_of(self.name)
        if layer is None:
            return self.name
        if self.expert is not None:
            rest = rest.replace("experts.", f"experts.local_experts.{self.expert}.")
        return f"{LAYERS}{layer - first_layer}.{rest}"


def write_legacy(
    source: WeightSource, path: Path, advance: Advance, *, tp_size: int = 1, pp_size: int = 1
) -> None:
    """Writes all that the source has into a new directory, as Megatron-LM's `--save` does with
    `--ckpt-format torch`. The directory appears complete, or not at all.

    Raises InputError if the model does not divide over the parallel sizes.
    """
    described = source.described
    megatron_args.check_exact(described, "megatron")
    dtypes = {dtype for name, dtype in described.dtypes.items() if not is_buffer(name)}
    if len(dtypes) > 1:
        raise InputError(
            "--to megatron: the weights have several dtypes, and Megatron-LM has one: convert with "
            "--to hf"
        )
    padded = megatron_args.padded_vocab_size(described, tp_size)
    with refused("--to megatron"):
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size
        )
        specs = parameter_specs(
            described.model, described.true_vocab_size, tp_size=tp_size, padded_vocab_size=padded
        )
        held = stages(parallel, described.model.num_layers)
    places: dict[tuple[str, str], list[tuple[int, int | None, Tensor]]] = defaultdict(list)

    def empty(leaf: object) -> object:
        if not isinstance(leaf, Place):
            return leaf
        shape = specs[leaf.name].local_shape(tp_size)[0 if leaf.expert is None else 1 :]
        return torch.empty(shape, dtype=described.dtype_of(leaf.name, leaf.key))

    def put(name: str, key: str, whole: Tensor) -> None:
        parts = [shard(whole, specs[name], tp_rank, tp_size) for tp_rank in range(tp_size)]
        for tp_rank, expert, tensor in places[name, key]:
            tensor.copy_(parts[tp_rank] if expert is None else parts[tp_rank][expert])

    newest, folder_name = megatron_args.newest(described)
    with complete_folder(path) as folder:
        for stage, tp_rank in itertools.product(held, range(tp_size)):
            rank = f"mp_rank_{tp_rank:02d}" + (f"_{stage.rank:03d}" if pp_size > 1 else "")
            file = folder / folder_name / rank / MODEL_FILES[0]
            file.parent.mkdir(parents=True)
            # Fake tensors have sizes and no numbers, so the whole model is never in memory. The
            # file gets room for each of them.
            value = _state_dict(described, specs, stage, tp_size)
            with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(tree_map(empty, value), file)
            found = tree_leaves(read_torch_file(Window(file), shared=True))
            for place, tensor in zip(tree_leaves(value), found, strict=True):
                if isinstance(place, Place):
                    places[place.name, place.key].append((tp_rank, place.expert, tensor))
        copy_tensors(source, put, advance)
        (folder / LATEST).write_text(newest)


def _state_dict(
    described: Described, specs: Mapping[str, ParameterSpec], stage: Stage, tp_size: int
) -> dict[str, Any]:
    """Returns what the file of one TP rank of a pipeline stage holds, with places for tensors."""
    held = [
        Place(name, expert=expert)
        for name, spec in specs.items()
        if is_held(name, stage)
        for expert in (range(spec.global_shape[0]) if EXPERTS in name else (None,))
    ]
    held.sort(key=lambda place: place.number)
    model: dict[str, Any] = OrderedDict((one.theirs(stage.first_layer), one) for one in held)
    if OUTPUT not in specs and stage.is_last and not stage.is_first:
        held.append(Place(WORDS))
        model[OUTPUT] = held[-1]
    value = megatron_args.common_values(described, tp_size=tp_size, pp_size=stage.count)
    value["model"] = model
    if not described.state_keys:
        return value
    # The optimizer numbers its parameters, those with weight decay first.
    groups, numbers = megatron_args.groups(described), itertools.count()
    states, masters = {}, []
    for group, decays in zip(groups, (True, False), strict=True):
        own = [
            one
            for one in held
            if has_decay(one.name, len(specs[one.name].global_shape)) is decays
            and not is_buffer(one.name)
        ]
        group["params"] = list(itertools.islice(numbers, len(own)))
        for number, one in zip(group["params"], own, strict=True):
            states[number] = {key: replace(one, key=key) for key in megatron_args.ADAM}
        masters.append([replace(one, key=megatron_args.MASTER) for one in own])
    value["optimizer"] = {"state": states, "param_groups": groups}
    if megatron_args.MASTER in described.state_keys:
        value["optimizer"] = {"optimizer": value["optimizer"], "fp32_from_fp16_params": masters}
    return value
