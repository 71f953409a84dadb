"""Runs pure functions of tensors: by torch's operators one by one, or compiled.

A norm, an activation or a rotation is a pair of pure functions, its forward and its backward. One
autograd Function calls the pair. It decides what is kept for backward, so a compiled run keeps the
same tensors. Eager operators compute in the dtype of their operands. A compiled kernel computes in
float32 (float64) and rounds its results once.

The functions are the chains of pointwise operations and row sums between two matmuls. The autograd
Functions that call them stay ours, so backward keeps the same tensors as without the compiler, and
a replay runs the same machine code as the forward.

torch.compile itself would look at the guards of a frame in every call (23 us, against 6 us here),
and it stops after 8 shapes of one function. Here the shapes are the key of a dictionary, so all
layers of a kind share one graph of torch's compiler (inductor). Inductor keeps the machine code on
disk (TORCHINDUCTOR_CACHE_DIR), so a second start reads it. Shapes that vary do not compile without
end: beyond MOST_SHAPES of one function, torch's operators compute the others.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError

from .signals import blocked_for_children
from .torch_internals import (
    disable_current_modes,
    fake_mode_of,
    inductor_compile,
    inductor_settings,
    is_fake,
    num_dispatch_modes,
    tree_map_only,
)

# a pure function of tensors and numbers that draws no random numbers; or one that writes to its
# first argument and returns None
Function = Callable[..., Any]
Tensors = tuple[Tensor, ...]
# A dtype, or float32 if it is narrower.
at_least_float32 = partial(torch.promote_types, torch.float32)
Gradients = tuple[Tensor | None, ...]  # of the first inputs of a function
MOST_SHAPES = 16
# Inductor's, whatever the environment says. Ranks must sum rows in the same order, and so must a
# run that is resumed. So no measurement on a GPU, and no count of its free registers, may choose
# between kernels. `deterministic` is torch 2.9's. A concatenation is a part of its kernel.
SETTINGS = {
    "deterministic": True,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "dynamic_scale_rblock": False,
    "triton.multi_kernel": 0,
    "force_pointwise_cat": True,
}


class CompiledKernels:
    """The compiled graphs of one rank. seconds: how long it took to make them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._graphs: dict[Any, Function] = {}
        self._num_shapes: Counter[Function] = Counter()

    @property
    def num_graphs(self) -> int:
        """The number of graphs so far."""
        return self._num_shapes.total()

    def __call__(self, function: Function, *tensors: Tensor, **constants: Any) -> Any:
        """Returns `function(*tensors, **constants)`, from one compiled graph.

        tensors: contiguous or not; another shape, stride or dtype is another graph.
        The first call of a graph compiles it, for about a second, or reads it from the disk.
        A dry run's tensors have no values; they take the function as it is, out of sight of meters:
        a graph has no tensors but its results.
        Issues no collective, and records nothing for autograd.
        Raises InputError if the compiler fails.
        """
        key = (
            function,
            torch.get_num_threads(),  # inductor writes it into the code of a kernel for a CPU
            *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors),
            *constants.items(),
        )
        graph = self._graphs.get(key)
        if graph is None:
            graph = partial(function, **constants)
            if is_fake(tensors[0]):
                with disable_current_modes(), fake_mode_of(tensors[0]):
                    results = graph(*tensors)
                return tree_map_only(Tensor, Tensor.clone, results)
            if self._num_shapes[function] < MOST_SHAPES:
                graph = self._made(graph, function, tensors)
            self._graphs[key] = graph
        results = graph(*tensors)
        if num_dispatch_modes() == 0:
            return results
        # A meter of storages sees the results of operators only, so it gets a copy.
        return tree_map_only(Tensor, Tensor.clone, results)

    def _made(self, graph: Function, function: Function, tensors: Tensors) -> Function:
        began = time.perf_counter()
        try:
            made = _compiled(graph, tensors)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise InputError(
                f"torch's compiler failed on {getattr(function, '__name__', function)} of {shapes}"
                f" ({first_line(error)}): --no-torch-compile leaves it out. If this is a file that "
                "is too short, a killed process has left it in the compiler's cache: remove it"
            ) from error
        self._num_shapes[function] += 1
        self.seconds += time.perf_counter() - began
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledKernels:
        return self


Kernels = CompiledKernels | None  # None: torch's operators


def compiler_fault(device: torch.device) -> str:
    """Returns why torch's compiler builds no kernels for this device: "needs .." or "failed ..".

    "" if it does: a kernel of a few numbers is built, which takes some seconds at a first start.
    """
    lacks = missing_compiler(device)
    if lacks is not None:
        return lacks
    try:
        with torch.no_grad():
            _compiled(torch.sin, (torch.zeros(8, device=device),))(torch.zeros(8, device=device))
    except Exception as error:  # whatever the compiler or the machine lacks
        return f"failed on a kernel of a few numbers ({first_line(error)})"
    return ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def missing_compiler(device: torch.device) -> str | None:
    """Returns what inductor lacks to build kernels for a device, as "needs .."; None: nothing."""
    if device.type != "cpu":
        return None if find_spec("triton") else "needs triton: install it (pip install triton)"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return (
            f"needs a C++ compiler, and there is no {compiler}: install one (Debian's package g++)"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return (
            f"needs Python's header files, and {headers} has no Python.h: install them (Debian's "
            "package python3-dev)"
        )
    return None


def _compiled(function: Function, tensors: Tensors) -> Function:
    from torch.fx.experimental.proxy_tensor import make_fx  # here: the import takes seconds

    compile_graph, settings = inductor_compile(), inductor_settings()
    chosen = {name: value for name, value in SETTINGS.items() if hasattr(settings, name)}

    # A meter's dispatch mode must not see the tensors of the trace, and the settings of the run
    # (autocast, gradients, hooks on saved tensors) must not change the graph.
    with (
        blocked_for_children(),
        disable_current_modes(),
        torch.no_grad(),
        torch.autocast(tensors[0].device.type, enabled=False),
        settings.patch(chosen),
    ):
        # Inductor would end a kernel at every write to a tensor that is made inside.
        pure = torch.func.functionalize(function, remove="mutations")
        # A trace would also convert a parameter's gradient, which may have another dtype.
        operands = [tensor.detach() for tensor in tensors]
        graph = make_fx(pure, tracing_mode="fake")(*operands)
        return compile_graph(graph, operands)


class Pair(NamedTuple):
    """A differentiable function as two pure functions.

    forward: (inputs) -> the output, or a tuple of the outputs and statistics for backward.
    backward: (gradients of the outputs, kept inputs, statistics) -> the gradient of the first
        input, or a tuple of the gradients of the first inputs.
    kept: which inputs are kept for backward. All statistics are.
    fused: the formula of the backward for compiled kernels, where the operators that are fast one
        by one are slower or less exact as one kernel.
    passes_on: whether the Function also returns its first input, for what else reads that. Backward
        gets the gradient of it besides, after the gradient of the output, and adds it.
    outputs: the number of outputs. A compiled kernel rounds so many results, each way.
    """

    forward: Function
    backward: Function
    kept: slice
    fused: Function | None = None
    passes_on: bool = False
    outputs: int = 1


def passing_on(pair: Pair) -> Pair:
    """Returns the pair that passes on its first input, as compiled kernels compute it."""
    of_pair = pair.fused or pair.backward

    def backward(grad_output: Tensor, grad_passed: Tensor, *kept: Tensor) -> Tensors:
        grad, *others = of_pair(grad_output, *kept)
        return grad + grad_passed, *others

    return Pair(pair.forward, backward, pair.kept, passes_on=True)


def applied(
    pair: Pair,
    *inputs: Any,
    kernels: Kernels = None,
    unread: Sequence[int] | None = None,
    **constants: Any,
) -> Any:
    """Returns the outputs of the pair's forward; autograd will call its backward.

    kernels: the compiled kernels. None: torch's operators.
    unread: the shape of the one output, if its values are never read, as in a replay. Only the
        graph is built then: no forward runs.
    constants: further arguments of the forward, which are no tensors.
    """
    return _Applied.apply(pair, kernels, unread, constants, *inputs)


class _Applied(torch.autograd.Function):
    """A pair of pure functions."""

    @staticmethod
    def forward(
        ctx: Any, pair: Pair, kernels: Kernels, unread: Any, constants: Any, *inputs: Tensor
    ) -> Any:
        if unread is not None:  # one element, expanded: it takes no memory
            results: Any = inputs[0].new_empty(()).expand(unread)
        else:
            results = run(kernels, pair.forward, *inputs, num_rounded=pair.outputs, **constants)
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        ctx.save_for_backward(*inputs[pair.kept], *results[pair.outputs :])
        backward = pair.backward if kernels is None else pair.fused or pair.backward
        ctx.backward_function = partial(run, kernels, backward, num_rounded=pair.outputs)
        ctx.num_inputs = len(inputs)
        outputs = *results[: pair.outputs], *inputs[: pair.passes_on]
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grads = ctx.backward_function(*grad_outputs, *ctx.saved_tensors)
        grads = (grads,) if isinstance(grads, Tensor) else grads  # a graph's are a list
        return None, None, None, None, *grads, *[None] * (ctx.num_inputs - len(grads))


def run(
    kernels: Kernels, function: Function, *tensors: Tensor, num_rounded: int = 1, **constants: Any
) -> Any:
    """Returns `function(*tensors, **constants)`, from a compiled kernel if there are kernels.

    num_rounded: how many of the results have the dtype of the first tensor. Others, such as
        statistics and the gradients of vectors, stay in the float32 of a compiled kernel.
    """
    if kernels is None:
        return function(*tensors, **constants)
    return kernels(_in_float32(function, num_rounded), *tensors, **constants)


@cache  # the function is a part of the key of a compiled graph
def _in_float32(function: Function, num_rounded: int) -> Function:
    """Returns the function with its arithmetic in float32 (float64), see `run`."""

    def wide(*tensors: Tensor, **constants: Any) -> Any:
        operands = (
            one.to(at_least_float32(one.dtype)) if one.is_floating_point() else one
            for one in tensors
        )
        results = function(*operands, **constants)
        if isinstance(results, Tensor):
            return results.to(tensors[0].dtype).contiguous()
        rounded = (one.to(tensors[0].dtype).contiguous() for one in results[:num_rounded])
        return (*rounded, *results[num_rounded:])

    return wide
