"""Runs a function without keeping its activations, and again in backward: the same bits, from the same random numbers.

    forward   no_grad: run, keep the inputs (whole, or this TP rank's 1/t of the first) and the state of the randomness
    backward  restore both, run with grad, backward through the replay, put the randomness back as it was

Every named stream, the current stream's name, the CPU generator and autocast are restored. Nothing of the caller's is changed.
All tensors that are kept are kept by save_for_backward, where whoever counts or moves saved tensors finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import start_all_gather_first_dim
from megatron_lite.parallel.rng import Generators, RngSnapshot
from megatron_lite.recompute.phase import recomputing


def checkpoint(function: Callable[..., Any], *args: Any, rng: Generators | None, replay: Callable[..., Any] | None = None,
               split_group: ProcessGroup | None = None, previous: Any = None, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are rebuilt in backward. Returns what it returns.

    args and kwargs: tensors, or anything else, which is passed as it is. Tensors must come as arguments: what the function
    captures is kept alive by it. Outputs: a tensor, or a tuple with tensors in it.
    rng: the streams that the function draws from; None if it draws nothing.
    replay: called in backward in place of `function`: the same graph and draws, but the values of its outputs may be anything.
    split_group: keep only this rank's 1/t of the first argument, a tensor that is the same on every rank of the group and whose
    size t divides; backward then issues one all-gather of it. `previous`: the grad_fn of the split checkpoint before this one,
    whose gather this one's backward starts, to run beside the replay.
    Where gradients are off the function simply runs. RuntimeError in backward: an input requires grad and no output depends on
    it or on a parameter; a backward for chosen inputs only (torch.autograd.grad), since a replay's reaches every parameter.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # A Function whose inputs need no gradient would drop the gradients of the parameters inside: this keeps it in the graph.
    anchor = torch.empty(0, requires_grad=True)
    call = _Call(function, replay or function, rng, split_group, previous, tuple(kwargs), len(args))
    return _Checkpoint.apply(call, anchor, *args, *kwargs.values())


def rebuilt_outputs(node: Any) -> Any:
    """The outputs of the checkpoint with the grad_fn `node`, by a replay that its backward will then use.

    For a later node of the graph, which needs them in its backward and has not kept them.
    """
    if node.replayed is None:
        node.replayed = _replay(node)
    return node.replayed.outputs


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    replay: Callable[..., Any]
    rng: Generators | None
    split_group: ProcessGroup | None
    previous: Any
    keywords: tuple[str, ...]
    num_positional: int

    def run(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        named = dict(zip(self.keywords, values[self.num_positional:], strict=True))
        return function(*values[: self.num_positional], **named)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *values: Any) -> Any:
        ctx.call, ctx.replayed, ctx.gather = call, None, None
        tensors = {place: value for place, value in enumerate(values) if isinstance(value, Tensor)}
        ctx.places, ctx.others = tuple(tensors), [None if isinstance(value, Tensor) else value for value in values]
        ctx.inputs_require_grad = [isinstance(value, Tensor) and value.requires_grad for value in values]
        ctx.autocast = _autocast_states({"cpu", *(tensor.device.type for tensor in tensors.values())})
        randomness = None if call.rng is None else Randomness.now(call.rng)
        outputs = call.run(call.function, values)
        if call.split_group is not None:
            ctx.shape = values[0].shape
            tensors[0] = split_for_rank(values[0], call.split_group)
        ctx.streams = None if randomness is None else randomness.names
        ctx.save_for_backward(*tensors.values(), *(() if randomness is None else randomness.copies()))
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        fixed = [value for value in flat if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())]
        ctx.mark_non_differentiable(*fixed)
        # A parameter handed through would get this node as its history; a view of it does not (and backward would never end).
        return tuple(map(_not_a_parameter, outputs)) if isinstance(outputs, tuple) else _not_a_parameter(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("recomputation works in .backward() without `inputs`: the parameters inside get their .grad there")
        replay = ctx.replayed or _replay(ctx)
        ctx.replayed = None
        flat = replay.outputs if isinstance(replay.outputs, tuple) else (replay.outputs,)
        pairs = [(output, grad) for output, grad in zip(flat, grads, strict=True)
                 if isinstance(output, Tensor) and output.requires_grad and grad is not None]
        if not pairs and not any(ctx.inputs_require_grad):  # all frozen: only the anchor asked
            return (None,) * (2 + len(ctx.others))
        if not pairs:
            raise RuntimeError("a recomputed function has no output that requires grad: it needs no recomputation")
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(replay.received.get(place) for place in range(len(ctx.others)))


class _Replay(NamedTuple):
    """What the second run returned, with its graph, and where backward through it will put the inputs' gradients."""

    outputs: Any
    received: dict[int, Tensor]


def _replay(ctx: Any) -> _Replay:
    call, saved = ctx.call, ctx.saved_tensors
    values = list(ctx.others)
    for place, tensor in zip(ctx.places, saved, strict=False):  # the states of the randomness follow
        values[place] = tensor.detach()
    if call.split_group is not None:
        values[0] = _whole_input(ctx, values[0])
    randomness = None if ctx.streams is None else Randomness(call.rng, ctx.streams, saved[len(ctx.places):])
    received: dict[int, Tensor] = {}
    with ExitStack() as restored:
        if randomness is not None:
            restored.enter_context(randomness.replayed())
        for state in ctx.autocast:
            restored.enter_context(torch.autocast(**state))
        restored.enter_context(torch.enable_grad())
        restored.enter_context(recomputing())
        places = [place for place in ctx.places if ctx.inputs_require_grad[place]]
        if places:
            inputs = _Receive.apply(received, places, *(values[place].requires_grad_() for place in places))
            for place, tensor in zip(places, inputs, strict=True):
                values[place] = tensor
        return _Replay(call.run(call.replay, values), received)


def _whole_input(ctx: Any, shard: Tensor) -> Tensor:
    """The input that was split, of which `shard` is this rank's part; starts the gather that backward will need next."""
    started = ctx.gather or start_all_gather_first_dim(shard, ctx.call.split_group)
    ctx.gather = None
    previous = ctx.call.previous
    if previous is not None:
        previous.gather = start_all_gather_first_dim(previous.saved_tensors[0], previous.call.split_group)
    return started.wait().view(ctx.shape)


class _Receive(torch.autograd.Function):
    """Hands gradients over as backward made them. A leaf's `.grad` would have the leaf's strides instead, and what sums over it
    next (a norm's weight gradient) would add in another order: other bits than without recomputation."""

    @staticmethod
    def forward(ctx: Any, received: dict[int, Tensor], places: list[int], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.received, ctx.places = received, places
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        for place, grad in zip(ctx.places, grads, strict=True):
            if grad is not None:
                ctx.received[place] = grad
        return (None, None, *(None for _ in grads))


def split_for_rank(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """A copy of this rank's part of the flattened tensor: [n] with n = elements / t. The tensor itself is left alone."""
    return tensor.detach().reshape(group.size(), -1)[group.rank()].clone()


def _not_a_parameter(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.nn.Parameter) else value


class StreamNames(NamedTuple):
    """The stream that was current, and the name of every stream, in the order of the states."""

    current: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Randomness:
    """The state of every generator that a replay may draw from: one of each stream, then the CPU's where that is none of them."""

    streams: Generators
    names: StreamNames
    states: Sequence[Tensor]

    @classmethod
    def now(cls, streams: Generators) -> Randomness:
        """As it is."""
        snapshot = streams.snapshot()
        # On a CPU run the CPU generator is the current stream's, and so in the snapshot.
        cpu = () if streams.device.type == "cpu" else (torch.get_rng_state(),)
        return cls(streams, StreamNames(snapshot.current, tuple(snapshot.states)), (*snapshot.states.values(), *cpu))

    def copies(self) -> list[Tensor]:
        """The states in storages of their own, whether or not others keep the same."""
        return [state.clone() for state in self.states]

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, all draws repeat those after the snapshot; afterwards they go on as if nothing had been drawn."""
        before = Randomness.now(self.streams)
        self._restore()
        try:
            yield
        finally:
            before._restore()

    def _restore(self) -> None:
        self.streams.restore(RngSnapshot(self.names.current, dict(zip(self.names.names, self.states, strict=False))))
        for cpu in self.states[len(self.names.names):]:
            torch.set_rng_state(cpu)


def _autocast_states(kinds: set[str]) -> list[dict[str, Any]]:
    return [dict(device_type=kind, enabled=torch.is_autocast_enabled(kind), dtype=torch.get_autocast_dtype(kind),
                 cache_enabled=torch.is_autocast_cache_enabled()) for kind in sorted(kinds)]
