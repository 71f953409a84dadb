"""Reads and writes a Hugging Face checkpoint: config.json, safetensors, the files of a tokenizer.

Opening reads the headers of all files. Missing, unexpected and misshapen tensors are refused before
any work is done. Pickled weights (pytorch_model.bin) are never read. What is written opens with
AutoModelForCausalLM.from_pretrained: files of at most 5 GB, with an index if they are several.
Weights keep their dtype. Optimizer states are left out.

A row of the table of families (config/hf_config.py) maps a module of this project to the modules
there that hold its weight and bias, and names the layout. A layout is a pair of functions that are
inverse to each other and linear: they map weights to weights and gradients to gradients, bit for
bit.

    layout       there                                       here
    same         one tensor                                  the same tensor
    stacked      gate and up                                 [gate; up]
    by expert    a tensor for each of E experts              [E, ..]
    stacked by expert                                        both of the last two
    by group     q, k and v                                  group by group: [q .. q k v]
    by group of pairs                                        the same; pairs of rotated channels
                 are neighbours                              lie half of the channels apart
    fused        [all q; all k; all v]                       group by group
    transposed   [in, out], as GPT-2's Conv1D holds it       [out, in]
    fused transposed                                         both of the last two
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS, naming, open_tensors
from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.hf_config import CONFIG, FAMILIES, exact_fields, read_hf_file, to_hf
from megatron_lite.config.input_file import crafted, read_json
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.target import (
    Tensors,
    complete_folder,
    json_bytes,
    safetensors_files,
    stored_tokenizer,
)
from megatron_lite.convert.weights import (
    OUTPUT,
    WEIGHT,
    WORDS,
    Advance,
    WeightSource,
    check_layers,
    check_names,
    copy_tensors,
    layer_of,
    parameter_specs,
)
from megatron_lite.data.tokenizer_files import in_folder
from megatron_lite.parallel.parameter_spec import ParameterSpec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 2**26
SHARD_BYTES = 5 * 10**9
# Buffers that old versions of transformers saved: masks and frequencies, which are no weights.
BUFFERS = re.compile(
    r"\.(attn|attention)\.(bias|masked_bias)"
    r"|(^|\.)rotary_emb\.inv_freq"
    r"|\.rotary_emb\.(cos|sin)_cached"
)
# Newer names of a tensor, and the name under which it is known here.
RENAMED = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}


class TensorInFile(NamedTuple):
    """A tensor in a file, as the library's object that reads it."""

    file: Path
    name: str
    values: Any

    def read(self) -> Tensor:
        with naming(self.file, self.name):
            return self.values[:]


def hf_source(path: Path) -> WeightSource:
    """Opens a folder as `save_pretrained` writes it.

    Raises InputError for a family or a value that does not map, with the reason, and for files that
    are missing, truncated or of another model.
    """
    if not path.is_dir():
        raise InputError(
            f"--load {path}: no such directory (the format hf is a folder with {CONFIG} and "
            "safetensors files; nothing is downloaded)"
        )
    mapped = read_hf_file(path)
    family = mapped.family
    with input_faults(f"{path / CONFIG}: "):
        model = ModelConfig(**exact_fields(mapped, path / CONFIG))
    places = _places(path, family)
    check_layers(model.num_layers, len(places), path / CONFIG)
    specs = parameter_specs(model, mapped.vocab_size)
    shapes = their_shapes(family, specs, model)
    needed = {part: shape for parts in shapes.values() for part, shape in parts.items()}
    # Files of a tied model may hold the head too. It must then equal the embedding (`read`).
    head, is_tied = head_of(family), OUTPUT not in specs
    held = {name for name in places if name in needed or not BUFFERS.search(name)}
    check_names(
        path, held - {head if is_tied else ""}, needed.keys(), f"a {family} of its {CONFIG}"
    )
    for part, shape in needed.items():
        found = tuple(places[part].values.get_shape())
        if found != shape:
            raise InputError(
                f"{places[part].file}: {places[part].name} has the shape {found}, but {CONFIG} "
                f"describes {shape}: they belong to different models"
            )
    dtypes: dict[str, Any] = {}
    for name, parts in shapes.items():
        kinds = " and ".join(sorted({str(places[part].values.get_dtype()) for part in parts}))
        dtypes[name] = FLOATS.get(kinds, kinds)  # what is no dtype is refused

    def read(name: str, key: str = WEIGHT) -> Tensor:
        row = row_of(family, name, model)
        parts = [places[part].read() for part in row.theirs]
        has_copy = name == WORDS and is_tied and head in places
        if has_copy and not torch.equal(parts[0], places[head].read()):
            raise InputError(
                f"{CONFIG} says tie_word_embeddings true, but {head} differs from the embedding: "
                "correct one of them"
            )
        return LAYOUTS[row.layout].join(parts, model)

    return WeightSource(
        model=model,
        true_vocab_size=mapped.vocab_size,
        dtypes=dtypes,
        read=read,
        tokenizer=in_folder(path),
        token_ids=mapped.token_ids,
        notes=mapped.notes,
    )


def _places(folder: Path, family: str) -> dict[str, TensorInFile]:
    """Returns where each tensor lies, by the name under which it is known here."""
    found: dict[str, TensorInFile] = {}
    for file in _weight_files(folder):
        with naming(file):
            opened = open_tensors(file)
            for name in opened.keys():  # noqa: SIM118, no mapping
                found[name] = TensorInFile(file, name, opened.get_slice(name))
    has_base = any(name.startswith(f"{FAMILIES[family]['base']}.") for name in found)
    return {known_name(family, name, has_base=has_base): one for name, one in found.items()}


def _weight_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / INDEX):
        with crafted(str(folder / INDEX)):
            weight_map = read_json(folder / INDEX, LARGEST_INDEX)["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
            for name in names:
                if Path(name).name != name:
                    raise ValueError(f"weight_map names {name!r}, which is no file's name")
        return [folder / name for name in names]
    if os.path.lexists(folder / WEIGHTS):
        return [folder / WEIGHTS]
    for file in folder.glob("pytorch_model.bin*"):
        raise InputError(
            f"{file} is pickled, and reading a pickle may run any code: convert it with "
            "transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), where "
            "you trust its author"
        )
    raise InputError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")


def write_hf(
    source: WeightSource,
    path: Path,
    advance: Advance,
    *,
    family: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the weights into a new folder, which appears complete, or not at all.

    family: the model_type to write; None: the first that expresses the model exactly.
    shard_bytes: the largest size of a file. A single tensor may exceed it.
    Raises InputError if no family, or not the given one, expresses the model exactly.
    """
    model = source.model
    with input_faults("--to hf: "):
        config = to_hf(model, source.true_vocab_size, family)
    tokenizer, end = stored_tokenizer(source)
    family = config["model_type"]
    shards: list[Tensors] = [{}]
    total = size = 0
    for name, parts in their_shapes(family, source.specs, model).items():
        dtype = source.dtypes[name]
        num_bytes = sum(math.prod(shape) for shape in parts.values()) * dtype.itemsize
        if size and size + num_bytes > shard_bytes:
            shards.append({})
            size = 0
        size, total = size + num_bytes, total + num_bytes
        shards[-1].update({part: (dtype, shape) for part, shape in parts.items()})
    count = len(shards)
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    files = dict(zip(names if count > 1 else [WEIGHTS], shards, strict=True))
    config |= dict(bos_token_id=None, eos_token_id=end, pad_token_id=None)
    config |= dict(torch_dtype=str(source.dtype).removeprefix("torch."), **source.token_ids)
    texts = {**tokenizer, CONFIG: json_bytes(config)}
    if count > 1:
        weight_map = {part: file for file, parts in files.items() for part in parts}
        texts[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
    if "tokenizer.json" in tokenizer and "tokenizer_config.json" not in tokenizer:
        # AutoTokenizer asks this file for the class.
        texts["tokenizer_config.json"] = json_bytes({"tokenizer_class": "PreTrainedTokenizerFast"})
    with complete_folder(path) as folder:
        paths = {folder / file: parts for file, parts in files.items()}
        write = safetensors_files(paths, {"format": "pt"})

        def put(name: str, key: str, tensor: Tensor) -> None:
            row = row_of(family, name, model)
            values = LAYOUTS[row.layout].split(tensor, model)
            for part, value in zip(row.theirs, values, strict=True):
                write(part, value)

        copy_tensors(replace(source, state_keys=()), put, advance)
        for name, content in texts.items():
            (folder / name).write_bytes(content)


# --- layouts ---


class TensorLayout(NamedTuple):
    """A layout. join: theirs -> ours. split: ours -> theirs, contiguous.

    The shapes of theirs are those of `split` applied to a tensor without values.
    """

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    split: Callable[[Tensor, ModelConfig], list[Tensor]]


def _by_group(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """[a d, ..], [g d, ..], [g d, ..] -> [g (a/g + 2) d, ..]."""
    groups = zip(*(tensor.chunk(model.query_groups) for tensor in parts), strict=True)
    return torch.cat([part for group in groups for part in group])


def _from_groups(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    """[g (a/g + 2) d, ..] -> [a d, ..], [g d, ..], [g d, ..]."""
    a, g, d = model.num_attention_heads, model.query_groups, model.head_dim
    by_group = [group.split([a // g * d, d, d]) for group in tensor.chunk(g)]
    return [torch.cat(parts) for parts in zip(*by_group, strict=True)]


def _reordered(parts: Sequence[Tensor], model: ModelConfig, *, back: bool) -> list[Tensor]:
    """Returns q and k with the rotated channels of each head in the order of halves, and v.

    back: in the order of pairs instead.
    """
    pairs = torch.arange(model.rotary_dim).unflatten(0, (-1, 2)).t().flatten()
    order = torch.cat((pairs, torch.arange(model.rotary_dim, model.head_dim)))
    order = (order.argsort() if back else order).to(parts[0].device)
    heads = (one.unflatten(0, (-1, model.head_dim)).index_select(1, order) for one in parts[:2])
    return [*(one.flatten(0, 1) for one in heads), parts[2]]


def _fused(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """[(a + 2 g) d, ..] -> [g (a/g + 2) d, ..]."""
    (whole,), keys = parts, model.query_groups * model.head_dim
    return _by_group(whole.split([whole.shape[0] - 2 * keys, keys, keys]), model)


def _transposed(layout: TensorLayout) -> TensorLayout:
    """Returns the layout of matrices that are transposed there. A bias stays as it is."""
    return TensorLayout(
        lambda parts, model: layout.join([part.t() for part in parts], model).contiguous(),
        lambda tensor, model: [part.t().contiguous() for part in layout.split(tensor, model)],
    )


def _by_expert(layout: TensorLayout) -> TensorLayout:
    """Returns the layout of experts, each of which has tensors of its own there."""

    def join(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        count = len(parts) // (model.num_experts or 1)
        starts = range(0, len(parts), count)
        return torch.stack([layout.join(parts[start : start + count], model) for start in starts])

    return TensorLayout(
        join, lambda tensor, model: [part for one in tensor for part in layout.split(one, model)]
    )


SAME = TensorLayout(lambda parts, _: parts[0], lambda tensor, _: [tensor])
FUSED = TensorLayout(_fused, lambda tensor, model: [torch.cat(_from_groups(tensor, model))])
STACKED = TensorLayout(lambda parts, _: torch.cat([*parts]), lambda tensor, _: [*tensor.chunk(2)])
LAYOUTS: dict[str, TensorLayout] = {
    "same": SAME,
    "stacked": STACKED,
    "by expert": _by_expert(SAME),
    "stacked by expert": _by_expert(STACKED),
    "by group": TensorLayout(_by_group, _from_groups),
    "by group of pairs": TensorLayout(
        lambda parts, model: _by_group(_reordered(parts, model, back=False), model),
        lambda tensor, model: _reordered(_from_groups(tensor, model), model, back=True),
    ),
    "fused": FUSED,
    "transposed": _transposed(SAME),
    "fused transposed": _transposed(FUSED),
}


class TensorNames(NamedTuple):
    """Modules that hold the parts of one module here, and the layout of their tensors."""

    theirs: Sequence[str]
    layout: str = "same"


def head_of(family: str) -> str:
    """Returns the name of the untied output weight."""
    return f"{FAMILIES[family]['head']}.weight"


def row_of(family: str, name: str, model: ModelConfig) -> TensorNames:
    """Returns the names of the tensors there that hold a parameter here, and their layout.

    Raises InputError if the table of the family has no such parameter.
    """
    if name == OUTPUT:
        return TensorNames((head_of(family),))
    tensors = FAMILIES[family]
    layer, rest = layer_of(name)
    module, _, kind = rest.rpartition(".")
    inner = layer is not None
    prefix = f"{tensors['base']}.{tensors['layers']}.{layer}" if inner else tensors["base"]
    table = tensors["layer" if inner else "outer"]
    if rest in table:
        return TensorNames([f"{prefix}.{table[rest]}"])
    found = table.get(module)
    if found is None:
        raise InputError(
            f"the row {family} of FAMILIES in config/hf_config.py has no name for {module}"
        )
    row = TensorNames((found,)) if isinstance(found, str) else TensorNames(**found)
    experts = range(model.num_experts or 1) if "expert" in row.layout else (0,)
    theirs = [part.replace("*", str(expert)) for expert in experts for part in row.theirs]
    return TensorNames([f"{prefix}.{part}.{kind}" for part in theirs], row.layout)


def their_shapes(
    family: str, specs: Mapping[str, ParameterSpec], model: ModelConfig
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of the tensors there that hold each parameter here, by both names."""
    found = {}
    for name, spec in specs.items():
        row = row_of(family, name, model)
        parts = LAYOUTS[row.layout].split(torch.empty(spec.global_shape, device="meta"), model)
        shapes = (tuple(part.shape) for part in parts)
        found[name] = dict(zip(row.theirs, shapes, strict=True))
    return found


def known_name(family: str, name: str, *, has_base: bool) -> str:
    """Returns the name under which a tensor of a file is known here.

    has_base: whether the names in the files begin with the family's base, but for the head.
    """
    name = RENAMED.get((family, name), name)
    return name if has_base or name == head_of(family) else f"{FAMILIES[family]['base']}.{name}"
