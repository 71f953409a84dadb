"""Keeps which experts a router chose, for the replays of its layer: `+router` in a policy.

A router that draws noise, or whose kernel breaks ties in any order, may choose otherwise in a
replay. Its gradients would then be those of other experts. So a replay takes the indices of the
forward's top-k calls. The values for these indices are rebuilt, and the graph is that of a top-k
call, so that the router gets its gradient.

The indices of one layer are k numbers of 8 bytes for each token. A layer has a router if its first
forward calls `torch.topk` or `Tensor.topk`; a layer that calls neither pays nothing afterwards.
A call inside a compiled function is not seen.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_lite.parallel.torch_internals import TorchDispatchMode, disable_current_modes

from .saved import Handle, Kwargs, saved_value

TOP_K = frozenset({torch.topk, Tensor.topk})
Run = Callable[..., Any]  # in place of the operator: takes it, and its arguments


class KeptChoices:
    """The indices that the top-k calls of one forward returned, in the order of the calls."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._saved: list[Handle] = []

    def keeping(self) -> AbstractContextManager[Any]:
        """Keeps copies of the indices inside the block."""

        def keep(operator: Any, *args: Any, **kwargs: Any) -> Any:
            values, indices = operator(*args, **kwargs)
            self._kept.append(indices.clone())
            return values, indices

        return _Calls(keep)

    def save(self) -> bool:
        """Passes the indices to the saved-tensor hooks in force. Call it after the forward.

        Returns whether there are any.
        """
        self._saved, self._kept = [*map(saved_value, self._kept)], []
        return bool(self._saved)

    def reusing(self) -> AbstractContextManager[Any]:
        """Makes the calls of a replay inside the block choose as those of the forward."""
        kept = iter([*(each() for each in self._saved), *self._kept])

        def reuse(operator: Any, scores: Tensor, k: int, dim: int = -1, *args: Any) -> Any:
            indices = next(kept, None)
            if indices is None:  # more calls than in the forward, which is an error later
                return operator(scores, k, dim, *args)
            with disable_current_modes():  # a mode that numbers operators must not see the gather
                return scores.gather(dim, indices), indices.clone()

        return _Calls(reuse)


class _Mode:
    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run


class _Calls(_Mode, TorchFunctionMode):
    """Passes the top-k operator to `run`, under the autograd of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func not in TOP_K or torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        with _Operator(self._run):
            return func(*args, **(kwargs or {}))


class _Operator(_Mode, TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func is torch.ops.aten.topk.default:
            return self._run(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
