"""Records the memory timeline of one forward and backward.

A dispatch mode sees every operator, and saved-tensor hooks see every saved tensor. A backward
operator belongs to the module that saved the tensor which backward read last. An operator during
backward that runs inside a module's forward is part of a replay, by any engine. Other saved-tensor
hooks on top, such as those of torch.utils.checkpoint, hide saved tensors. The timeline then shows
these as temporaries.

Under the dispatch mode torch adds up gradients out of place, so at such points one more temporary
is alive than in a plain run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.parallel.weights import storages_of
from megatron_lite.recompute.phase import is_recomputing

from .live_storages import LiveStorages
from .meter import KeptForBackward, SavedTensor, running_modules
from .timeline import (
    ACTIVATION,
    BACKWARD,
    CATEGORIES,
    FORWARD,
    GRADIENT,
    REBUILT,
    REPLAY,
    TEMPORARY,
    Event,
    Timeline,
)


def record_timeline(
    model: nn.Module, loss_fn: Callable[[], Tensor], *, name: str
) -> tuple[Timeline, Tensor]:
    """Returns the timeline of `loss_fn().backward()`, and the loss without its graph. name: the
    name of the timeline.

    loss_fn: returns a scalar loss of `model`.
    The gradients are accumulated as always, and are the same bits. The recording issues no
    collective, so some ranks may record while others run plainly. It is several times slower than a
    plain run.
    """
    with running_modules(model) as running:
        recorder = _Recorder(model, running)
        with (
            torch.autograd.graph.saved_tensors_hooks(recorder.kept.pack, recorder.unpack),
            recorder,
        ):
            loss = loss_fn()
            result = loss.detach()
            recorder.in_backward = True
            loss.backward()
        del loss
        recorder.note("")
    return Timeline(name=name, events=tuple(recorder.events)), result


class _Place(NamedTuple):
    phase: str
    module: str


class _Recorder(LiveStorages):
    def __init__(self, model: nn.Module, running: list[str]) -> None:
        super().__init__()
        self.kept = KeptForBackward((), self._place)
        self.events: list[Event] = []
        self.in_backward = False
        self._parameters = tuple(model.parameters())
        self._running = running
        self._last_read = ""
        self._num_operators = 0
        self._last: tuple[_Place, tuple[int, ...]] | None = None

    def unpack(self, saved: SavedTensor) -> Tensor:
        """The unpack hook. The label of the tensor shows which module backward is in."""
        self._last_read = saved.label.module
        return saved.tensor()

    def after(self, func: Any) -> None:
        """Notes the state after every operator, except the detach with which we save a tensor."""
        if func is not torch.ops.aten.detach.default:
            self.note(str(func).removesuffix(".default"))

    def note(self, operator: str) -> None:
        """Adds an event if the place or the live bytes differ from the last event."""
        # Each live storage counts in one category: saved by the forward, saved by a replay, a
        # parameter's gradient, or temporary.
        kept = self.kept.storages()
        gradients = storages_of(parameter.grad for parameter in self._parameters)
        totals = dict.fromkeys(CATEGORIES, 0)
        for address, num_bytes in self.storages().items():
            if address in kept:
                category = ACTIVATION if kept[address].label.phase == FORWARD else REBUILT
            else:
                category = GRADIENT if address in gradients else TEMPORARY
            totals[category] += num_bytes
        now = self._place(), tuple(totals.values())
        if now != self._last:
            self.events.append(Event(self._num_operators, *now[0], operator, now[1]))
            self._last = now
        self._num_operators += 1

    def _place(self) -> _Place:
        module = self._running[-1] if self._running else self._last_read
        if not self.in_backward:
            return _Place(FORWARD, module)
        return _Place(REPLAY if self._running or is_recomputing() else BACKWARD, module)
