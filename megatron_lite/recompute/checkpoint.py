"""Runs a function without keeping its activations, and runs it again in backward.

    forward   Runs the function under no_grad. Keeps the inputs (whole, or this TP rank's 1/t of the
              first one) and the states of the random-number generators.
    backward  Restores the inputs and the states, runs the function with gradients on, and goes back
              through the graph of this replay. Puts the generators back afterwards.

The replay gives the same bits as the forward, from the same random numbers. It restores every named
stream, the name of the current stream, the CPU generator and autocast. It changes none of the
caller's tensors, and puts back the generators and autocast. All kept tensors go through
save_for_backward, so saved-tensor hooks that count or move saved tensors also see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import start_all_gather_first_dim
from megatron_lite.parallel.generators import Generators
from megatron_lite.parallel.torch_internals import engine, is_plain_backward
from megatron_lite.recompute.phase import recomputing
from megatron_lite.recompute.randomness import Randomness, autocast_states, casts_not_cached


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    rng: Generators | None,
    replay: Callable[..., Any] | None = None,
    split_group: ProcessGroup | None = None,
    previous: Any = None,
    **kwargs: Any,
) -> Any:
    """Returns `function(*args, **kwargs)`; backward rebuilds the activations of the function.

    If gradients are off, the function simply runs.

    args, kwargs: tensors and any other objects. Other objects are passed on unchanged. Tensors must
        come as arguments, because a tensor that the function captures stays alive with the
        function. The function must return a tensor, or a tuple that contains tensors.
    rng: the random-number streams that the function draws from; None if it draws nothing.
    replay: runs in backward in place of `function`. It must build the same graph and draw the same
        numbers. The values of its outputs may be anything.
    split_group: if given, this rank keeps only 1/t of the first argument, and backward issues one
        all-gather of it. That argument must be the same tensor on every rank of the group, and the
        group size t must divide its number of elements.
    previous: the grad_fn of the split checkpoint before this one in the forward. This checkpoint's
        backward starts the all-gather for it, so that the gather runs beside the replay.

    RuntimeError in backward: an input requires grad, but no output of the function does.
    RuntimeError in backward: backward is for chosen inputs only (torch.autograd.grad). Backward
    through a replay always writes to the .grad of every parameter that it reaches.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # autograd leaves out a Function if none of its inputs requires grad. The parameters that the
    # function captures would get no gradient. This empty input keeps the node in the graph.
    anchor = torch.empty(0, requires_grad=True)
    call = _RegionCall(
        function, replay or function, rng, split_group, previous, tuple(kwargs), len(args)
    )
    return _Checkpoint.apply(call, anchor, *args, *kwargs.values())


def rebuilt_outputs(node: Any) -> Any:
    """Returns the outputs of the checkpoint with the grad_fn `node`, rebuilt by a replay.

    Operations after the checkpoint call it in backward, if a recipe stands in for the output that
    they saved (discard.py). The first call runs the replay. Further calls and the checkpoint's own
    backward use the same replay.
    """
    if node.replayed is None:
        node.replayed = _replay(node)
    return node.replayed.outputs


@dataclass(frozen=True)
class _RegionCall:
    """One call of `checkpoint`: its functions and settings, and how to rebuild its arguments.

    keywords: the names of the keyword arguments, which follow the positional arguments.
    num_positional: the number of positional arguments.
    """

    function: Callable[..., Any]
    replay: Callable[..., Any]
    rng: Generators | None
    split_group: ProcessGroup | None
    previous: Any
    keywords: tuple[str, ...]
    num_positional: int

    def run(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        named = dict(zip(self.keywords, values[self.num_positional :], strict=True))
        return function(*values[: self.num_positional], **named)


class _Checkpoint(torch.autograd.Function):
    """The node of one checkpoint in the forward's graph.

    ctx.replayed: the replay, if `rebuilt_outputs` ran it before this node's backward.
    ctx.gather: the all-gather of the split input, if the backward of another unit started it.
    """

    @staticmethod
    def forward(ctx: Any, call: _RegionCall, anchor: Tensor, *values: Any) -> Any:
        ctx.call, ctx.replayed, ctx.gather = call, None, None
        tensors = {place: value for place, value in enumerate(values) if isinstance(value, Tensor)}
        ctx.places = tuple(tensors)
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]
        ctx.inputs_require_grad = [
            isinstance(value, Tensor) and value.requires_grad for value in values
        ]
        ctx.autocast = autocast_states(
            {"cpu", *(tensor.device.type for tensor in tensors.values())}
        )
        # The states must be read before the run, which draws. The first input is split after the
        # run, which needs it whole.
        randomness = None if call.rng is None else Randomness.now(call.rng)
        with casts_not_cached():
            outputs = call.run(call.function, values)
        if call.split_group is not None:
            ctx.shape = values[0].shape
            tensors[0] = split_for_rank(values[0], call.split_group)
        ctx.filled = None if randomness is None else randomness.filled()
        ctx.save_for_backward(
            *tensors.values(), *(() if randomness is None else randomness.copies())
        )
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        fixed = [
            value
            for value in flat
            if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        ]
        ctx.mark_non_differentiable(*fixed)
        # If the function returns a parameter unchanged, autograd would make this node the history
        # of the parameter itself, and backward would never end. A view of the parameter avoids
        # that.
        unchanged = tuple(map(_not_a_parameter, flat))
        return unchanged if isinstance(outputs, tuple) else unchanged[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not is_plain_backward():
            raise RuntimeError(
                "recomputation works in .backward() without `inputs`: the parameters inside "
                "get their .grad there"
            )
        # The node drops its replay before it goes back through it. A second backward (retain_graph)
        # needs a new one, since this backward frees the graph of the replay.
        replay = ctx.replayed or _replay(ctx)
        ctx.replayed = None
        flat = replay.outputs if isinstance(replay.outputs, tuple) else (replay.outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(flat, grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and grad is not None
        ]
        if not pairs and not any(ctx.inputs_require_grad):  # only the anchor needs a gradient
            return (None,) * (2 + len(ctx.others))
        if not pairs:
            raise RuntimeError(
                "a recomputed function has no output that requires grad: it needs no recomputation"
            )
        _run_backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return None, None, *(replay.received.get(place) for place in range(len(ctx.others)))


class _Replay(NamedTuple):
    """The outputs of a replay with their graph, and a place for the gradients of its inputs.

    received: filled by backward through the replay: the gradient of each input that requires one,
        by the number of the input among the arguments.
    """

    outputs: Any
    received: dict[int, Tensor]


def _replay(ctx: Any) -> _Replay:
    call, saved = ctx.call, ctx.saved_tensors
    values = list(ctx.others)
    # `saved` holds the inputs first. The states of the generators follow, which strict=False leaves
    # out.
    # They are detached: the replay must not connect to the forward's graph, and the call of
    # requires_grad_ below must not change the caller's tensors.
    for place, tensor in zip(ctx.places, saved, strict=False):
        values[place] = tensor.detach()
    if call.split_group is not None:
        values[0] = _whole_input(ctx, values[0])
    randomness = None if ctx.filled is None else ctx.filled(saved[len(ctx.places) :])
    received: dict[int, Tensor] = {}
    # The context covers only the run. The gradient of the replay runs after it, under the settings
    # that backward was called with, as it would without recomputation.
    with ExitStack() as restored:
        if randomness is not None:
            restored.enter_context(randomness.replayed())
        for state in ctx.autocast:
            # A disabled autocast must be entered only if backward runs under an enabled one.
            if state["enabled"] or torch.is_autocast_enabled(state["device_type"]):
                restored.enter_context(torch.autocast(**state))
        restored.enter_context(torch.enable_grad())
        restored.enter_context(recomputing())
        places = [place for place in ctx.places if ctx.inputs_require_grad[place]]
        if places:
            inputs = _Receive.apply(
                received, places, *(values[place].requires_grad_() for place in places)
            )
            for place, tensor in zip(places, inputs, strict=True):
                values[place] = tensor
        return _Replay(call.run(call.replay, values), received)


def _whole_input(ctx: Any, shard: Tensor) -> Tensor:
    """Returns the whole input, all-gathered from the parts of all ranks. shard: this rank's part.

    It also starts the all-gather for the split unit before, which backward reaches next.
    """
    started = ctx.gather or start_all_gather_first_dim(shard, ctx.call.split_group)
    ctx.gather = None  # its result is used up: a second backward (retain_graph) needs a new one
    previous = ctx.call.previous
    if previous is not None:
        # Inputs are saved first, so saved_tensors[0] is this rank's part of the split input.
        previous.gather = start_all_gather_first_dim(
            previous.saved_tensors[0], previous.call.split_group
        )
    return started.wait().view(ctx.shape)


class _Receive(torch.autograd.Function):
    """Collects the gradients of a replay's inputs with the strides that backward gave them.

    A leaf's `.grad` would get the strides of the leaf. A later sum over that gradient (the weight
    gradient of a norm) would add in another order, and the bits would differ from a run without
    recomputation.
    """

    @staticmethod
    def forward(
        ctx: Any, received: dict[int, Tensor], places: list[int], *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.received, ctx.places = received, places
        # Without recomputation an input that no output depends on gets None, and not zeros.
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        for place, grad in zip(ctx.places, grads, strict=True):
            if grad is not None:
                ctx.received[place] = grad
        return (None, None, *(None for _ in grads))


def _run_backward(outputs: list[Tensor], grads: list[Tensor]) -> None:
    """Goes back through a replay. torch.autograd.backward would first check the gradients' shapes
    in Python, which takes 24 us for each region; here they come from autograd itself."""
    keep_graph, create_graph, inputs = False, False, ()
    engine.run_backward(
        tuple(outputs), tuple(grads), keep_graph, create_graph, inputs,
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def split_for_rank(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Returns a copy of this rank's part of the flattened tensor: [n] with n = elements / t.

    The tensor itself does not change.
    """
    return tensor.detach().reshape(group.size(), -1)[group.rank()].clone()


def _not_a_parameter(value: Any) -> Any:
    return value.view_as(value) if isinstance(value, torch.nn.Parameter) else value
