"""How the model hands its parts to the plan: it names a region and runs it through here, and knows nothing of recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.checkpoint import checkpoint
from megatron_lite.recompute.discard import Lending
from megatron_lite.recompute.ops import KeptResults
from megatron_lite.recompute.plan import ACTIVATION, LAYERNORM
from megatron_lite.recompute.verify import Record

LENT_REGIONS = frozenset({LAYERNORM, ACTIVATION})


@dataclass(frozen=True)
class Redraw:
    """Makes a tensor of random numbers a second time. draw: makes it from the numbers that the current stream gives next."""

    rng: RngStreams
    draw: Callable[[], Tensor]
    record: Record | None

    def made(self, tensor: Tensor) -> Tensor:
        """The tensor, of which a run that is being verified takes note."""
        return tensor if self.record is None else self.record.watch(lambda: tensor)()

    def again(self, state: Tensor) -> Tensor:
        """The tensor that came of the numbers after `state`. No stream notices."""
        with self.rng.drawn_from(state):
            return self.made(self.draw())


@dataclass(frozen=True, kw_only=True)
class Regions:
    """The regions of one layer that are rebuilt in backward. An argument of a layer's forward, so that a replay inside a unit, or
    another micro-batch, may have others.

    output_unread: nobody will read the values of the layer's output; only its graph is needed (a replay of a unit's last layer).
    record: where a unit that is being verified notes what its regions return. results: those of operators that are kept.
    """

    rebuilt: frozenset[str]
    rng: RngStreams
    layer: int
    skip_tail: bool
    verify: bool
    output_unread: bool = False
    record: Record | None = None
    results: KeptResults | None = None
    lending: Lending = field(default_factory=Lending)

    def run(self, name: str, function: Callable[..., Any], *args: Any, unread: bool = False) -> Any:
        """`function(*args, unread)`; if the region is rebuilt, only its arguments are kept.

        unread: nobody will read the values of what it returns, so that it may leave out what only they need.
        """
        if name not in self.rebuilt:
            return self.noted(name, function(*args, unread))
        # Nobody reads what a replay returns: what follows the region has kept what it needs.
        forward, replay = _with_last(function, unread), _with_last(function, self.skip_tail) if self.skip_tail else None
        return checkpoint(self._verified(name, forward, self.rng), *args, rng=self.rng, replay=replay)

    def lend(self, name: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """`function(*args)`, which draws no random numbers; if the region is rebuilt, `args` are kept in place of the result."""
        if name not in self.rebuilt:
            return self.noted(name, function(*args))
        output = checkpoint(self._verified(name, function, None), *args, rng=None)
        if output.grad_fn is not None:
            self.lending.lend(output)
        return output

    def redraw(self, name: str, draw: Callable[[], Tensor]) -> Redraw | None:
        """For a tensor of random numbers: how to make it again in backward from the stream's state; None if it is to be kept."""
        if name not in self.rebuilt:
            return None
        return Redraw(self.rng, draw, Record(f"layer {self.layer}, {name}", None) if self.verify else None)

    def enter_tail(self) -> None:
        """Called before the layer's last matmul: from there on a replay leaves out what only the output needs."""
        if self.results is not None:
            self.results.enter_tail()

    def noted(self, name: str, output: Any) -> Any:
        """`output`, which a unit that is being verified compares with the forward's."""
        if self.record is not None:
            self.record.see(f"layer {self.layer}, {name}", output)
        return output

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Around the layer's forward."""
        if self.rebuilt & LENT_REGIONS:
            with self.lending.hooks():
                yield
        else:
            yield

    def _verified(self, name: str, function: Callable[..., Any], rng: RngStreams | None) -> Callable[..., Any]:
        return Record(f"layer {self.layer}, {name}", rng).watch(function) if self.verify else function


def _with_last(function: Callable[..., Any], last: Any) -> Callable[..., Any]:
    return partial(_append, function, last)


def _append(function: Callable[..., Any], last: Any, *args: Any) -> Any:
    return function(*args, last)
