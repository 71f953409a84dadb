"""Looks at single micro-batches of a run: the bytes that the first one keeps for backward, and the memory timeline of another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.run import RunConfig
from megatron_lite.memory.activations import activation_bytes, host_bytes
from megatron_lite.memory.layer_tensors import Sizes
from megatron_lite.memory.meter import kept_for_backward
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState

Observer = Callable[[Callable[[], Tensor]], Tensor]  # runs a micro-batch's loss forward and backward; returns it detached


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Kept for backward by one micro-batch, the most of any rank. host_*: in host memory, where a policy moves tensors there.

    unaccounted: alive after the forward, but not saved for backward; None where nobody looked.
    """

    predicted: int
    measured: int
    unaccounted: int | None
    host_predicted: int | None = None
    host_measured: int | None = None

    @property
    def fault(self) -> str | None:
        """What is not as predicted."""
        if self.measured != self.predicted:
            return (f"the first micro-batch keeps {self.measured} bytes for backward, and {self.predicted} were predicted "
                    f"({self.measured - self.predicted:+d})")
        if self.host_measured != self.host_predicted:
            return (f"the first micro-batch keeps {self.host_measured} bytes in host memory, and {self.host_predicted} were "
                    "predicted")
        if self.unaccounted:
            return f"{self.unaccounted} bytes live on after the forward that are not saved for backward"
        return None


def plain(loss_fn: Callable[[], Tensor]) -> Tensor:
    """Forward and backward, with nobody looking."""
    loss = loss_fn()
    loss.backward()
    return loss.detach()


class ActivationMeter:
    """An Observer that measures. `thorough`: also looks for tensors that live on without being saved for backward."""

    def __init__(self, model: GPTModel, *, thorough: bool) -> None:
        self._model, self._thorough = model, thorough
        self._measured, self._host_measured, self._unaccounted = 0, 0, 0

    def __call__(self, loss_fn: Callable[[], Tensor]) -> Tensor:
        if self._thorough:  # imported late: it takes seconds
            from megatron_lite.memory.live_storages import LiveStorages
        live = LiveStorages() if self._thorough else None
        with kept_for_backward(exclude=self._model.parameters()) as meter, live or nullcontext():
            loss = loss_fn()
        stores = self._model.decoder.stores
        self._measured, self._host_measured = meter.total_bytes() + stores.device_bytes, stores.host_bytes
        if live is not None:
            known = {tensor.untyped_storage()._cdata for tensor in (loss, *self._model.parameters(), *self._model.constants())}
            self._unaccounted = live.bytes_beside(known | meter.storages().keys() | stores.storages())
        loss.backward()
        return loss.detach()

    def result(self, config: RunConfig, parallel: ParallelState) -> ActivationBytes:
        """The figures. One all-reduce over all ranks; waits for the device."""
        sizes, plan = Sizes.of(config, device=parallel.device.type), self._model.decoder.plan
        most = torch.tensor([self._measured, self._host_measured, self._unaccounted], device=parallel.device)
        measured, host_measured, unaccounted = all_reduce_(most, parallel.world_group, dist.ReduceOp.MAX).tolist()
        kept = ActivationBytes(predicted=activation_bytes(config.model, plan, sizes), measured=measured,
                               unaccounted=unaccounted if self._thorough else None)
        if not any(segment.on_host for segment in plan.segments):
            return kept
        return replace(kept, host_predicted=host_bytes(config.model, plan, sizes), host_measured=host_measured)


class TimelineRecorder:
    """An Observer that writes the memory timeline of its micro-batch to `path`, where `path` is given."""

    def __init__(self, model: GPTModel, path: str | None) -> None:
        self._model, self._path = model, path

    def __call__(self, loss_fn: Callable[[], Tensor]) -> Tensor:
        if self._path is None:
            return plain(loss_fn)
        from megatron_lite.memory.recorder import record_timeline  # late: it takes seconds
        from megatron_lite.memory.timeline import write_timeline

        losses = []

        def noted() -> Tensor:
            loss = loss_fn()
            losses.append(loss.detach())
            return loss

        write_timeline(record_timeline(self._model, noted, name=str(self._model.decoder.plan)), self._path)
        return losses[0]
