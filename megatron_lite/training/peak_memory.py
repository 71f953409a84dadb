"""The peak of a step, predicted and measured, for the log.

    rank     the largest peak of any rank, and the pipeline rank that has it
    CUDA     torch's allocator counts anyway, so every run measures its second step
    CPU      a profiler has to run during the step, so --log-peak-memory asks for it

The second step is measured, because states and buffers exist from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import size
from megatron_lite.memory.predict.step_peak import StepPeak, step_peak
from megatron_lite.model.gpt import ModelStages
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.timing import gloo_has_freed
from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.parallel.weights import local_part


class PeakMemory(NamedTuple):
    """The peak of a step on the rank that holds most.

    predicted, measured: bytes.
    reserved: on CUDA, the most that the allocator held of the device, with its free pieces; else 0.
    """

    predicted: int
    measured: int
    reserved: int = 0

    def __str__(self) -> str:
        return (
            f"{size(self.measured)} measured, {size(self.predicted)} predicted "
            f"({self.predicted / max(1, self.measured):.1%} of it)"
            + (f"; {size(self.reserved)} reserved" if self.reserved else "")
        )


def own_step_peak(config: RunConfig, parallel: ParallelState, num_microbatches: int) -> StepPeak:
    """Returns the predicted peak of this rank."""
    return step_peak(
        config,
        parallel.pp_rank,
        device=parallel.device.type,
        dp_cp_size=parallel.dp_cp_size,
        dp_cp_rank=parallel.dp_cp_rank,
        num_microbatches=num_microbatches,
    )


def measures_peak(config: RunConfig, device: torch.device) -> bool:
    """Tells whether the second step measures its peak: always on CUDA, and by a flag on a CPU.

    What compiled layers keep is not known, so their peak is not measured.
    """
    asked = device.type == "cuda" or config.logging.log_peak_memory
    return asked and not config.compiles_layers


class PeakMeter:
    """Measures the peak of one step of this rank. peak_bytes: None before it has measured.
    reserved_bytes: as in PeakMemory."""

    def __init__(self, model: ModelStages, optimizer: Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self.peak_bytes: int | None = None
        self.reserved_bytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures the block, which is one step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            self.reserved_bytes = torch.cuda.max_memory_reserved(self._device)
            return
        # The profiler does not see what was allocated before, such as the buffers of @host and the
        # slots of --contiguous-saved-activations, which the first step made.
        held = _bytes_of(_held_tensors(self._model, self._optimizer)) + sum(
            chunk.decoder.stores.allocated_bytes for chunk in self._model
        )
        from megatron_lite.memory.measure.allocator_peak import allocator_peak

        with gloo_has_freed(), allocator_peak() as found:
            yield
        self.peak_bytes = held + found.peak_bytes


def peak_of_all_ranks(own: PeakMemory, parallel: ParallelState) -> PeakMemory:
    """Returns the largest figures of any rank.

    Every rank must call it: it issues one all-reduce over all ranks. Waits for the device.
    """
    figures = torch.tensor(own, device=parallel.device)
    return PeakMemory(*all_reduce_(figures, parallel.world_group, dist.ReduceOp.MAX).tolist())


def _held_tensors(model: ModelStages, optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields the tensors that this rank holds from step to step."""
    for chunk in model:
        yield from chunk.parameters()
        yield from chunk.constants()
    # Without a buffer (FSDP2) a step begins with new gradients.
    if isinstance(optimizer.layout.gradients, GradBuffer):
        yield from optimizer.layout.gradients.grads.values()
    for piece in optimizer.layout.pieces:
        yield piece.master
    for states in optimizer.states.values():
        yield from states.values()


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages of the tensors, each once."""
    local = [local_part(one) for one in tensors]
    storages = {address_of(one.untyped_storage()): one.untyped_storage() for one in local}
    return sum(storage.nbytes() for storage in storages.values())
