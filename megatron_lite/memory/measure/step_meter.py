"""Measures the memory of one whole optimizer step of a rank, and where in the step the peak is.

    with StepMeter() as meter:
        ...                                       the model and the optimizer are built
        meter.assign(WEIGHTS, model.parameters())
        with meter.step(stages):
            ...                                   forwards, backwards and the update
            meter.part("optimizer")               behind the backwards
    meter.peak

Every storage has a category. A storage that exists before the step has the category that `assign`
gave it. Any other storage has the phase in which it was created. Host memory for offloaded tensors
is a category of its own. Beside a GPU it is other memory, and no part of the peak.

Where two gradients meet, the engine of autograd adds them up in place if it holds the only
reference to the first one. Under any dispatch mode the mode holds references too, and the engine
would allocate the sum. The meter therefore adds in place itself.

`simulated_rank` is one rank of a run of any size, in one process and without any other rank. It
joins torch's "fake" process group: each collective returns at once, and what it should have
received is undefined. Its tensors are fake ones, and its generators have no states. So shapes and
memory are those of a real rank, and values do not exist.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.parallel.launch import Launch
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.parallel.state import ParallelState, parallel_state
from megatron_lite.parallel.torch_internals import (
    FakeTensorMode,
    address_of,
    current_node,
    fake_store,
    fake_work,
    fills_its_memory,
    has_kernel_for,
    num_users_of_storage,
    num_users_of_tensor,
    schema_of,
)
from megatron_lite.recompute.phase import is_allocating_on_host, is_recomputing, running_modules

from .live_storages import LiveStorage, LiveStorages

WEIGHTS, MASTERS, GRADIENTS, OPTIMIZER = "weights", "masters", "gradients", "optimizer"
OTHER, HOST = "other", "host"
FORWARD, REPLAY, BACKWARD, UPDATE = "forward", "replay", "backward", "update"
# The categories besides HOST: those that are held between steps, and by phase those that a step
# creates.
STATES = (WEIGHTS, MASTERS, GRADIENTS, OPTIMIZER)
HELD = (*STATES, OTHER)
PHASES = (FORWARD, REPLAY, BACKWARD, UPDATE)
# The reference counts of a gradient and of its storage, seen from a dispatch mode, if the engine
# holds the only reference.
ONLY_REFERENCE = (4, 2)


class MeasuredMoment(NamedTuple):
    """A moment of a step: right after one operator.

    phase: one of PHASES. module: the module in whose forward, replay or backward it is; "" outside
    of every module. operator: the name that torch gives it, such as "aten.mm".
    """

    phase: str
    module: str
    operator: str


class StepPeakMeasured(NamedTuple):
    """The most bytes that were alive at once in a step.

    by_category: the bytes by category, which add up to `num_bytes`.
    """

    num_bytes: int
    by_category: dict[str, int]
    moment: MeasuredMoment


class StepMeter(LiveStorages):
    """Follows all storages of a rank from the building of its model to the end of a step.

    host_apart: whether host memory is no part of the peak.
    host_peak_bytes: the most bytes of host memory in a step.
    """

    def __init__(self, *, host_apart: bool = False) -> None:
        super().__init__()
        self._host_apart = host_apart
        self.host_peak_bytes = 0
        self._in_step = self._in_update = False
        self._running: list[list[str]] = []  # of each stage
        self._moment = MeasuredMoment(FORWARD, "", "")  # of the peak
        self._at_peak: list[tuple[LiveStorage, int]] = []  # with their bytes then

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and _engine_is_caller() and _only_reference(args[0]):
            func = torch.ops.aten.add_.Tensor
        return super().__torch_dispatch__(func, types, args, kwargs)

    def assign(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Puts the storages of the tensors into a category, also those of the peak."""
        for tensor in tensors:
            if storage := self.find(tensor.untyped_storage()):
                self.bytes_by_category[storage.category] -= storage.num_bytes
                self.bytes_by_category[category] += storage.num_bytes
                storage.category = category

    @property
    def peak(self) -> StepPeakMeasured:
        """The peak of the step so far."""
        found = Counter(dict.fromkeys((*HELD, *PHASES, HOST), 0))
        for storage, num_bytes in self._at_peak:
            found[storage.category] += num_bytes
        if self._host_apart:
            del found[HOST]
        return StepPeakMeasured(self.peak_bytes, found, self._moment)

    def held(self) -> dict[str, int]:
        """Returns the bytes that are alive now, by the categories of HELD.

        All that was not assigned is OTHER, except host memory, which does not count.
        """
        self.total_bytes()
        held = {category: self.bytes_by_category[category] for category in HELD}
        held[OTHER] += sum(self.bytes_by_category[phase] for phase in PHASES)
        return held

    @contextmanager
    def step(self, stages: Iterable[nn.Module]) -> Iterator[None]:
        """Looks for the peak inside the block.

        stages: the modules whose parts `MeasuredMoment` names.
        """
        with ExitStack() as stack:
            self._running = [stack.enter_context(running_modules(stage)) for stage in stages]
            self._in_step = True
            try:
                yield
            finally:
                self._in_step = self._in_update = False

    def part(self, name: str) -> AbstractContextManager[None]:
        """Declares that a part of the step begins. Behind the backwards comes "optimizer"."""
        self._in_update = name == "optimizer"
        return nullcontext()

    def category(self) -> str:
        """Returns HOST, the phase of the step, or before the step OTHER."""
        if is_allocating_on_host():
            return HOST
        return self._phase() if self._in_step else OTHER

    def after(self, func: Any) -> None:
        """Compares the live bytes with the peak."""
        self.host_peak_bytes = max(self.host_peak_bytes, self.bytes_by_category[HOST])
        # The sum is cheap and can only be too high. The sizes are read anew only if it is above.
        if not self._in_step or not self.sum_is_above(self.peak_bytes):
            return
        if (total := self.total_bytes()) > self.peak_bytes:
            module = next((running[-1] for running in self._running if running), "")
            self.peak_bytes = total
            self._moment = MeasuredMoment(self._phase(), module, str(func).rpartition(".")[0])
            self._at_peak = [(one, one.num_bytes) for one in self._live.values()]

    @property
    def _total(self) -> int:
        return super()._total - self._host_apart * self.bytes_by_category[HOST]

    def _phase(self) -> str:
        if self._in_update:
            return UPDATE
        if is_recomputing():
            return REPLAY
        return FORWARD if current_node() is None else BACKWARD


def _engine_is_caller() -> bool:
    frame = sys._getframe(1)
    # torch wraps __torch_dispatch__ in two functions.
    wrappers = ("__torch_dispatch__", "_fn", "inner")
    while frame.f_back is not None and frame.f_code.co_name in wrappers:
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


def _only_reference(tensor: Tensor) -> bool:
    storage = tensor.untyped_storage()  # a user of the storage, in each release of torch
    counts = (num_users_of_tensor(tensor), num_users_of_storage(address_of(storage)))
    return counts == ONLY_REFERENCE and fills_its_memory(tensor)


TAKES_STORAGE = (
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Storage_storage_offset,
)


@contextmanager
def simulated_rank(
    config: ParallelConfig, fake: SimulatedTensors, *, rank: int, world_size: int
) -> Iterator[ParallelState]:
    """Yields the state of global rank `rank` on a CPU, and destroys its groups on exit.

    fake: the mode under which the rank will run.
    The process must not be in any process group. Raises InputError if the world size is not a
    multiple of one model's ranks.
    """
    assert not dist.is_initialized(), "a simulated rank needs a process without process groups"
    if world_size > 1:
        dist.init_process_group("fake", store=fake_store()(), rank=rank, world_size=world_size)
    try:
        with parallel_state(
            replace(config, distributed_backend="gloo"),
            seed=0,  # no operator computes, so no draw depends on it
            launch=Launch(launcher="simulated", rank=rank, world_size=world_size),
        ) as parallel:
            # An operator under `fake` takes no other states. They come from no generator of the
            # process and go to none.
            generator = SimpleNamespace(
                get_state=lambda: fake.from_tensor(torch.get_rng_state()),
                set_state=lambda _: None,
                manual_seed=lambda _: None,
            )
            yield replace(parallel, rng=RngStreams(parallel.device, seed=0, generator=generator))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class SimulatedTensors(FakeTensorMode):
    """A FakeTensorMode that keeps no storage alive.

    torch's mode remembers the results of operators by their arguments. A storage is an argument of
    `Tensor.set_`, and the memory of the mode would hold it for ever.
    """

    cache_enabled: bool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not has_kernel_for(func.name(), "Meta"):
            # A collective that has finished. torch 2.8 has no fakes of collectives.
            work = fake_work().boxed()
            return work if len(schema_of(func).returns) == 1 else (args[0], work)
        remembers = self.cache_enabled
        self.cache_enabled = remembers and func not in TAKES_STORAGE
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.cache_enabled = remembers
