"""A GPU that does its work late, on a CPU: what a host reads too early is 0, or a fault.

The operators of a run compute at once, but the device of this stand-in is behind: it has done what
the host has launched only up to the last event for which the host has waited. A copy to pinned
memory is one of those things. The clock of the device goes on by N ms in step N, and by 1000 ms
for each batch of an evaluation.
"""

import torch
from torch import Tensor

from megatron_lite.training import evaluate, loop
from megatron_lite.training.step import StepEnd
from tests.support.mutants import replaces

NOT_DONE = 0.0


class LateDevice:
    """The state of the device. launched: the steps so far. faults: what a GPU would have punished.

    waited_for: for each wait of the host the steps that it waited for, and those launched by then.
    """

    def __init__(self, patch):
        self.launched, self.milliseconds = 0, 0.0
        self.waited_for = []
        self.faults = []
        self._copies = []  # to pinned memory, not done yet
        self._pinned = set()
        self._is_finishing = False
        self._copy, self._empty = Tensor.copy_, torch.empty
        patch.setattr(StepEnd, "ON_TIME", ())
        patch.setattr(torch.cuda, "Event", lambda **_: Event(self))
        patch.setattr(torch.cuda, "synchronize", lambda *_: self.faults.append("synchronize"))
        patch.setattr(torch, "empty", self._allocated)
        patch.setattr(Tensor, "copy_", self._copied(Tensor.copy_))
        for name in ("item", "tolist", "__float__", "__bool__"):
            patch.setattr(Tensor, name, self._read(getattr(Tensor, name)))
        self._note_steps(patch)

    def come_to(self, copies, steps):
        """Does the first `copies` copies. The host waits for that, and for this many steps."""
        self.waited_for.append((steps, self.launched))
        for target, source in self._copies[:copies]:
            self._copy(target, source)

    @property
    def copies(self):
        return len(self._copies)

    def _allocated(self, *sizes, pin_memory=False, **options):
        made = self._empty(*sizes, **options)
        if pin_memory:
            made.fill_(NOT_DONE)
            self._pinned.add(id(made))
        return made

    def _copied(self, copy):
        def copied(target, source, non_blocking=False):
            if id(target) not in self._pinned:
                return copy(target, source, non_blocking)
            assert non_blocking, "a copy to the host that waits for the device"
            self._copies.append((target, source.clone()))
            return target

        return copied

    def _read(self, read):
        def value(tensor):
            if self._is_finishing and id(tensor) not in self._pinned:
                self.faults.append("a figure is read on the device")
            return read(tensor)

        return value

    def _note_steps(self, patch):
        @replaces("train_step", loop)
        def launching(step, *args, **options):
            self.launched += 1
            self.milliseconds += self.launched
            return step(*args, **options)

        @replaces("mean_loss", evaluate)
        def evaluating(mean_loss, *args, **options):
            self.milliseconds += 1000.0
            return mean_loss(*args, **options)

        @replaces("_step", loop.Trainer)
        def finishing(step, *args):
            running = step(*args)
            yield next(running)
            self._is_finishing = True
            next(running, None)
            self._is_finishing = False

        for each in (launching, evaluating, finishing):
            each(patch)


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, device):
        self._device = device

    def record(self):
        device = self._device
        self.at, self._copies, self._steps = device.milliseconds, device.copies, device.launched

    def synchronize(self):
        self._device.come_to(self._copies, self._steps)

    def elapsed_time(self, later):
        return later.at - self.at
