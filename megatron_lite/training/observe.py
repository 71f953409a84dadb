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
from megatron_lite.parallel.weights import weights_in_use
from megatron_lite.recompute.plan import RecomputePlan


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Kept for backward by one micro-batch in all stages of a rank, the most of any rank.

    off: measured less predicted, on the rank where they differ most. host_*: in host memory, where a policy moves tensors there.
    unaccounted: alive after the forward, but not saved for backward; None where nobody looked.
    """

    predicted: int
    measured: int
    off: int = 0
    unaccounted: int | None = None
    host_predicted: int | None = None
    host_measured: int | None = None

    @property
    def fault(self) -> str | None:
        """What is not as predicted."""
        if self.off:
            return (f"the first micro-batch keeps {self.measured} bytes for backward, and {self.predicted} were predicted "
                    f"({self.off:+d})")
        if self.host_measured != self.host_predicted:
            return (f"the first micro-batch keeps {self.host_measured} bytes in host memory, and {self.host_predicted} were "
                    "predicted")
        if self.unaccounted:
            return f"{self.unaccounted} bytes live on after the forward that are not saved for backward"
        return None


class Observer:
    """Runs a micro-batch, and may look at it. This one does not."""

    def micro_batch(self, model: GPTModel, loss_fn: Callable[[], Tensor]) -> Tensor:
        """Forward and backward through a whole model; returns the loss, detached."""
        loss = self.forward(model, model.decoder.plan, loss_fn)
        loss.backward()
        return loss.detach()

    def forward(self, chunk: GPTModel, plan: RecomputePlan, run: Callable[[], Tensor]) -> Tensor:
        """Forward through one stage under the plan; returns what `run` returns."""
        return run()


class ActivationMeter(Observer):
    """Measures what each stage keeps. `thorough`: also looks for tensors that live on without being saved for backward."""

    def __init__(self, *, thorough: bool) -> None:
        self._thorough = thorough
        self._seen: list[tuple[GPTModel, RecomputePlan]] = []
        self._measured, self._host_measured, self._unaccounted = 0, 0, 0

    def forward(self, chunk: GPTModel, plan: RecomputePlan, run: Callable[[], Tensor]) -> Tensor:
        if self._thorough:  # imported late: it takes seconds
            from megatron_lite.memory.live_storages import LiveStorages
        self._seen.append((chunk, plan))
        live = LiveStorages() if self._thorough else None
        weights = list(weights_in_use(chunk))
        with kept_for_backward(exclude=weights) as meter, live or nullcontext():
            output = run()
        stores = chunk.decoder.stores
        self._measured += meter.total_bytes() + stores.device_bytes
        self._host_measured += stores.host_bytes
        if live is not None:
            known = {tensor.untyped_storage()._cdata for tensor in (output, *weights, *chunk.constants())}
            self._unaccounted += live.bytes_beside(known | meter.storages().keys() | stores.storages())
        return output

    def result(self, config: RunConfig, parallel: ParallelState) -> ActivationBytes:
        """The figures of the rank that keeps most. One all-reduce over all ranks; waits for the device."""
        predicted = host_predicted = 0
        for chunk, plan in self._seen:
            sizes = Sizes.of(config, device=parallel.device.type, stage=chunk.stage)
            predicted += activation_bytes(config.model, plan, sizes)
            host_predicted += host_bytes(config.model, plan, sizes)
        off = self._measured - predicted
        figures = [predicted, self._measured, off, -off, self._unaccounted, host_predicted, self._host_measured]
        most = torch.tensor(figures, device=parallel.device)
        predicted, measured, above, below, unaccounted, host_predicted, host_measured = all_reduce_(
            most, parallel.world_group, dist.ReduceOp.MAX).tolist()
        kept = ActivationBytes(predicted=predicted, measured=measured, off=above if above >= below else -below,
                               unaccounted=unaccounted if self._thorough else None)
        return replace(kept, host_predicted=host_predicted, host_measured=host_measured) if host_predicted else kept


class TimelineRecorder(Observer):
    """Writes the memory timeline of a micro-batch of a whole model to `path`, where `path` is given."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def micro_batch(self, model: GPTModel, loss_fn: Callable[[], Tensor]) -> Tensor:
        if self._path is None:
            return super().micro_batch(model, loss_fn)
        from megatron_lite.memory.recorder import record_timeline  # late: it takes seconds
        from megatron_lite.memory.timeline import write_timeline

        losses = []

        def noted() -> Tensor:
            loss = loss_fn()
            losses.append(loss.detach())
            return loss

        write_timeline(record_timeline(model, noted, name=str(model.decoder.plan)), self._path)
        return losses[0]
