"""Runs a function without keeping its activations, and runs it again in backward.

    forward   Runs the function under no_grad. Keeps the inputs (whole, or this TP rank's 1/t of the
              first one) and the states of the random-number generators.
    backward  Restores the inputs and the states, runs the function with gradients on, and goes back
              through the graph of this replay. Puts the generators back afterwards.

The replay gives the same bits as the forward, from the same random numbers. It restores every named
stream, the name of the current stream, the CPU generator and autocast. It changes none of the
caller's tensors, and puts back the generators and autocast. All kept tensors go through
save_for_backward, so saved-tensor hooks that count or move saved tensors also see them.

`Record` compares the units and regions of our own GPT with their forwards (`--recompute-verify`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import start_all_gather_first_dim
from megatron_lite.parallel.torch_internals import engine, is_plain_backward, tree_map_only

from .contents import tensors_of, unobserved
from .randomness import Generators, casts_not_cached
from .replay import Conditions, RecomputeMismatch, replay_inputs
from .saved import results_of
from .verify import NOT_THE_SAME, Execution, Graph, described, inputs_of


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    rng: Generators | None,
    replay: Callable[..., Any] | None = None,
    split_group: ProcessGroup | None = None,
    previous: Any = None,
) -> Any:
    """Returns `function(*args)`; backward rebuilds the activations of the function.

    If gradients are off, the function simply runs.

    args: tensors and any other objects. Other objects are passed on unchanged. Tensors must come as
        arguments, because a tensor that the function captures stays alive with the function. The
        function must return a tensor, or a tuple that contains tensors.
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
        return function(*args)
    # autograd leaves out a Function if none of its inputs requires grad. The parameters that the
    # function captures would get no gradient. This empty input keeps the node in the graph.
    anchor = torch.empty(0, requires_grad=True)
    call = function, replay or function, rng, split_group, previous
    return _Checkpoint.apply(call, anchor, *args)


def rebuilt_outputs(node: Any) -> Any:
    """Returns the outputs of the checkpoint with the grad_fn `node`, rebuilt by a replay.

    Operations after the checkpoint call it in backward, if a recipe stands in for the output that
    they saved (discard.py). The first call runs the replay. Further calls and the checkpoint's own
    backward use the same replay.
    """
    if not node.replayed:
        node.replayed = _replay(node)
    return node.replayed[0]


class _Checkpoint(torch.autograd.Function):
    """The node of one checkpoint in the forward's graph. Its settings: see `checkpoint`.

    ctx.replayed: the replay, if `rebuilt_outputs` ran it before this node's backward.
    ctx.gather: the all-gather of the split input, if the backward of another unit started it.
    """

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], anchor: Tensor, *values: Any) -> Any:
        function, ctx.replay, rng, ctx.split_group, ctx.previous = call
        ctx.replayed = ctx.gather = None
        tensors = {place: value for place, value in enumerate(values) if isinstance(value, Tensor)}
        ctx.places = tuple(tensors)
        ctx.others = [None if isinstance(value, Tensor) else value for value in values]
        ctx.needing = [place for place, tensor in tensors.items() if tensor.requires_grad]
        # The conditions must be read before the run, which draws. The first input is split after
        # the run, which needs it whole.
        ctx.conditions = Conditions(rng, {each.device.type for each in tensors.values()})
        with casts_not_cached():
            outputs = function(*values)
        if ctx.split_group:
            ctx.shape = values[0].shape
            tensors[0] = split_for_rank(values[0], ctx.split_group)
        ctx.save_for_backward(*tensors.values(), *ctx.conditions.take_states())
        # If the function returns a parameter unchanged, autograd would make this node the history
        # of the parameter itself, and backward would never end. A view of the parameter avoids
        # that.
        unchanged = tuple(
            value.view_as(value) if isinstance(value, torch.nn.Parameter) else value
            for value in results_of(outputs)
        )
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
        outputs, received = ctx.replayed or _replay(ctx)
        ctx.replayed = None
        pairs = [
            (output, grad)
            for output, grad in zip(results_of(outputs), grads, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        if pairs:
            # torch.autograd.backward would first check the gradients' shapes in Python, which takes
            # 24 us for each region; here they come from autograd itself.
            engine.run_backward(
                *zip(*pairs, strict=True),
                keep_graph=False,
                create_graph=False,
                inputs=(),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        elif ctx.needing:
            raise RuntimeError(
                "a recomputed function has no output that requires grad: it needs no recomputation"
            )
        return None, None, *(received.get(place) for place in range(len(ctx.others)))


def _replay(ctx: Any) -> tuple[Any, dict[int, Tensor]]:
    """Returns the outputs of a replay with their graph, and where backward through them collects
    the gradients of the inputs, by the number of the argument."""
    saved, values = ctx.saved_tensors, dict(enumerate(ctx.others))
    count = len(ctx.places)
    # They are detached: the replay must not connect to the forward's graph, and the call of
    # requires_grad_ must not change the caller's tensors.
    for place, tensor in zip(ctx.places, saved[:count], strict=True):
        values[place] = tensor.detach()
    if ctx.split_group:
        values[0] = _whole_input(ctx, values[0])
    with ctx.conditions.repeated(saved[count:]):
        inputs, received = replay_inputs({place: values[place] for place in ctx.needing})
        values |= inputs
        return ctx.replay(*values.values()), received


def _whole_input(ctx: Any, shard: Tensor) -> Tensor:
    """Returns the whole input, all-gathered from the parts of all ranks. shard: this rank's part.

    It also starts the all-gather for the split unit before, which backward reaches next.
    """
    started = ctx.gather or start_all_gather_first_dim(shard, ctx.split_group)
    ctx.gather = None  # its result is used up: a second backward (retain_graph) needs a new one
    if previous := ctx.previous:
        # Inputs are saved first, so saved_tensors[0] is this rank's part of the split input.
        previous.gather = start_all_gather_first_dim(
            previous.saved_tensors[0], previous.split_group
        )
    return started.wait().view(ctx.shape)


def split_for_rank(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Returns a copy of this rank's part of the flattened tensor: [n] with n = elements / t.

    The tensor itself does not change.
    """
    return tensor.detach().reshape(group.size(), -1)[group.rank()].clone()


class Record:
    """The forward of a unit or region of our own GPT, with which every replay is compared.

    what: the name of the unit or region in messages.
    rng: the random-number streams to compare; None for a function that draws nothing.
    """

    def __init__(self, what: str, rng: Generators | None) -> None:
        self.what, self.rng = what, rng
        self._forward: Execution | None = None
        self._now = Execution()

    def recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with comparison: the first call is recorded, later calls are compared.

        It covers the arguments, the values passed to `see` inside the call, the results, and their
        graph.
        RecomputeMismatch: a later call differs from the first one.
        """

        def call(*args: Any) -> Any:
            self._now = run = Execution()
            self.see(f"{self.what}, input", args)
            outputs, run.graph = run_with_graph(function, args)
            self.see(f"{self.what}, output", outputs)
            self._now = Execution()
            if not self._forward:
                self._forward = run
                return outputs
            places, other = self._forward.differences(run, whole=True)
            if places or other:
                what = described(places) if places else f"{self.what}, {other}"
                raise RecomputeMismatch(f"{NOT_THE_SAME} {what}")
            return outputs

        return call

    def see(self, place: str, values: Any) -> None:
        """Adds the tensors among `values`, a tensor or a tuple, to the run, and the streams."""
        with unobserved():
            for number, each in enumerate(results_of(values)):
                if isinstance(each, Tensor):
                    self._now.see(f"{place}: tensor {number}", each)
            self._now.see_streams(place, self.rng)


def run_with_graph(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Graph]:
    """Returns the results of `function(*args)`, and their graph.

    If gradients are off, as in the forward of a rebuilt region, the results have no history. The
    graph is built for this comparison alone, and the tensors that it saves are freed at once.
    """
    if torch.is_grad_enabled():
        inputs = inputs_of(
            (f"argument {n}", each) for n, each in enumerate(args) if isinstance(each, Tensor)
        )
        outputs = function(*args)
        return outputs, Graph.of(tensors_of(outputs), inputs)
    args = [
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for value in args
    ]
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        outputs, graph = run_with_graph(function, args)
    return tree_map_only(Tensor, Tensor.detach, outputs), graph
