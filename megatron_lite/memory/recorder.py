"""Records the memory timeline of one forward and backward: a dispatch mode sees every operator, hooks see what is saved.

A backward operator belongs to the module that saved the tensor which backward read last. An operator that finds modules running
during backward is part of a replay, whoever recomputes. Saved-tensor hooks that hide these (torch.utils.checkpoint's do) make
what is saved inside them look temporary.

While it is watched, torch adds up gradients out of place: at such points one more temporary is alive than otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.memory.live_storages import LiveStorages
from megatron_lite.memory.meter import KeptForBackward, SavedTensor, running_modules
from megatron_lite.memory.timeline import (
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
from megatron_lite.recompute.phase import is_recomputing


def record_timeline(model: nn.Module, loss_fn: Callable[[], Tensor], *, name: str) -> Timeline:
    """The timeline, called `name`, of `loss_fn().backward()`, a scalar loss of `model`.

    The gradients are accumulated as always, and are the same bits. Issues no collective of its own: some ranks may record
    while others run plainly. Several times slower than a plain run.
    """
    with running_modules(model) as running:
        recorder = _Recorder(model, running)
        with torch.autograd.graph.saved_tensors_hooks(recorder.kept.pack, recorder.unpack), recorder:
            loss = loss_fn()
            recorder.in_backward = True
            loss.backward()
        del loss
        recorder.note("")
    return Timeline(name=name, events=tuple(recorder.events))


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

    def unpack(self, saved: SavedTensor[_Place]) -> Tensor:
        """The unpack hook: what is read tells where backward is."""
        self._last_read = saved.label.module
        return self.kept.unpack(saved)

    def after(self, func: Any) -> None:
        """Notes the state, but for the detach of a saved tensor, which is ours."""
        if func is not torch.ops.aten.detach.default:
            self.note(str(func).removesuffix(".default"))

    def note(self, operator: str) -> None:
        """Adds an event, where something differs from the one before."""
        place, live_bytes = self._place(), self._live_bytes()
        last = self.events[-1] if self.events else None
        if last is None or (last.phase, last.module, last.live_bytes) != (*place, live_bytes):
            self.events.append(Event(self._num_operators, *place, operator, live_bytes))
        self._num_operators += 1

    def _place(self) -> _Place:
        module = self._running[-1] if self._running else self._last_read
        if not self.in_backward:
            return _Place(FORWARD, module)
        return _Place(REPLAY if self._running or is_recomputing() else BACKWARD, module)

    def _live_bytes(self) -> tuple[int, ...]:
        kept = self.kept.storages()
        gradients = {parameter.grad.untyped_storage()._cdata for parameter in self._parameters if parameter.grad is not None}
        totals = dict.fromkeys(CATEGORIES, 0)
        for address, num_bytes in self.storages().items():
            if address in kept:
                category = ACTIVATION if kept[address].label.phase == FORWARD else REBUILT
            else:
                category = GRADIENT if address in gradients else TEMPORARY
            totals[category] += num_bytes
        return tuple(totals.values())
