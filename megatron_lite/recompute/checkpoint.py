"""Runs a function without keeping its activations, and again in backward: the same bits, from the same random numbers.

    forward   no_grad: run, keep the inputs (whole, or this TP rank's 1/t of the first) and the state of the randomness
    backward  restore both, run with grad, backward through the replay, put the randomness back as it was

Every named stream, the current stream's name, the CPU generator and autocast are restored. Nothing of the caller's is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import all_gather_first_dim
from megatron_lite.parallel.rng import RngSnapshot, RngStreams
from megatron_lite.recompute.phase import recomputing


def checkpoint(function: Callable[..., Any], *args: Any, rng: RngStreams, split_group: ProcessGroup | None = None,
               **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are rebuilt in backward. Returns what it returns.

    args and kwargs: tensors, or anything else, which is passed as it is. Tensors must come as arguments: what the function
    captures is kept alive by it. Outputs: a tensor, or a tuple with tensors in it.
    split_group: keep only this rank's 1/t of the first argument, a tensor that is the same on every rank of the group and whose
    size t divides; backward then issues one all-gather of it. Where gradients are off the function simply runs.
    RuntimeError: no output depends on a parameter or an input that requires grad.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # A Function whose inputs need no gradient would drop the gradients of the parameters inside: this keeps it in the graph.
    anchor = torch.empty(0, requires_grad=True)
    call = _Call(function, rng, split_group, tuple(kwargs), len(args))
    return _Checkpoint.apply(call, anchor, *args, *kwargs.values())


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    rng: RngStreams
    split_group: ProcessGroup | None
    keywords: tuple[str, ...]
    num_positional: int

    def __call__(self, values: list[Any]) -> Any:
        named = dict(zip(self.keywords, values[self.num_positional:], strict=True))
        return self.function(*values[: self.num_positional], **named)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *values: Any) -> Any:
        ctx.call = call
        ctx.randomness = _Randomness.now(call.rng)
        ctx.autocast = _autocast_states(call.rng.device)
        outputs = call(list(values))
        tensors = {place: value for place, value in enumerate(values) if isinstance(value, Tensor)}
        if call.split_group is not None:
            ctx.shape = values[0].shape
            tensors[0] = split_for_rank(values[0], call.split_group)
        ctx.places, ctx.others = tuple(tensors), [None if isinstance(value, Tensor) else value for value in values]
        ctx.inputs_require_grad = [isinstance(value, Tensor) and value.requires_grad for value in values]
        ctx.save_for_backward(*tensors.values())
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        fixed = [value for value in flat if isinstance(value, Tensor) and not value.is_floating_point()]
        ctx.mark_non_differentiable(*fixed)
        # A parameter handed through would get this node as its history; a view of it does not (and backward would never end).
        return tuple(map(_not_a_parameter, outputs)) if isinstance(outputs, tuple) else _not_a_parameter(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        values = list(ctx.others)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            if place == 0 and ctx.call.split_group is not None:
                tensor = all_gather_first_dim(tensor, ctx.call.split_group).view(ctx.shape)
            values[place] = tensor.detach()
        received: dict[int, Tensor] = {}
        with ctx.randomness.replayed(), _autocast(ctx.autocast), torch.enable_grad(), recomputing():
            for place in ctx.places:
                if ctx.inputs_require_grad[place]:
                    values[place] = _Receive.apply(values[place].requires_grad_(), place, received)
            outputs = ctx.call(values)
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [(output, grad) for output, grad in zip(flat, grads, strict=True)
                 if isinstance(output, Tensor) and output.requires_grad and grad is not None]
        if not pairs:
            raise RuntimeError("a recomputed function has no output that requires grad: it needs no recomputation")
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(received.get(place) for place in range(len(values)))


class _Receive(torch.autograd.Function):
    """Hands a gradient over as backward made it. A leaf's `.grad` would have the leaf's strides instead, and what sums over it
    next (a norm's weight gradient) would add in another order: other bits than without recomputation."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, place: int, received: dict[int, Tensor]) -> Tensor:
        ctx.place, ctx.received = place, received
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, None]:
        ctx.received[ctx.place] = grad_output
        return None, None, None


def split_for_rank(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """A copy of this rank's part of the flattened tensor: [n] with n = elements / t. The tensor itself is left alone."""
    return tensor.detach().reshape(group.size(), -1)[group.rank()].clone()


def _not_a_parameter(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.nn.Parameter) else value


@dataclass(frozen=True)
class _Randomness:
    """The state of every generator that a replay may draw from."""

    streams: RngStreams
    snapshot: RngSnapshot
    cpu: Tensor | None

    @classmethod
    def now(cls, streams: RngStreams) -> _Randomness:
        # On a CPU run the CPU generator is the current stream's, and so in the snapshot.
        return cls(streams, streams.snapshot(), None if streams.device.type == "cpu" else torch.get_rng_state())

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, all draws repeat those after the snapshot; afterwards they go on as if nothing had been drawn."""
        before = _Randomness.now(self.streams)
        self._restore()
        try:
            yield
        finally:
            before._restore()

    def _restore(self) -> None:
        self.streams.restore(self.snapshot)
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)


def _autocast_states(device: torch.device) -> list[dict[str, Any]]:
    return [dict(device_type=kind, enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind),
                 cache_enabled=torch.is_autocast_cache_enabled()) for kind in {"cpu", device.type}]


@contextmanager
def _autocast(states: list[dict[str, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(torch.autocast(**state))
        yield
