"""Streams and events of a device that does nothing: they check that its work is in order.

Each stream counts its operations, and knows how far each other stream had come when it last waited
for it. Two operations on the same memory, of which one writes, must be in order: the stream of the
later one has waited for the earlier one. Memory may be freed if the main stream, to which the
allocator gives it next, has waited for every use of it, or if `record_stream` was called.

A collective that was started runs on a stream of its own. It begins after the work that was issued
before it, and `wait` makes the current stream wait for it.
"""

import sys
import weakref
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel import collectives
from tests.support.storages import address

LIBRARY = str(Path(collectives.__file__).parents[1])


class Stream:
    """Stands in for torch.cuda.Stream.

    done: by stream, the number of its operations that come before the next one of this stream.
    """

    def __init__(self, *_, **__):
        self.done = Counter()

    def wait_stream(self, other):
        self._join(other.done)

    def wait_event(self, event):
        self._join(event.done)
        event.is_awaited = True

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def _join(self, done):
        for stream, count in done.items():
            self.done[stream] = max(self.done[stream], count)


class Event:
    """Stands in for torch.cuda.Event."""

    device = None

    def __init__(self, *_, **__):
        self.done = Counter()
        self.is_awaited = False

    def record(self, stream):
        self.done = stream.done.copy()

    def wait(self, stream):
        stream.wait_event(self)

    def synchronize(self):
        """The host's own operations count as those of the main stream."""
        MAIN.wait_event(self)


MAIN = Stream()


class Memory:
    """The uses of one storage: by stream, the number of the last operation of each kind."""

    def __init__(self, storage, died):
        self.storage = weakref.ref(storage, died)
        self.is_on_host = storage.device.type == "cpu"
        self.reads = {}
        self.writes = {}
        self.recorded = set()


class Work:
    """Stands in for a collective under way. It holds its tensors until something waits for it."""

    def __init__(self, streams, stream, tensors):
        self._streams, self._stream, self._tensors = streams, stream, tensors
        self._started_at = place()
        streams.under_way[id(self)] = self._started_at
        self._is_awaited = False

    def wait(self, *_):
        self._streams.current.wait_stream(self._stream)
        self._streams.under_way.pop(id(self), None)
        self._tensors, self._is_awaited = (), True
        return True

    def is_completed(self):
        return self._is_awaited

    def __del__(self):
        if not self._is_awaited:
            self._streams.faults[f"nothing waits for a collective of {self._started_at}"] += 1


class Streams:
    """All streams of the device. faults: what was out of order, with its line, and how often."""

    def __init__(self):
        self.current = MAIN
        self.faults = Counter()
        self.under_way = {}  # started collectives, by the line that started them
        self._memory = {}
        MAIN.done.clear()

    @classmethod
    @contextmanager
    def in_place_of_cuda(cls, patch):
        """Puts the streams in the place of torch's, and stand-ins in that of collectives."""
        streams = cls()
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "current_stream": lambda *_: streams.current,
            "stream": streams.entered,
            "synchronize": lambda *_: streams.fault("the host waits for the device"),
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(Tensor, "record_stream", streams.record)
        for owner, name in (
            (dist, "all_reduce"),
            (collectives, "_all_gather"),
            (collectives, "_reduce_scatter"),
        ):
            patch.setattr(owner, name, streams.started(getattr(owner, name)))
        for name in ("isend", "irecv"):
            start = streams.started(getattr(dist, name), always=True)
            patch.setattr(dist, name, start)
            patch.setattr(dist.distributed_c10d, name, start)  # P2POp looks here
        patch.setattr(dist, "batch_isend_irecv", streams.batch)
        yield streams

    @contextmanager
    def entered(self, stream):
        """Stands in for torch.cuda.stream."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def use(self, *, reads, writes, stream):
        """Notes an operation of `stream`."""
        stream.done[stream] += 1
        now = stream.done[stream]
        writes_of = {id(self._of(tensor)) for tensor in writes}
        for memory in {id(one): one for one in map(self._of, (*reads, *writes))}.values():
            is_written = id(memory) in writes_of
            earlier = [memory.writes, memory.reads] if is_written else [memory.writes]
            for uses in earlier:
                for other, number in uses.items():
                    if stream.done[other] < number:
                        self.fault("two streams use the same memory in no order")
            (memory.writes if is_written else memory.reads)[stream] = now

    def record(self, tensor, stream):
        """Stands in for Tensor.record_stream."""
        self._of(tensor).recorded.add(stream)

    def started(self, function, *, always=False):
        """Returns a stand-in of a function of torch.distributed that may start a collective.

        always: whether it does so without `async_op`.
        """

        name = getattr(function, "__name__", "partial")

        def start(*tensors, async_op=False, **options):
            own = [one for one in tensors if isinstance(one, Tensor)]
            stream = Stream()
            stream.wait_stream(self.current)
            self.use(reads=own, writes=own[:1] if name != "isend" else (), stream=stream)
            work = Work(self, stream, own)
            if async_op or always:
                return work
            work.wait()
            return None

        start.__name__ = name
        return start

    def batch(self, operations):
        """Stands in for dist.batch_isend_irecv."""
        return [operation.op(operation.tensor) for operation in operations]

    def finish(self):
        """Notes the collectives for which nothing has waited."""
        for line in self.under_way.values():
            self.faults[f"nothing has waited for a collective of {line}"] += 1

    def fault(self, text):
        self.faults[f"{text}: {place()}"] += 1

    def _of(self, tensor):
        """Returns the memory of a tensor: its storage, or on the host its slot of an arena."""
        storage = tensor.untyped_storage()
        slot = tensor.storage_offset() * tensor.itemsize if storage.device.type == "cpu" else 0
        key = address(storage), slot
        memory = self._memory.get(key)
        if memory is None or memory.storage() is not storage:
            memory = Memory(storage, lambda _: self._died(memory, key))
            self._memory[key] = memory
        return memory

    def _died(self, memory, key):
        assert memory is not None
        if self._memory.get(key) is memory:
            del self._memory[key]
        if memory.is_on_host:  # the allocator of pinned memory waits for its events
            return
        for uses in (memory.writes, memory.reads):
            for stream, number in uses.items():
                if MAIN.done[stream] < number and stream not in memory.recorded:
                    self.faults["memory is freed while a stream may still use it"] += 1


def place():
    """Returns the innermost line of the library that is running, as `file:line`."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(LIBRARY):
        frame = frame.f_back
    if frame is None:
        return "backward"
    return f"{Path(frame.f_code.co_filename).relative_to(LIBRARY)}:{frame.f_lineno}"
