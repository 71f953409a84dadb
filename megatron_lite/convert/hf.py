"""Reads and writes a Hugging Face checkpoint: config.json, safetensors, the files of a tokenizer.

Opening reads the headers of all files. Missing, unexpected and misshapen tensors are refused before
any work is done. Pickled weights (pytorch_model.bin) are never read. What is written opens with
AutoModelForCausalLM.from_pretrained: files of at most 2 GB, with an index if they are several.
Weights keep their dtype. Optimizer states are left out.

A row of the table of families (config/hf_config.py) maps a module of this project to the modules
there that hold its weight and bias, and names the layout. A layout is a chain of steps from there
to here. A step is a pair of functions that are inverse to each other and linear: they map weights
to weights and gradients to gradients, bit for bit.

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

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS, naming, open_tensors, write_tensors
from megatron_lite.config.checks import InputError, input_faults
from megatron_lite.config.hf_config import CONFIG, FAMILIES, read_hf_file, to_hf
from megatron_lite.config.input_file import crafted, read_json
from megatron_lite.config.model import ModelConfig
from megatron_lite.data.tokenizer_files import in_folder

from .target import complete_folder, json_bytes, stored_tokenizer
from .weights import (
    OUTPUT,
    WORDS,
    Shape,
    WeightSource,
    check_held,
    check_number,
    layer_of,
    parameter_specs,
    shards_of,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 2**26
# Buffers that old versions of transformers saved: masks and frequencies, which are no weights.
BUFFERS = re.compile(
    r"\.(attn|attention)\.(bias|masked_bias)"
    r"|(^|\.)rotary_emb\.inv_freq"
    r"|\.rotary_emb\.(cos|sin)_cached"
)
# Newer names of a tensor, and the name under which it is known here.
RENAMED = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}


class TensorInFile(NamedTuple):
    """A tensor in a file. values: the library's object that reads it."""

    file: Path
    values: Any

    @property
    def shape(self) -> Shape:
        return tuple(self.values.get_shape())

    def read(self) -> Tensor:
        with naming(self.file, "a tensor"):
            return self.values[:]


def source(path: Path) -> WeightSource:
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
        model = ModelConfig(**mapped.exact_fields(path / CONFIG))
    found: list[tuple[str, TensorInFile]] = []
    for file in _weight_files(path):
        with naming(file):
            opened = open_tensors(file)
            for name in opened.keys():  # noqa: SIM118, no mapping
                found.append((name, TensorInFile(file, opened.get_slice(name))))
    base = FAMILIES[family]["base"]
    has_base = any(name.startswith(f"{base}.") for name, _ in found)
    held: dict[str, TensorInFile] = {}
    for name, one in found:
        known = RENAMED.get((family, name), name)
        if not has_base and known != head_of(family):
            known = f"{base}.{known}"
        if held.setdefault(known, one) is not one:
            raise InputError(
                f"{one.file}: {name} holds the weight {known}, and so does "
                f"{held[known].file.name}: remove one of them"
            )
    check_number("layers", model.num_layers, len(held), path / CONFIG)
    if "*" in str(FAMILIES[family]["layer"]):  # each expert has tensors of its own
        check_number("experts", model.num_experts or 0, len(held), path / CONFIG)
    specs = parameter_specs(model, mapped.vocab_size)
    rows = {name: row_of(family, name, model) for name in specs}
    shapes: dict[str, Shape] = {}
    for name, spec in specs.items():
        shapes |= rows[name].shapes(spec.global_shape)
    # Files of a tied model may hold the head too. It must then equal the embedding (`read`).
    copy = held.pop(head_of(family), None) if OUTPUT not in specs else None
    held = {name: one for name, one in held.items() if name in shapes or not BUFFERS.search(name)}
    check_held(path, held, shapes, CONFIG)
    dtypes = {}
    for name, row in rows.items():
        kinds = " and ".join(sorted({str(held[part].values.get_dtype()) for part in row.theirs}))
        dtypes[name] = FLOATS.get(kinds, kinds)  # what is no dtype is refused

    def read(name: str) -> Tensor:
        parts = [held[part].read() for part in rows[name].theirs]
        if name == WORDS and copy and not torch.equal(parts[0], copy.read()):
            raise InputError(
                f"{CONFIG} says tie_word_embeddings true, but {head_of(family)} differs from the "
                "embedding: correct one of them"
            )
        return rows[name].join(parts)

    return WeightSource(
        model=model,
        true_vocab_size=mapped.vocab_size,
        dtypes=dtypes,
        read=read,
        tokenizer=in_folder(path),
        token_ids=mapped.token_ids,
        notes=mapped.notes,
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if os.path.lexists(index):
        with crafted(str(index)):
            names = {str(name) for name in read_json(index, LARGEST_INDEX)["weight_map"].values()}
            for name in names:
                if Path(name).name != name:
                    raise ValueError(f"weight_map names {name!r}, which is no file's name")
        return [folder / name for name in sorted(names)]
    if os.path.lexists(folder / WEIGHTS):
        return [folder / WEIGHTS]
    for file in folder.glob("pytorch_model.bin*"):
        raise InputError(
            f"{file} is pickled, and reading a pickle may run any code: convert it with "
            "transformers, AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), where "
            "you trust its author"
        )
    raise InputError(f"{folder}: has neither {WEIGHTS} nor {INDEX}")


def write(source: WeightSource, path: Path, *, family: str | None = None) -> None:
    """Writes the weights into a new folder, which appears complete, or not at all.

    family: the model_type to write; None: the first that expresses the model exactly.
    Raises InputError if no family, or not the given one, expresses the model exactly.
    """
    model, source = source.model, replace(source, state_keys=())
    with input_faults("--to hf: "):
        config = to_hf(model, source.true_vocab_size, family)
    texts, end = stored_tokenizer(source)
    rows = {name: row_of(config["model_type"], name, model) for name in source.specs}
    shards = shards_of(source)
    count = len(shards)
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    files = dict(zip(names if count > 1 else [WEIGHTS], shards, strict=True))
    ids = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None, **source.token_ids}
    config |= {key: one for key, one in ids.items() if one is not None or key not in config}
    config["torch_dtype"] = str(source.dtype).removeprefix("torch.")
    if "tokenizer.json" in texts and "tokenizer_config.json" not in texts:
        # AutoTokenizer asks this file for the class.
        texts["tokenizer_config.json"] = json_bytes({"tokenizer_class": "PreTrainedTokenizerFast"})
    texts[CONFIG] = json_bytes(config)
    if count > 1:
        total = sum(source.sizes.values())
        weight_map = {
            part: file for file, own in files.items() for name in own for part in rows[name].theirs
        }
        texts[INDEX] = json_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})
    with complete_folder(path) as folder:
        for file, own in files.items():
            parts: dict[str, Tensor] = {}
            for name in own:
                split = rows[name].split(source.checked(name))
                parts |= {part: value.clone() for part, value in split.items()}
            write_tensors(folder / file, parts, {"format": "pt"})
        for file, content in texts.items():
            (folder / file).write_bytes(content)


# --- layouts ---

Parts = Sequence[Tensor]


class Step(NamedTuple):
    """One step of a layout. join: from there to here. split: back."""

    join: Callable[[Parts, ModelConfig], Parts]
    split: Callable[[Parts, ModelConfig], Parts]


def _from_groups(parts: Parts, model: ModelConfig) -> Parts:
    """[g (a/g + 2) d, ..] -> [a d, ..], [g d, ..], [g d, ..]."""
    a, g, d = model.num_attention_heads, model.query_groups, model.head_dim
    groups = parts[0].unflatten(0, (g, -1)).split([a // g * d, d, d], 1)
    return [part.flatten(0, 1) for part in groups]


def _unfused(parts: Parts, model: ModelConfig) -> Parts:
    """[(a + 2 g) d, ..] -> [a d, ..], [g d, ..], [g d, ..]."""
    keys = model.query_groups * model.head_dim
    return parts[0].split([len(parts[0]) - 2 * keys, keys, keys])


def _reordered(parts: Parts, model: ModelConfig, sizes: tuple[int, int]) -> Parts:
    """Returns q and k with the rotated channels of each head transposed as a matrix, and v."""
    found = []
    for part in parts[:2]:
        heads = part.unflatten(0, (-1, model.head_dim))
        rotated, rest = heads.tensor_split([model.rotary_dim], 1)
        rotated = rotated.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
        found.append(torch.cat((rotated, rest), 1).flatten(0, 1))
    return [*found, parts[2]]


def _transposed(parts: Parts, _: ModelConfig) -> Parts:
    return [part.t().contiguous() for part in parts]  # a bias stays as it is


TRANSPOSED = Step(_transposed, _transposed)
FUSED = Step(_unfused, lambda parts, _: [torch.cat([*parts])])
PAIRS = Step(partial(_reordered, sizes=(-1, 2)), partial(_reordered, sizes=(2, -1)))
GROUPED = Step(
    lambda parts, model: [
        torch.cat([part.unflatten(0, (model.query_groups, -1)) for part in parts], 1).flatten(0, 1)
    ],
    _from_groups,
)
STACKED = Step(
    lambda parts, _: [torch.cat(both) for both in zip(parts[::2], parts[1::2], strict=True)],
    lambda parts, _: [half for part in parts for half in part.chunk(2)],
)
BY_EXPERT = Step(lambda parts, _: [torch.stack([*parts])], lambda parts, _: parts[0].unbind())
LAYOUTS = {
    "same": (),
    "stacked": (STACKED,),
    "by expert": (BY_EXPERT,),
    "stacked by expert": (STACKED, BY_EXPERT),
    "by group": (GROUPED,),
    "by group of pairs": (PAIRS, GROUPED),
    "fused": (FUSED, GROUPED),
    "transposed": (TRANSPOSED,),
    "fused transposed": (TRANSPOSED, FUSED, GROUPED),
}


class Row(NamedTuple):
    """The tensors there that hold one parameter here, and their layout."""

    theirs: Sequence[str]
    layout: str
    model: ModelConfig

    def join(self, parts: Parts) -> Tensor:
        """Returns the parameter."""
        for step in LAYOUTS[self.layout]:
            parts = step.join(parts, self.model)
        return parts[0]

    def split(self, whole: Tensor) -> dict[str, Tensor]:
        """Returns the tensors there, by name."""
        parts: Parts = [whole]
        for step in reversed(LAYOUTS[self.layout]):
            parts = step.split(parts, self.model)
        return dict(zip(self.theirs, parts, strict=True))

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """Returns the shapes of the tensors there, by name. shape: that of the parameter."""
        parts = self.split(torch.empty(shape, device="meta"))
        return {name: tuple(part.shape) for name, part in parts.items()}


def head_of(family: str) -> str:
    """Returns the name of the untied output weight."""
    return f"{FAMILIES[family]['head']}.weight"


def row_of(family: str, name: str, model: ModelConfig) -> Row:
    """Returns the row of a parameter of this model."""
    table = FAMILIES[family]
    layer, rest = layer_of(name)
    module, _, kind = rest.rpartition(".")
    prefix, places = table["base"], table["outer"]
    if layer is not None:
        prefix, places = f"{prefix}.{table['layers']}.{layer}", table["layer"]
    if name == OUTPUT:
        return Row([head_of(family)], "same", model)
    if rest in places:
        return Row([f"{prefix}.{places[rest]}"], "same", model)
    found = places[module]
    found = {"theirs": [found], "layout": "same"} if isinstance(found, str) else found
    experts = range(model.num_experts or 1) if BY_EXPERT in LAYOUTS[found["layout"]] else (0,)
    theirs = [part.replace("*", str(one)) for one in experts for part in found["theirs"]]
    return Row([f"{prefix}.{part}.{kind}" for part in theirs], found["layout"], model)
