"""Turns tensors of other layouts into a tensor of this project, and back.

A layout is a pair of functions that are inverse to each other and linear: they map weights to
weights and gradients to gradients, bit for bit.

    layout       there                                       here
    same         one tensor                                  the same tensor
    stacked      gate and up                                 [gate; up]
    by group     q, k and v                                  group by group: [q .. q k v]
    fused        [all q; all k; all v]                       group by group
    transposed   [in, out], as GPT-2's Conv1D holds it       [out, in]
    fused transposed                                         both of the last two
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.model import ModelConfig


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


def _fused(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    queries, groups = model.num_attention_heads * model.head_dim, model.query_groups
    keys = groups * model.head_dim
    return _by_group(parts[0].split([queries, keys, keys]), model)


def _unfused(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    return [torch.cat(_from_groups(tensor, model))]


# .t() leaves a bias unchanged, which has one dim.
LAYOUTS: dict[str, TensorLayout] = {
    "same": TensorLayout(lambda parts, _: parts[0], lambda tensor, _: [tensor]),
    "stacked": TensorLayout(
        lambda parts, _: torch.cat(list(parts)), lambda tensor, _: list(tensor.chunk(2))
    ),
    "by group": TensorLayout(_by_group, _from_groups),
    "fused": TensorLayout(_fused, _unfused),
    "transposed": TensorLayout(
        lambda parts, _: parts[0].t().contiguous(), lambda tensor, _: [tensor.t().contiguous()]
    ),
    "fused transposed": TensorLayout(
        lambda parts, model: _fused([parts[0].t()], model),
        lambda tensor, model: [_unfused(tensor, model)[0].t().contiguous()],
    ),
}
