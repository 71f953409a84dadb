"""Runs pure functions of tensors: by torch's operators one by one, or compiled.

A norm, an activation or a rotation is a pair of pure functions, its forward and its backward. One
autograd Function calls the pair. It decides what is kept for backward, so a compiled run keeps the
same tensors. Eager operators compute in the dtype of their operands. A compiled kernel computes in
float32 (float64) and rounds its results once.

torch's compiler (inductor) makes one graph for each shape.

The functions are the chains of pointwise operations and row sums between two matmuls. The autograd
Functions that call them stay ours, so backward keeps the same tensors as without the compiler, and
a replay runs the same machine code as the forward.

torch.compile itself would look at the guards of a frame in every call (23 us, against 6 us here),
and it stops after 8 shapes of one function. Here the shapes are the key of a dictionary. Inductor
keeps the machine code on disk (TORCHINDUCTOR_CACHE_DIR), so a second start reads it.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.checks import InputError
from megatron_lite.parallel.torch_internals import (
    disable_current_modes,
    inductor_compile,
    is_fake,
    num_dispatch_modes,
    tree_map,
)

# a pure function of tensors and numbers that draws no random numbers; or one that writes to its
# first argument and returns None
Function = Callable[..., Any]


class CompiledKernels:
    """The compiled graphs of one rank.

    Raises InputError if inductor cannot build kernels for this kind of device.
    """

    def __init__(self, device: torch.device) -> None:
        reason = missing_compiler() if device.type == "cpu" else None
        if reason is not None:
            raise InputError(f"--torch-compile {reason}, or leave --torch-compile out")
        self._graphs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, function: Function, *tensors: Tensor, **constants: Any) -> Any:
        """Returns `function(*tensors, **constants)`, from one compiled graph.

        tensors: contiguous or not; another shape, stride or dtype is another graph.
        The first call of a graph compiles it, for about a second, or reads it from the disk.
        A dry run's tensors have no values; they take the function as it is.
        Issues no collective, and records nothing for autograd.
        """
        key = (
            function,
            torch.get_num_threads(),  # inductor writes it into the code of a kernel for a CPU
            *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors),
            *constants.items(),
        )
        graph = self._graphs.get(key)
        if graph is None:
            if is_fake(tensors[0]):
                return function(*tensors, **constants)
            graph = self._graphs[key] = _compiled(partial(function, **constants), tensors)
        results = graph(*tensors)
        if num_dispatch_modes() == 0:
            return results
        # A meter of storages sees the results of operators only, so it gets a copy.
        return tree_map(torch.clone, results)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledKernels:
        return self


def missing_compiler() -> str | None:
    """Returns what inductor lacks to build kernels for a CPU, as "needs .."; None: nothing."""
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


def _compiled(function: Function, tensors: tuple[Tensor, ...]) -> Callable[..., Any]:
    from torch.fx.experimental.proxy_tensor import make_fx  # here: the import takes seconds

    compile_graph = inductor_compile()

    # A meter's dispatch mode must not see the tensors of the trace, and the settings of the run
    # (autocast, gradients, hooks on saved tensors) must not change the graph.
    with (
        disable_current_modes(),
        torch.no_grad(),
        torch.autocast(tensors[0].device.type, enabled=False),
    ):
        graph = make_fx(function, tracing_mode="fake")(*tensors)
        compiled: Callable[..., Any] = compile_graph(graph, list(tensors))
    return compiled


class Pair(NamedTuple):
    """A differentiable function as two pure functions.

    forward: (inputs) -> the output, or a tuple of the output and statistics for backward.
    backward: (gradient of the output, kept inputs, statistics) -> the gradient of the first input,
        or a tuple of the gradients of the first inputs.
    kept: which inputs are kept for backward. All statistics are.
    fused: the formula of the backward for compiled kernels, where the operators that are fast one
        by one are slower or less exact as one kernel.
    """

    forward: Function
    backward: Function
    kept: slice
    fused: Function | None = None


def applied(pair: Pair, kernels: CompiledKernels | None, *inputs: Tensor, **constants: Any) -> Any:
    """Returns the output of the pair's forward; autograd will call its backward.

    kernels: the compiled kernels. None: torch's operators.
    constants: further arguments of the forward, which are no tensors.
    """
    return _Applied.apply(pair, kernels, constants, *inputs)


class _Applied(torch.autograd.Function):
    """A pair of pure functions."""

    @staticmethod
    def forward(
        ctx: Any, pair: Pair, kernels: CompiledKernels | None, constants: Any, *inputs: Tensor
    ) -> Tensor:
        results = run(kernels, pair.forward, *inputs, **constants)
        output, *statistics = (results,) if isinstance(results, Tensor) else results
        ctx.save_for_backward(*inputs[pair.kept], *statistics)
        ctx.backward_function = pair.backward
        if kernels is not None and pair.fused is not None:
            ctx.backward_function = pair.fused
        ctx.kernels, ctx.num_inputs = kernels, len(inputs)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = run(ctx.kernels, ctx.backward_function, grad_output, *ctx.saved_tensors)
        grads = (grads,) if isinstance(grads, Tensor) else grads  # a graph's are a list
        return None, None, None, *grads, *[None] * (ctx.num_inputs - len(grads))


def run(
    kernels: CompiledKernels | None, function: Function, *tensors: Tensor, **constants: Any
) -> Any:
    """Returns `function(*tensors, **constants)`, from a compiled kernel if there are kernels."""
    if kernels is None:
        return function(*tensors, **constants)
    return kernels(_in_float32(function), *tensors, **constants)


@cache  # the function is a part of the key of a compiled graph
def _in_float32(function: Function) -> Function:
    """Returns the function with its arithmetic in float32 (float64).

    The first result, and every gradient, has the dtype of the first argument. Statistics stay wide.
    """

    def wide(*tensors: Tensor, **constants: Any) -> Any:
        results = function(*map(_widened, tensors), **constants)
        output, *others = (results,) if isinstance(results, Tensor) else results
        output = output.to(tensors[0].dtype).contiguous()
        return (output, *others) if others else output

    return wide


def _widened(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
