"""The host memory for the kept tensors of one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_lite.parallel.torch_internals import tree_leaves
from megatron_lite.parallel.weights import weights_in_use
from megatron_lite.recompute.pool import Pool
from megatron_lite.recompute.recompute_plan import Segment

if TYPE_CHECKING:
    from megatron_lite.recompute.offload import CopyStreams, Offload

Opened = Callable[[Segment, Iterable[Any]], AbstractContextManager[None]]


class Stores:
    """The host memory that the layers of a stage use again in every forward.

    Nothing is allocated before the first forward.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = Pool(pinned=device.type == "cuda")

    def __deepcopy__(self, memo: dict[int, Any]) -> Stores:
        return Stores(self.device)

    @contextmanager
    def forward(self) -> Iterator[Opened]:
        """Prepares the memory for one forward of a plan that uses it (`on_host`), with gradients.

        Call it around all segments of the plan.

        It yields a function `opened(segment, shared)`, whose result goes around each segment.
        `shared` lists objects whose tensors are not moved: the segment's layers with their
        parameters, and the further arguments of the layers.
        """
        from megatron_lite.recompute.offload import Offload

        offload = Offload(self.copy_streams, kind=self.device.type)

        def opened(segment: Segment, shared: Iterable[Any]) -> AbstractContextManager[None]:
            if segment.host_modules:
                return _parts(offload, self.pool, segment.host_modules, shared)
            if segment.on_host:
                return offload.segment(self.pool, stay=_tensors(shared))
            return nullcontext()

        try:
            yield opened
        finally:
            offload.finish()

    @cached_property
    def copy_streams(self) -> CopyStreams:
        """The object that copies between device and host."""
        from megatron_lite.recompute.offload import CopyStreams, CudaCopyStreams

        return CudaCopyStreams(self.device) if self.device.type == "cuda" else CopyStreams()


@contextmanager
def _parts(
    offload: Offload, pool: Pool, modules: frozenset[str], shared: Iterable[Any]
) -> Iterator[None]:
    """Offloads what these modules of the segment's layers save first.

    The hooks that tell which module runs are registered for the block alone.
    """
    from megatron_lite.recompute.running import running_modules

    layers, *_ = shared
    # Only the innermost running module counts: the parts name modules, and not their children.
    with ExitStack() as stack:
        running = [stack.enter_context(running_modules(layer)) for layer in layers]

        def wanted() -> bool:
            return any(names[-1] in modules for names in running if names)

        stack.enter_context(offload.segment(pool, stay=_tensors(shared), wanted=wanted))
        yield


def _tensors(shared: Iterable[Any]) -> Iterator[Tensor]:
    for value in tree_leaves(shared):
        if isinstance(value, nn.Module):
            yield from weights_in_use(value)
        elif isinstance(value, Tensor):
            yield value
