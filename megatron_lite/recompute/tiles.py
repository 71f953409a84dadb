"""Runs a function of a sequence in tiles, one after the other, in forward and in backward.

    forward     y[tile] = f(x[tile]) under no_grad; keeps x
    backward    of each tile: f(x[tile]) again, dx[tile], and its part of the gradients of weights

What f holds inside exists for one tile at a time. No tile may read another one: the rows of f must
depend on their own row alone, as those of an MLP do (arXiv 2506.13996, section 3).

All tiles are one node of the graph, whose inputs are the parameters too. A parameter's gradient is
complete when backward leaves the node, so its hooks run once: a hook that sends the gradient after
the first tile would send a part of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .randomness import Generators, casts_not_cached
from .replay import Conditions


def run_in_tiles(
    functions: Sequence[Callable[..., Tensor]],
    replay: Callable[..., Tensor] | None,
    modules: Any,
    rng: Generators,
    hidden_states: Tensor,
    *others: Any,
    skips: bool,
) -> Tensor:
    """Returns f(hidden_states, *others), [s, ..], with a result for each row.

    functions: f for each tile. The tiles are equal; if their number does not divide s, the last is
        shorter, or there are fewer. replay: f in backward; None: the same, as for a comparison.
    modules: those whose parameters f reads, or None in place of one.
    rng: the streams, whose states are kept. f must not draw from them.
    skips: the values of the result are never read, so that forward runs nothing.
    """
    parameters = [each for each in nn.ModuleList(modules).parameters() if each.requires_grad]
    replays = functions if replay is None else [replay] * len(functions)
    return _Tiles.apply(functions, replays, rng, skips, others, hidden_states, *parameters)


def tiles_of(whole: Tensor, number: int) -> list[slice]:
    """Returns the rows of each tile."""
    length = -(-whole.shape[0] // number)
    return [slice(start, start + length) for start in range(0, whole.shape[0], length)]


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        functions: Sequence[Callable[..., Tensor]],
        replays: Sequence[Callable[..., Tensor]],
        rng: Generators,
        skips: bool,
        others: tuple[Any, ...],
        hidden_states: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        # The parameters are no saved tensors: hooks could give backward other objects.
        ctx.replays, ctx.others, ctx.parameters = replays, others, parameters
        ctx.conditions = Conditions(rng, {hidden_states.device.type})
        ctx.save_for_backward(hidden_states, *ctx.conditions.take_states())
        if skips:
            return hidden_states.new_empty(()).expand_as(hidden_states)
        needs_grad, whole = hidden_states.requires_grad, torch.empty(0)
        with casts_not_cached():
            for number, tile in enumerate(tiles_of(hidden_states, len(functions))):
                rows = hidden_states[tile].detach().requires_grad_(needs_grad)
                part = functions[number](rows, *others)
                if not number:
                    whole = part.new_empty(hidden_states.shape[0], *part.shape[1:])
                whole[tile] = part
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        hidden_states, *states = ctx.saved_tensors
        grad_input = torch.empty_like(hidden_states)
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        for number, tile in enumerate(tiles_of(hidden_states, len(ctx.replays))):
            rows = hidden_states[tile].detach().requires_grad_()
            with ctx.conditions.repeated(states):
                part = ctx.replays[number](rows, *ctx.others)
            # Not .backward(): that would run the hooks of the parameters. A weight whose gradient
            # goes straight to its float32 sum (parallel/weight_gradient.py) gets None.
            grad_input[tile], *grads = torch.autograd.grad(
                part, (rows, *ctx.parameters), grad_output[tile], allow_unused=True
            )
            sums = [
                grad if total is None else total.add_(grad)
                for total, grad in zip(sums, grads, strict=True)
            ]
            del part, grads  # which would live on beside those of the next tile
        return *[None] * 5, grad_input, *sums
