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
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.input_file import crafted
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import Stage, stages
from megatron_lite.convert.megatron import args as megatron_args
from megatron_lite.convert.megatron.source import (
    EXPERTS,
    Ranks,
    Unmapped,
    flat,
    has_decay,
    iteration_folder,
    megatron_source,
    need,
    our_name,
    updates_of,
    whole_parameters,
)
from megatron_lite.convert.megatron.torch_file import Window, read_torch_file
from megatron_lite.convert.weights import (
    LAYERS,
    OUTPUT,
    WEIGHT,
    WORDS,
    Advance,
    WeightSource,
    copy_tensors,
    is_buffer,
    layer_of,
    parameter_specs,
    split,
)
from megatron_lite.parallel.parameter_spec import ParameterSpec
from megatron_lite.parallel.torch_internals import FakeTensorMode, tree_leaves, tree_map

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"
CHUNKS = tuple(f"model{number}" for number in range(1000))  # of virtual stages
COMPARED = 256  # numbers of each parameter
# What values of another form than Megatron's lead to.
FOREIGN = (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, ValueError)

Named = tuple[str, Tensor]


def legacy_source(path: Path) -> WeightSource:
    """Opens the newest iteration under a directory, or one iteration's directory.

    Raises InputError if there is none, if a rank's file is missing, or if a file is damaged.
    """
    folder = iteration_folder(path, "megatron")
    with crafted(str(folder)):
        return _opened(folder)


def _opened(folder: Path) -> WeightSource:
    where = str(folder)
    first = min(folder.glob("mp_rank_*/model_*rng.pt"), default=None)
    if first is None:
        raise InputError(f"{where}: holds no mp_rank_*/{MODEL_FILES[0]}: copy all of its folders")
    common = read_torch_file(Window(first))
    args = megatron_args.arguments_of(common, first)
    sizes = [
        megatron_args.size_of(args, *names) or 1
        for names in (
            ("tensor_model_parallel_size", "model_parallel_size"),
            ("pipeline_model_parallel_size",),
            ("expert_model_parallel_size",),
        )
    ]
    tp_size, _, ep_size = sizes
    expert_tp_size = megatron_args.size_of(args, "expert_tensor_parallel_size")
    if args.get("num_experts") and expert_tp_size not in (None, tp_size):
        raise InputError(
            f"{where}: its experts are split over {expert_tp_size} TP ranks, and all else over "
            f"{tp_size}: save the checkpoint with --ckpt-format torch_dist, which any layout reads"
        )
    # Folders of another run may lie beside those of this one.
    files = {ranks: _rank_file(folder, ranks, sizes) for ranks in product(*map(range, sizes))}
    values = {ranks: read_torch_file(Window(file)) for ranks, file in files.items()}
    model = megatron_args.model_of(args, where)
    parts = _parts(where, values, model.num_layers)
    held = [(ranks, name, value) for ranks, own in parts.items() for name, value in own]
    weights = whole_parameters(held, model, ep_size)
    for name, of_ranks in weights.items():
        if len(of_ranks) != tp_size:
            raise InputError(f"{where}: {len(of_ranks)} of {tp_size} TP ranks hold {name}")
    version = common.get("checkpoint_version", 0)
    if version not in (0, 1, 2, 3):
        raise InputError(f"{where}: its checkpoint_version must be 0, 1, 2 or 3")

    def states() -> tuple[dict[str, Any], int]:
        need(
            not any(file.with_name(DISTRIBUTED_OPTIMIZER).exists() for file in files.values()),
            f"{DISTRIBUTED_OPTIMIZER} does not name their parameters; save with --ckpt-format "
            "torch_dist --dist-ckpt-optim-fully-reshardable to convert them",
        )
        optimizers = {ranks: value.get("optimizer") for ranks, value in values.items()}
        return _states(optimizers, parts, model)

    return megatron_source(
        where, common, args, model, weights, states, tp_size=tp_size, version=version
    )


def _rank_file(folder: Path, ranks: Ranks, sizes: Sequence[int]) -> Path:
    """Returns the file of a rank. Pipeline and expert axes of size 1 have no number in its name."""
    others = zip(ranks[1:], sizes[1:], strict=True)
    name = f"mp_rank_{ranks[0]:02d}" + "".join(f"_{rank:03d}" for rank, size in others if size > 1)
    for file in MODEL_FILES:
        if (folder / name / file).exists():
            return folder / name / file
    raise InputError(
        f"{folder}: was saved by TP {sizes[0]} x PP {sizes[1]} x EP {sizes[2]} ranks, and lacks "
        f"{name}/{MODEL_FILES[0]}: copy all mp_rank_* folders"
    )


def _parts(
    where: str, values: Mapping[Ranks, dict[str, Any]], num_layers: int
) -> dict[Ranks, list[Named]]:
    """Returns each rank's tensors, in the order of the model, by their names in the whole model."""
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
    found: dict[Ranks, list[Named]] = {ranks: [] for ranks in values}
    first_layer, seen = 0, set[int]()
    pp_ranks = sorted({pp for _, pp, _ in values})
    # stage number = chunk * PP + pipeline rank
    for chunk, pp_rank in product(range(most), pp_ranks):
        layers = 0
        for ranks in (ranks for ranks in values if ranks[1] == pp_rank):
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
                found[ranks].append((name, value))
        first_layer += layers
    if first_layer != num_layers:
        raise InputError(
            f"{where}: its files hold {first_layer} layers, and its args say num_layers = "
            f"{num_layers}"
        )
    return found


# --- optimizer states ---


def _states(
    saved: Mapping[Ranks, Any], parts: Mapping[Ranks, Sequence[Named]], model: ModelConfig
) -> tuple[dict[str, Any], int]:
    """Returns the states by key and parameter, and how many updates were made.

    The files number the states and do not name their parameters. Megatron's optimizer has a group
    of parameters with weight decay and a group without it, each in the order of the model. The
    float32 weights beside the 16-bit ones show whether the states were mapped as they were saved.

    saved: the optimizer of each rank.
    Raises Unmapped, with the reason, if the states cannot be mapped exactly.
    """
    need(any(saved.values()), "the checkpoint holds no optimizer states")
    need(
        not any(expert_rank for _, _, expert_rank in saved),
        "those of expert parallelism lie in several optimizers",
    )
    found: dict[str, list[tuple[Ranks, str, Tensor]]] = defaultdict(list)
    updates = set()
    try:
        for ranks, optimizer in sorted(saved.items()):
            inner = optimizer.get("optimizer", optimizer)
            groups, states = inner["param_groups"], inner.get("state", {})
            updates.add(updates_of(groups, states))
            masters = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
            for name, key, tensor in _of_groups(groups, states, masters, parts[ranks]):
                found[key].append((ranks, name, tensor))
        need(
            len(updates) == len({*map(len, found.values())}) == 1, "the ranks have different states"
        )
        whole = {key: whole_parameters(held, model, 1) for key, held in found.items()}
    except InputError:
        raise
    except FOREIGN as error:
        raise Unmapped("they are not those of one optimizer of Megatron-LM") from error
    return whole, updates.pop()


def _of_groups(
    groups: list[Any], states: Mapping[Any, Any], masters: Any, named: Sequence[Named]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields the states of one rank's parameters, by name and key. The groups number the states."""
    members: dict[bool, list[Named]] = {True: [], False: []}
    for name, weight in named:
        if not is_buffer(name):
            members[has_decay(name, weight.ndim)].append((name, weight))
    for place, group in enumerate(groups):
        decays = bool(group["wd_mult"]) if "wd_mult" in group else group.get("weight_decay") != 0.0
        own = members.pop(decays, [])
        held = own if masters is None else masters[place]
        need(
            len(group["params"]) == len(held) == len(own),
            f"one of {len(groups)} groups has other parameters than the model",
        )
        for number, master, (name, weight) in zip(group["params"], held, own, strict=True):
            found = {key: states[number][key] for key in megatron_args.ADAM}
            if masters is not None:
                found[megatron_args.MASTER] = master
                first = master.flatten()[:COMPARED].to(weight.dtype)
                need(
                    torch.equal(first, weight.flatten()[:COMPARED]),
                    f"the float32 weights of {name} are not those of its 16-bit weights",
                )
            for key, tensor in found.items():
                need(tensor.shape == weight.shape, f"the states of {name} have another shape")
                yield name, key, tensor
    need(not any(members.values()), "some parameters are in no group")


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
    megatron_args.check_exact(source, "megatron")
    dtypes = {dtype for name, dtype in source.dtypes.items() if not is_buffer(name)}
    if len(dtypes) > 1:
        raise InputError(
            "--to megatron: the weights have several dtypes, and Megatron-LM has one: convert with "
            "--to hf"
        )
    padded = megatron_args.padded_vocab_size(source, tp_size)
    with input_faults("--to megatron: "):
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=pp_size
        )
        specs = parameter_specs(source.model, padded, tp_size=tp_size)
        held = stages(parallel, source.model.num_layers)
    places: dict[tuple[str, str], list[tuple[int, int | None, Tensor]]] = defaultdict(list)

    def empty(leaf: object) -> object:
        if not isinstance(leaf, Place):
            return leaf
        shape = specs[leaf.name].local_shape(tp_size)[0 if leaf.expert is None else 1 :]
        return torch.empty(shape, dtype=torch.float32 if leaf.key else source.dtypes[leaf.name])

    def put(name: str, key: str, whole: Tensor) -> None:
        whole = megatron_args.with_padding(name, whole, padded)
        parts = split(whole, specs[name], tp_size)
        for tp_rank, expert, tensor in places[name, key]:
            tensor.copy_(parts[tp_rank] if expert is None else parts[tp_rank][expert])

    with megatron_args.new_iteration(source, path) as folder:
        for stage, tp_rank in product(held, range(tp_size)):
            rank = f"mp_rank_{tp_rank:02d}" + (f"_{stage.rank:03d}" if pp_size > 1 else "")
            file = folder / rank / MODEL_FILES[0]
            file.parent.mkdir()
            # Fake tensors have sizes and no numbers, so the whole model is never in memory. The
            # file gets room for each of them.
            value = _state_dict(source, specs, stage, tp_size)
            with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(tree_map(empty, value), file)
            found = tree_leaves(read_torch_file(Window(file), shared=True))
            for place, tensor in zip(tree_leaves(value), found, strict=True):
                if isinstance(place, Place):
                    places[place.name, place.key].append((tp_rank, place.expert, tensor))
        copy_tensors(source, put, advance)


def _is_held(name: str, stage: Stage) -> bool:
    """Returns whether a pipeline stage holds a parameter."""
    layer, _ = layer_of(name)
    if layer is not None:
        return 0 <= layer - stage.first_layer < stage.num_layers
    return stage.is_first if name.startswith("embedding.") else stage.is_last


def _state_dict(
    source: WeightSource, specs: Mapping[str, ParameterSpec], stage: Stage, tp_size: int
) -> dict[str, Any]:
    """Returns what the file of one TP rank of a pipeline stage holds, with places for tensors."""
    held = [
        Place(name, expert=expert)
        for name, spec in specs.items()
        if _is_held(name, stage)
        for expert in (range(spec.global_shape[0]) if EXPERTS in name else (None,))
    ]
    held.sort(key=lambda place: place.number)
    model: dict[str, Any] = OrderedDict((one.theirs(stage.first_layer), one) for one in held)
    if OUTPUT not in specs and stage.is_last and not stage.is_first:
        held.append(Place(WORDS))
        model[OUTPUT] = held[-1]
    value = megatron_args.common_values(source, tp_size=tp_size, pp_size=stage.count)
    value["model"] = model
    if not source.state_keys:
        return value
    # The optimizer numbers its parameters, those with weight decay first.
    trained = [one for one in held if not is_buffer(one.name)]
    members = [
        [one for one in trained if has_decay(one.name, len(specs[one.name].global_shape)) is decays]
        for decays in (True, False)
    ]
    groups, numbers = megatron_args.groups(source), itertools.count()
    for group, own in zip(groups, members, strict=True):
        group["params"] = [next(numbers) for _ in own]
    states = {
        number: {key: replace(one, key=key) for key in megatron_args.ADAM}
        for number, one in enumerate(itertools.chain(*members))
    }
    value["optimizer"] = {"state": states, "param_groups": groups}
    if megatron_args.MASTER in source.state_keys:
        masters = [[replace(one, key=megatron_args.MASTER) for one in own] for own in members]
        value["optimizer"] = {"optimizer": value["optimizer"], "fp32_from_fp16_params": masters}
    return value
