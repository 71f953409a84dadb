"""The tensors of Hugging Face checkpoints: their names, and how they lie, for both directions.

A row of the table of families (config/hf_families.py) maps a module of this project to the modules
there that hold its weight and bias, and names the layout. A layout is a pair of functions that are
inverse to each other and linear: they map weights to weights and gradients to gradients, bit for
bit.

    layout       there                                       here
    same         one tensor                                  the same tensor
    stacked      gate and up                                 [gate; up]
    by group     q, k and v                                  group by group: [q .. q k v]
    fused        [all q; all k; all v]                       group by group
    transposed   [in, out], as GPT-2's Conv1D holds it       [out, in]
    fused transposed                                         both of the last two
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.config.hf_families import FAMILIES
from megatron_lite.config.model import ModelConfig
from megatron_lite.convert.weights import layer_of

# Buffers that old versions of transformers saved: masks and frequencies, which are no weights.
BUFFERS = re.compile(
    r"\.(attn|attention)\.(bias|masked_bias)"
    r"|(^|\.)rotary_emb\.inv_freq"
    r"|\.rotary_emb\.(cos|sin)_cached"
)
# Newer names of a tensor, and the name under which it is known here.
RENAMED = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}


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


def _fused(whole: Tensor, model: ModelConfig) -> Tensor:
    """[(a + 2 g) d, ..] -> [g (a/g + 2) d, ..]."""
    keys = model.query_groups * model.head_dim
    return _by_group(whole.split([whole.shape[0] - 2 * keys, keys, keys]), model)


# .t() leaves a bias unchanged, which has one dim.
LAYOUTS: dict[str, TensorLayout] = {
    "same": TensorLayout(lambda parts, _: parts[0], lambda tensor, _: [tensor]),
    "stacked": TensorLayout(
        lambda parts, _: torch.cat(list(parts)), lambda tensor, _: list(tensor.chunk(2))
    ),
    "by group": TensorLayout(_by_group, _from_groups),
    "fused": TensorLayout(
        lambda parts, model: _fused(parts[0], model),
        lambda tensor, model: [torch.cat(_from_groups(tensor, model))],
    ),
    "transposed": TensorLayout(
        lambda parts, _: parts[0].t().contiguous(), lambda tensor, _: [tensor.t().contiguous()]
    ),
    "fused transposed": TensorLayout(
        lambda parts, model: _fused(parts[0].t(), model),
        lambda tensor, model: [torch.cat(_from_groups(tensor, model)).t().contiguous()],
    ),
}


class TensorNames(NamedTuple):
    """Modules that hold the parts of one module here, and the layout of their tensors."""

    theirs: Sequence[str]
    layout: str = "same"


def head_of(family: str) -> str:
    """Returns the name of the untied output weight."""
    return f"{FAMILIES[family]['head']}.weight"


def row_of(family: str, name: str) -> TensorNames:
    """Returns the names of the tensors there that hold a parameter here, and their layout.

    Raises InputError if the table of the family has no such parameter.
    """
    module, _, kind = name.rpartition(".")
    tensors = FAMILIES[family]
    if module == "output_layer":
        return TensorNames((head_of(family),))
    prefix, modules = tensors["base"], tensors["outer"]
    layer, module = layer_of(module)
    if layer is not None:
        prefix, modules = f"{prefix}.{tensors['layers']}.{layer}", tensors["layer"]
    found = modules.get(module)
    if found is None:
        raise InputError(
            f"the row {family} of FAMILIES in config/hf_families.py has no name for {module}"
        )
    row = TensorNames((found,)) if isinstance(found, str) else TensorNames(**found)
    return TensorNames(tuple(f"{prefix}.{part}.{kind}" for part in row.theirs), row.layout)


def their_shapes(
    family: str, shapes: Mapping[str, tuple[int, ...]], model: ModelConfig
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of the tensors there that hold each parameter here, by both names.

    shapes: those of the parameters here.
    """
    found = {}
    for name, shape in shapes.items():
        row = row_of(family, name)
        parts = LAYOUTS[row.layout].split(torch.empty(shape, device="meta"), model)
        named = zip(row.theirs, parts, strict=True)
        found[name] = {part: tuple(tensor.shape) for part, tensor in named}
    return found


def known_name(family: str, name: str, *, has_base: bool) -> str:
    """Returns the name under which a tensor of a file is known here.

    has_base: whether the names in the files begin with the family's base, but for the head.
    """
    name = RENAMED.get((family, name), name)
    return name if has_base or name == head_of(family) else f"{FAMILIES[family]['base']}.{name}"
