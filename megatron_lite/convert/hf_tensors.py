"""The names of tensors in Hugging Face checkpoints, from the table of families.

A row of the table (config/hf_families.py) maps a module of this project to the modules there that
hold its weight and bias, and names the layout (hf_layouts.py). It serves both directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_families import FAMILIES
from megatron_lite.config.hf_rules import TensorNames
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.hf_layouts import LAYOUTS

LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
OUTPUT = "output_layer"
EMBEDDING = "embedding.word_embeddings.weight"
# Buffers that old versions of transformers saved: masks and frequencies, which are no weights.
BUFFERS = re.compile(
    r"\.(attn|attention)\.(bias|masked_bias)"
    r"|(^|\.)rotary_emb\.inv_freq"
    r"|\.rotary_emb\.(cos|sin)_cached"
)
# Newer names of a tensor, and the name under which it is known here.
RENAMED = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}


def head_of(family: str) -> str:
    """Returns the name of the untied output weight."""
    return f"{FAMILIES[family].tensors.head}.weight"


def base_of(family: str) -> str:
    """Returns the prefix of the names of all other tensors."""
    return f"{FAMILIES[family].tensors.base}."


def row_of(family: str, name: str) -> TensorNames:
    """Returns the names of the tensors there that hold a parameter here, and their layout.

    Raises InputError if the table of the family has no such parameter.
    """
    module, _, kind = name.rpartition(".")
    tensors = FAMILIES[family].tensors
    if module == OUTPUT:
        return TensorNames((head_of(family),))
    prefix, modules = tensors.base, tensors.outer
    if (layer := LAYER.fullmatch(module)) is not None:
        place, modules = tensors.layer
        prefix, module = f"{prefix}.{place}.{layer[1]}", layer[2]
    found = modules.get(module)
    if found is None:
        raise InputError(
            f"the row {family} of FAMILIES in config/hf_families.py has no name for {module}"
        )
    row = TensorNames((found,)) if isinstance(found, str) else found
    return TensorNames(tuple(f"{prefix}.{part}.{kind}" for part in row.theirs), row.layout)


def their_shapes(
    family: str, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor there. Layers are alike, so few splits are computed.

    shapes: those of the parameters here.
    """
    known: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
    found = {}
    for name, shape in shapes.items():
        row = row_of(family, name)
        case = (row.layout, shape)
        if case not in known:
            known[case] = LAYOUTS[row.layout].split(torch.empty(shape, device="meta"), model)
        for part, tensor in zip(row.theirs, known[case], strict=True):
            found[part] = tuple(tensor.shape)
    return found


def known_name(family: str, name: str, *, has_base: bool) -> str:
    """Returns the name under which a tensor of a file is known here.

    has_base: whether the names in the files begin with the family's base, but for the head.
    """
    name = RENAMED.get((family, name), name)
    return name if has_base or name == head_of(family) else f"{base_of(family)}{name}"


def to_ours(
    family: str, theirs: Mapping[str, Tensor], names: Mapping[str, object], model: ModelConfig
) -> dict[str, Tensor]:
    """Returns weights, or gradients, of a model of transformers under the names here.

    names: the parameters of the model here.
    """
    known = {known_name(family, name, has_base=True): tensor for name, tensor in theirs.items()}
    found = {}
    for name in names:
        row = row_of(family, name)
        found[name] = LAYOUTS[row.layout].join([known[part] for part in row.theirs], model)
    return found
