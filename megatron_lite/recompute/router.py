"""Keeps which experts a router chose, for the replays of its layer: `+router` in a policy.

A router that draws noise, or whose kernel breaks ties in any order, may choose otherwise in a
replay. Its gradients would then be those of other experts. So a replay takes the indices of the
forward's top-k calls. The values for these indices are rebuilt, and the graph is that of a top-k
call, so that the router gets its gradient.

The indices of one layer are k numbers of 8 bytes for each token. A layer has a router if its first
forward calls `torch.topk` or `Tensor.topk`; a layer that calls neither pays nothing afterwards.
A call inside a compiled function is not seen.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_lite.parallel.torch_internals import TorchDispatchMode, disable_current_modes

from .contents import unobserved
from .saved import Handle, Kwargs, saved_value

TOP_K = frozenset({torch.topk, Tensor.topk})


class KeptChoices:
    """The indices that the top-k calls of one forward returned, in the order of the calls."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._saved: list[Handle] = []

    def keeping(self) -> AbstractContextManager[Any]:
        """Keeps copies of the indices inside the block."""

        # A layer inside one that is replayed keeps what that replay chose: `call` includes it.
        def keep(call: Callable[[], Any]) -> Any:
            found = call()
            with unobserved():
                self._kept.append(found[1].clone())
            return found

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

        def reuse(call: Callable[[], Any]) -> Any:
            with _Operator(kept):
                return call()

        return _Calls(reuse)


class _Calls(TorchFunctionMode):
    """Passes the calls of top-k to `run`."""

    def __init__(self, run: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Kwargs | None = None
    ) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        return call() if torch.compiler.is_compiling() or func not in TOP_K else self._run(call)


class _Operator(TorchDispatchMode):
    """Gives the operator of a top-k call its next indices, under the autograd of torch."""

    def __init__(self, indices: Iterator[Tensor]) -> None:
        super().__init__()
        self._indices = indices

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Kwargs | None = None
    ) -> Any:
        indices = next(self._indices, None) if func is torch.ops.aten.topk.default else None
        if indices is None:  # also if there are more calls than in the forward, an error later
            return func(*args, **(kwargs or {}))
        with disable_current_modes():  # a mode that numbers operators must not see the gather
            return args[0].gather(args[2] if len(args) > 2 else -1, indices), indices.clone()
