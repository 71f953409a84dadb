"""Compiles pure functions of tensors with torch's compiler (inductor), one graph for each shape.

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
from functools import partial
from pathlib import Path
from typing import Any

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

    @property
    def num_graphs(self) -> int:
        """The number of graphs that were compiled so far."""
        return len(self._graphs)


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
