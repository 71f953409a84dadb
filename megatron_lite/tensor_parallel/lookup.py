"""The lookup of token rows, whose backward adds to the weight's own sum of gradients.

Autograd would make a tensor of the table's size, most of it zeros, and add it to the sum. With a
large vocabulary and a small batch this takes a few percent of a step on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.parallel.weight_gradient import own_lookup_sum


def token_rows(tokens: Tensor, weight: Tensor) -> Tensor:
    """Returns the rows of the weight [rows, h] at the ids [..], as [.., h].

    Issues no collective. Keeps the ids.
    """
    add = own_lookup_sum(weight)
    return F.embedding(tokens, weight) if add is None else _TokenRows.apply(tokens, weight, add)


class _TokenRows(torch.autograd.Function):
    """ids [..], weight [rows, h] -> [.., h]."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, add: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.add = add
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, ...]:
        (tokens,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.add(tokens, grad_output)
        return None, None, None
