"""The bytes of every tensor storage that a block creates and that is still alive.

It checks meter.py, which sees only what autograd saves: here a storage counts for any reason that
keeps it alive. Weak references follow the storages, so that counting keeps nothing alive. A storage
counts with its own size, without the allocator's rounding. Three kinds do not count: workspaces
that live only within one operator, storages that existed before the block, and storages that no
operator of torch creates. The state of a generator is of the last kind until it is copied.

The sum is kept up to date: each operator adds the storages that it creates, and a storage that dies
is subtracted. An operator therefore costs the same time however many storages are alive.

The first operator under a dispatch mode costs seconds of imports, once per process. The class is
meant for tests, pictures, dry runs and cross-checks.

`allocator_peak` has the most bytes that torch's CPU allocator has given out at once during a block.
It has every tensor, with the allocator's rounding, also the copies inside gloo's collectives. It
does not have memory that a library allocates by itself. Memory that a thread of gloo frees counts
until it is used again, so the figure can be too high with several ranks on CPUs. The first use in a
process takes about a second.
"""

import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parallel.torch_internals import TorchDispatchMode, address_of, tree_leaves


class LiveStorage(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, and its facts.

    address: the address of the storage.
    num_bytes: its size when it was last read.
    category: see LiveStorages.
    """

    address: int
    num_bytes: int
    category: str


class LiveStorages(TorchDispatchMode):
    """Follows storages within `with`.

    peak_bytes: the most bytes alive right after an operator.
    bytes_by_category: the live bytes by the category of their storages. A subclass gives the
        categories; here it is "". `total_bytes` brings the figures up to date.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.bytes_by_category = Counter[str]()
        self._live: dict[weakref.ref[torch.UntypedStorage], LiveStorage] = {}
        # A storage may die in another thread (gloo's), so the sum is not changed there.
        self._died = deque[LiveStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {weakref.ref(storage) for storage in _storages((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for storage in _storages(results):
            if weakref.ref(storage) not in given:
                self._add(storage)
        # The operator, or code before it, may have resized the storages that it reads or writes.
        for one in given & self._live.keys():
            self._read(self._live[one])
        self.after(func)
        return results

    def after(self, func: Any) -> None:
        """Runs after every operator."""
        if self.sum_is_above(self.peak_bytes):
            self.peak_bytes = max(self.peak_bytes, self.total_bytes())

    def category(self) -> str:
        """Returns the category of a storage that is created now."""
        return ""

    def sum_is_above(self, num_bytes: int) -> bool:
        """Returns whether the sum of the sizes, as they were last read, is above `num_bytes`.

        The sum can only be too high. A storage that is resized outside of an operator (FSDP2
        does so) counts with its old size until an operator uses it; FSDP2 frees a storage in
        this way, and an operator fills it soon after it has memory again.
        """
        self._forget_dead()
        return self._total > num_bytes

    @property
    def _total(self) -> int:
        return self.bytes_by_category.total()

    def storages(self) -> dict[int, int]:
        """Returns the bytes of every live storage, by its address.

        It reads the sizes anew each time, because storages can be resized.
        """
        self._forget_dead()
        for storage in list(self._live.values()):
            self._read(storage)
        return {storage.address: storage.num_bytes for storage in self._live.values()}

    def total_bytes(self) -> int:
        """Returns the bytes that are alive now."""
        self.storages()
        return self._total

    def find(self, storage: torch.UntypedStorage) -> LiveStorage | None:
        """Returns what is known of a storage, or None if no operator in the block created it."""
        return self._live.get(weakref.ref(storage))

    def bytes_beside(self, known: Set[int]) -> int:
        """Returns the bytes of live storages at other addresses than the known ones.

        A backend's thread may free a collective's tensors a little late. The call therefore waits
        for up to one second until nothing is left.
        """
        for _ in range(100):
            beside = sum(size for address, size in self.storages().items() if address not in known)
            if beside == 0:
                break
            time.sleep(0.01)
        return beside

    def _add(self, storage: torch.UntypedStorage) -> None:
        if known := self.find(storage):
            self._read(known)
            return
        new = LiveStorage(storage, self._died.append)
        new.address, new.num_bytes = address_of(storage), storage.nbytes()
        new.category = self.category()
        self._live[new] = new
        self.bytes_by_category[new.category] += new.num_bytes

    def _read(self, known: LiveStorage) -> None:
        storage = known()
        if storage is not None and (growth := storage.nbytes() - known.num_bytes):
            known.num_bytes += growth
            self.bytes_by_category[known.category] += growth

    def _forget_dead(self) -> None:
        while self._died:
            dead = self._died.popleft()
            del self._live[dead]
            self.bytes_by_category[dead.category] -= dead.num_bytes


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf.untyped_storage()
        elif isinstance(leaf, torch.UntypedStorage):  # an argument of Tensor.set_
            yield leaf


# Texts in torch's RuntimeError. numpy raises MemoryError, and CUDA usually an OutOfMemoryError.
WORDS = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "Storage size calculation overflowed",
    "integer multiplication overflow",
    "out of memory",  # of CUDA; of its pinned memory in other words
    "CUBLAS_STATUS_ALLOC_FAILED",
)
MARK = "megatron_lite: mark of allocated bytes"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that an allocation failed."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


class AllocatorPeak:
    """The result of `allocator_peak`, which is known once the block has ended.

    peak_bytes: the most bytes that the block had allocated at once. Freeing memory that is older
        than the block counts 0.
    marks: the bytes at each call of `mark`, and the most bytes since the call before.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.marks: list[tuple[int, int]] = []

    def mark(self) -> None:
        """Marks this moment of the block."""
        from torch.profiler import record_function

        with record_function(MARK):
            pass


@contextmanager
def allocator_peak() -> Iterator[AllocatorPeak]:
    """Yields the peak of the block."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints when it starts and stops
    from torch.profiler import ProfilerActivity, profile

    found = AllocatorPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield found
    # (time, address, bytes); a mark has no bytes
    events = []
    pending = list(profiled.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if type(event.extra_fields).__name__.endswith("Allocation"):
            events.append(
                (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
            )
        elif event.name == MARK:
            events.append((event.start_time_ns, 0, 0))
    # The profiler keeps events as a tree of calls. In the order of time a negative size is a free.
    alive: dict[int, int] = {}
    total = highest = 0
    for _, address, size in sorted(events, key=lambda event: event[0]):
        if size > 0:
            # The profiler does not see what a thread of gloo frees. Its memory is used again.
            total += size - alive.get(address, 0)
            alive[address] = size
        elif size < 0:
            total -= alive.pop(address, 0)
        else:
            found.marks.append((total, highest))
            highest = total
        highest = max(highest, total)
        found.peak_bytes = max(found.peak_bytes, total)
