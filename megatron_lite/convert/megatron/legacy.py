"""Reads and writes a legacy checkpoint of Megatron-LM: one file for each TP and pipeline rank.

DIR/latest_checkpointed_iteration.txt              "40" or "release"
DIR/iter_0000040/mp_rank_00/model_optim_rng.pt     without pipeline parallelism
                 mp_rank_01_003/..                 TP rank 1 of pipeline rank 3
                 mp_rank_01_003_002/..             and expert rank 2, with expert parallelism

What is written is for Megatron's local layer spec, with a module for each expert. The tensors of
one rank are in memory at a time, so each tensor is read once for every TP rank.
"""

import gc
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError, Values, input_faults
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import Stage, stages
from megatron_lite.convert.weights import (
    LAYERS,
    OUTPUT,
    WORDS,
    WeightSource,
    check_number,
    is_buffer,
    layer_of,
    parameter_specs,
)
from megatron_lite.parallel.parameter_spec import ParameterSpec

from . import args as megatron_args
from .source import (
    EXPERTS,
    Chunk,
    Chunked,
    Parameters,
    Unmapped,
    flat,
    is_in_group,
    megatron_source,
    need,
    opened,
    our_name,
    updates_of,
)
from .torch_file import Window, read_torch_file

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
DISTRIBUTED_OPTIMIZER = "distrib_optim.pt"
# With virtual stages each has a chunk of its own.
CHUNKS = ("model", *(f"model{number}" for number in range(1000)))
COMPARED = 256  # numbers of each parameter
OF_AN_EXPERT = 4  # parameters
Ranks = tuple[int, ...]  # a TP rank, a pipeline rank and an expert rank
Parts = dict[Ranks, list[tuple[str, Tensor]]]  # the tensors of each rank, in order, with names


def source(path: Path) -> WeightSource:
    """Opens the newest iteration under a directory, or one iteration's directory.

    Raises InputError if there is none, if a rank's file is missing, or if a file is damaged.
    """
    return opened(path, "megatron", _opened)


def _opened(folder: Path) -> WeightSource:
    where = str(folder)
    first = min(folder.glob("mp_rank_*/model_*rng.pt"), default=None)
    if first is None:
        raise InputError(f"{where}: holds no mp_rank_*/{MODEL_FILES[0]}: copy all of its folders")
    common = read_torch_file(Window(first))
    args = megatron_args.arguments_of(common, first)
    args.setdefault("tensor_model_parallel_size", args.get("model_parallel_size"))
    # An axis has size 1 if the arguments say none that a run has.
    sizes = [
        size
        if type(size := args.get(f"{axis}_model_parallel_size")) is int and 0 < size < 2**20
        else 1
        for axis in ("tensor", "pipeline", "expert")
    ]
    tp_size, pp_size, _ = sizes
    of_experts = args.get("expert_tensor_parallel_size")
    if args.get("num_experts") and of_experts not in (None, tp_size):
        raise InputError(
            f"{where}: its experts are split over {of_experts} TP ranks, and all else over "
            f"{tp_size}: save the checkpoint with --ckpt-format torch_dist, which any layout reads"
        )
    # Folders of another run may lie beside those of this one.
    files = {ranks: _rank_file(folder, ranks, sizes) for ranks in product(*map(range, sizes))}
    values = {ranks: read_torch_file(Window(file)) for ranks, file in files.items()}
    model = megatron_args.model_of(args, where)
    parts = _parts(where, values, pp_size)
    check_number("layers", model.num_layers, sum(map(len, parts.values())), where)
    specs = parameter_specs(model, tp_size, tp_size=tp_size)  # for any size of the vocabulary
    whole = partial(_whole, model=model, specs=specs, sizes=sizes)
    weights = whole(parts, version=common.get("checkpoint_version", 0))

    states = partial(_states, files.values(), values, parts, whole)
    return megatron_source(where, common, args, model, weights, states)


def _folder(ranks: Sequence[int], sizes: Sequence[int]) -> str:
    """Returns the name of a rank's folder. Pipeline and expert axes of size 1 have no number."""
    others = zip(ranks[1:], sizes[1:], strict=True)
    return f"mp_rank_{ranks[0]:02d}" + "".join(f"_{rank:03d}" for rank, size in others if size > 1)


def _rank_file(folder: Path, ranks: Ranks, sizes: Sequence[int]) -> Path:
    for file in MODEL_FILES:
        path = folder / _folder(ranks, sizes) / file
        if path.exists():
            return path
    raise InputError(
        f"{folder}: was saved by TP {sizes[0]} x PP {sizes[1]} x EP {sizes[2]} ranks, and lacks "
        f"{_folder(ranks, sizes)}/{MODEL_FILES[0]}: copy all mp_rank_* folders"
    )


def _parts(where: str, values: Mapping[Ranks, Any], pp_size: int) -> Parts:
    """Returns each rank's tensors, in the order of the model, by their names in the whole model."""
    chunks = {ranks: [one[key] for key in CHUNKS if key in one] for ranks, one in values.items()}
    found: Parts = {ranks: [] for ranks in values}
    most = max(map(len, chunks.values()))
    for ranks, own in chunks.items():
        if len(own) != most or most == 0:
            raise InputError(
                f"{where}: the file of TP and PP rank {ranks[:2]} holds {len(own)} model chunks, "
                f"and others {most}: copy all mp_rank_* folders of one run"
            )
    first_layer, seen = 0, set[int]()
    # stage number = chunk * PP + pipeline rank
    for chunk, pp_rank in product(range(most), range(pp_size)):
        num_layers = 0
        for ranks in (ranks for ranks in values if ranks[1] == pp_rank):
            for key, value in flat(chunks[ranks][chunk], seen):
                name = our_name(key)
                if name is None or value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise InputError(f"{where}: {key} is no plain tensor")
                layer, rest = layer_of(name)
                if layer is not None:
                    num_layers = max(num_layers, layer + 1)
                    name = f"{LAYERS}{first_layer + layer}.{rest}"
                found[ranks].append((name, value))
        first_layer += num_layers
    return found


# --- whole tensors ---

ONE_EXPERT = re.compile(
    r"(.*\.mlp\.experts\.)(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d*)"
)
GROUPED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)weight([12])")


def _whole(
    parts: Parts,
    model: ModelConfig,
    specs: Mapping[str, ParameterSpec],
    sizes: Sequence[int],
    version: float = 3,
) -> Parameters:
    """Returns the whole tensors of which each rank holds a part.

    specs: tell how the parts lie. version: that of the layout of linear_qkv.
    """
    chunks = defaultdict(list)
    wholes = {}
    all_experts = model.num_experts or 1
    experts = all_experts // sizes[2]
    for (tp_rank, _, ep_rank), (name, tensor) in (
        (ranks, one) for ranks, own in parts.items() for one in own
    ):
        first, (parameter, slash, key) = 0, name.partition("/")
        if one := ONE_EXPERT.fullmatch(parameter):
            parameter, first, tensor = one[1] + one[3], int(one[2] or one[4] or 0), tensor[None]
        elif grouped := GROUPED_EXPERTS.fullmatch(parameter):
            parameter = f"{grouped[1]}linear_fc{grouped[2]}.weight"
            inputs = model.hidden_size if grouped[2] == "1" else len(tensor) // experts
            tensor = tensor.view(experts, inputs, -1).transpose(1, 2)
        elif ".self_attention.linear_qkv." in name and version < 2:
            # Since version 2 the rows are head by head; they were [3, heads, d] and [heads, d, 3].
            d, rest = model.head_dim, tensor.shape[1:]
            rows, dims = {0.0: ((3, -1, d), (0, 1)), 1.0: ((-1, d, 3), (1, 2))}[version]
            tensor = tensor.view(*rows, *rest).transpose(*dims).reshape(tensor.shape)
        spec, of_experts, name = specs.get(parameter), EXPERTS in name, parameter + slash + key
        dim, ranks, blocks = 0, 1, 1
        if spec and spec.tp_dim is not None:
            dim, ranks, blocks = spec.tp_dim, sizes[0], spec.tp_blocks
        if tp_rank >= ranks or (ep_rank and not of_experts):
            continue  # a copy
        shape = [all_experts if of_experts else len(tensor), *tensor.shape[1:]]
        shape[dim] *= ranks
        for block, part in enumerate(tensor.chunk(blocks, dim)):
            offsets = [first + ep_rank * experts * of_experts, *(0 for _ in part.shape[1:])]
            offsets[dim] += (block * ranks + tp_rank) * part.shape[dim]
            chunks[name].append(Chunk(tuple(offsets), tuple(part.shape), part.detach))
        wholes[name] = Chunked(tuple(shape), tensor.dtype, chunks[name])
    return {name: one.checked(name) for name, one in wholes.items()}


# --- optimizer states ---


def _states(
    files: Collection[Path],
    values: Mapping[Ranks, Any],
    parts: Parts,
    whole: Callable[[Parts], Parameters],
) -> tuple[Parameters, int]:
    """Returns the states, and how many updates were made.

    The files number the states and do not name their parameters. Megatron's optimizer has a group
    of parameters with weight decay and a group without it, each in the order of the model. The
    float32 weights beside the 16-bit ones show whether the states were mapped as they were saved.

    values: the contents of each rank's file. parts: the weights in it. whole: joins parts.
    Raises Unmapped, with the reason, if the states cannot be mapped exactly.
    """
    need(
        not any(file.with_name(DISTRIBUTED_OPTIMIZER).exists() for file in files),
        f"{DISTRIBUTED_OPTIMIZER} does not name their parameters; save with --ckpt-format "
        "torch_dist --dist-ckpt-optim-fully-reshardable to convert them",
    )
    saved = {ranks: value.get("optimizer") for ranks, value in values.items()}
    need(any(saved.values()), "the checkpoint holds no optimizer states")
    found = {}
    updates = set()
    try:
        for ranks, optimizer in saved.items():
            inner = optimizer.get("optimizer", optimizer)
            groups, states = inner["param_groups"], inner.get("state", {})
            updates.add(updates_of(groups, states))
            masters = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
            found[ranks] = [*_of_groups(groups, states, masters, parts[ranks])]
        need(len(updates) == 1, "the ranks have different states")
        return whole(found), updates.pop()
    except InputError:
        raise
    except Exception as error:  # values of another form than Megatron's
        raise Unmapped("they are not those of one optimizer of Megatron-LM") from error


def _of_groups(
    groups: list[Any], states: Mapping[Any, Any], masters: Any, named: list[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the states of one rank's parameters. The groups number the states."""
    for place, group in enumerate(groups):
        decays = group.get("wd_mult", group.get("weight_decay")) != 0.0
        own = [one for one in named if is_in_group(one[0], one[1].ndim, decays=decays)]
        held = own if masters is None else masters[place]
        for number, master, (name, weight) in zip(group["params"], held, own, strict=True):
            for key in megatron_args.ADAM:
                yield f"{name}/{key}", states[number][key]
            if masters is not None:
                first = master.flatten()[:COMPARED].to(weight.dtype)
                need(
                    torch.equal(first, weight.flatten()[:COMPARED]),
                    f"the float32 weights of {name} are not those of its 16-bit weights",
                )
                yield f"{name}/{megatron_args.MASTER}", master


# --- writing ---


def write(source: WeightSource, path: Path, *, tp_size: int = 1, pp_size: int = 1) -> None:
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

    def part(full: str, tp_rank: int) -> Tensor:
        name = full.partition("/")[0]
        whole = megatron_args.with_padding(name, source.checked(full), padded)
        dim, blocks = specs[name].tp_dim, specs[name].tp_blocks
        if dim is None:
            return whole
        ranks = whole.unflatten(dim, (blocks, tp_size, -1))
        return ranks.select(dim + 1, tp_rank).flatten(dim, dim + 1)

    with megatron_args.new_iteration(source, path) as folder:
        for stage, tp_rank in product(held, range(tp_size)):
            file = folder / _folder((tp_rank, stage.rank), (tp_size, pp_size)) / MODEL_FILES[0]
            file.parent.mkdir()
            value = megatron_args.common_values(source, tp_size=tp_size, pp_size=pp_size)
            # The modules of one expert follow those of another.
            own = lru_cache(OF_AN_EXPERT)(partial(part, tp_rank=tp_rank))
            torch.save(value | _state_dict(source, specs, stage, own), file)
            gc.collect()  # torch 2.8 keeps what it saved in a cycle


def _state_dict(
    source: WeightSource,
    specs: Mapping[str, ParameterSpec],
    stage: Stage,
    part: Callable[[str], Tensor],
) -> Values:
    """Returns the model and the optimizer in the file of a TP rank of a pipeline stage.

    part: returns this TP rank's part of a parameter or of one of its states.
    """

    def of(full: str, expert: int | None) -> Tensor:
        found = part(full)
        # Of a view, the values of all experts would be saved.
        return (found if expert is None else found[expert]).clone()

    held = _held(specs, stage)
    model = {theirs: of(name, expert) for theirs, name, expert in held}
    if not source.state_keys:
        return {"model": model}
    groups, states, masters = megatron_args.groups(source), list[dict[str, Tensor]](), []
    for group in groups:  # with weight decay and without
        own = [
            (name, expert)
            for _, name, expert in held
            if is_in_group(name, len(specs[name].global_shape), decays=group["wd_mult"] > 0)
        ]
        first = len(states)
        states += [
            {key: of(f"{name}/{key}", expert) for key in megatron_args.ADAM} for name, expert in own
        ]
        group["params"] = [*range(first, len(states))]
        if megatron_args.MASTER in source.state_keys:
            masters.append([of(f"{name}/{megatron_args.MASTER}", expert) for name, expert in own])
    optimizer = {"state": dict(enumerate(states)), "param_groups": groups}
    if masters:
        optimizer = {"optimizer": optimizer, "fp32_from_fp16_params": masters}
    return {"model": model, "optimizer": optimizer}


def _held(specs: Mapping[str, ParameterSpec], stage: Stage) -> list[tuple[str, str, int | None]]:
    """Returns the tensors of a stage in the order of Megatron-LM's modules.

    Each has its name there, the parameter, and the number of the expert if it is one of its own.
    """
    places: dict[Any, tuple[int, ...]] = {}
    for name, spec in specs.items():
        layer, rest = layer_of(name)
        if layer is None:
            is_first = name.startswith("embedding.")
            if stage.is_first if is_first else stage.is_last:
                places[name, name, None] = (0 if is_first else 2,)
        elif 0 <= layer - stage.first_layer < stage.num_layers:
            order = enumerate(megatron_args.TABLES["order"])
            place = next(number for number, one in order if rest.startswith(one))
            theirs = f"{LAYERS}{layer - stage.first_layer}.{rest}"
            for expert in range(spec.global_shape[0]) if EXPERTS in name else (None,):
                one = theirs.replace(EXPERTS, f"{EXPERTS}local_experts.{expert}.")
                places[one, name, expert] = (1, layer, place, expert or 0)
    if OUTPUT not in specs and stage.is_last and not stage.is_first:
        places[OUTPUT, WORDS, None] = (3,)
    return sorted(places, key=places.__getitem__)
