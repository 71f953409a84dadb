"""What a run measures of its own memory, beside what was predicted.

first micro-batch    the bytes kept for backward
second step          its peak: the largest of any rank. On CUDA torch's allocator counts anyway.
                     On a CPU a profiler has to run during the step, so --log-peak-memory asks
                     for it. States and buffers exist from this step on.
its first forward and backward    the memory timeline, by --memory-timeline
"""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.run import RunConfig
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.predict.kept_tensors import UNIT, activation_bytes, activation_terms
from megatron_lite.memory.predict.step_peak import StepPeak, step_peak
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState, gather_texts
from megatron_lite.parallel.torch_internals import address_of
from megatron_lite.parallel.weights import weights_in_use
from megatron_lite.recompute.recompute_plan import RecomputePlan

# Runs a micro-batch of a whole model, and records its memory: (model, forward) -> loss.
Timeline = Callable[[GPTModel, Callable[[], Tensor]], Tensor]
MOST_NAMED = 6  # layers that differ from the prediction


class ActivationBytes(NamedTuple):
    """The kept bytes of one micro-batch in all stages of a rank, the most of any rank.

    predicted, measured: the bytes in device memory. The prediction knows how many rows the routers
        have sent to this rank's experts.
    balanced: the prediction for routers that send equally many rows to each expert. None without
        experts.
    off: measured minus predicted bytes, on the rank where they differ most.
    unaccounted: bytes alive after the forward but not saved for backward. None if not measured.
    host_predicted, host_measured: the bytes in host memory. None if no policy moves tensors there.
    layers: the layers that differ, as text.
    """

    predicted: int
    measured: int
    balanced: int | None = None
    off: int = 0
    unaccounted: int | None = None
    host_predicted: int | None = None
    host_measured: int | None = None
    layers: str = ""

    @property
    def fault(self) -> str | None:
        """Returns a sentence about the first difference from the prediction, or None."""
        if self.off:
            return (
                f"the first micro-batch keeps {self.measured} bytes for backward, and "
                f"{self.predicted} were predicted "
                f"({self.off:+d}){': ' if self.layers else ''}{self.layers}"
            )
        if self.host_measured != self.host_predicted:
            return (
                f"the first micro-batch keeps {self.host_measured} bytes in host memory, and "
                f"{self.host_predicted} were predicted"
            )
        if self.unaccounted:
            return (
                f"{self.unaccounted} bytes live on after the forward that are not saved for "
                "backward"
            )
        return None


class ActivationMeter:
    """Measures the kept bytes of each stage.

    Under --recompute-verify it also looks for tensors that outlive the forward without being saved
    for backward.
    """

    def __init__(self, config: RunConfig, parallel: ParallelState) -> None:
        self._config, self._parallel = config, parallel
        self._thorough = config.recompute.recompute_verify
        self._seen: list[tuple[GPTModel, RecomputePlan, Counter[int | None], tuple[Any, ...]]] = []
        self._measured, self._host_measured, self._unaccounted = 0, 0, 0

    def forward(self, chunk: GPTModel, plan: RecomputePlan, run: Callable[[], Tensor]) -> Tensor:
        """Runs the forward of one stage under the plan. Returns the result of `run`."""
        if self._thorough:  # imported here because the import takes seconds
            from megatron_lite.memory.measure.live_storages import LiveStorages
        live = LiveStorages() if self._thorough else None
        weights = list(weights_in_use(chunk))
        with kept_for_backward(exclude=weights, model=chunk) as meter, live or nullcontext():
            output = run()
        saved = Counter[int | None]()  # bytes by layer; None: outside of them
        for kept in meter.storages().values():
            named = re.match(r"decoder\.layers\.(\d+)", kept.label)
            saved[int(named[1]) if named else None] += kept.num_bytes
        rows = tuple(getattr(layer.mlp, "num_rows", ()) for layer in chunk.decoder.layers)
        self._seen.append((chunk, plan, saved, rows))
        # Saved inputs in an arena (contiguous) or in host memory pass by the meter's hooks.
        stores = chunk.decoder.stores if plan.uses_stores else None
        self._measured += meter.total_bytes() + (0 if stores is None else stores.device_bytes)
        self._host_measured += 0 if stores is None else stores.host_bytes
        if live is not None:
            # Outputs, weights and constants outlive the forward legitimately. Anything else that
            # lives and that no hook saw was put aside by a cache or on a Function's context.
            known = {
                address_of(tensor.untyped_storage())
                for tensor in (output, *weights, *chunk.constants())
            }
            self._unaccounted += live.bytes_beside(
                known | meter.storages().keys() | (set() if stores is None else stores.storages())
            )
        return output

    def result(self) -> ActivationBytes:
        """Returns the figures of the rank that keeps most. Waits for the device.

        Issues one all-reduce over all ranks, and a gather of texts if the bytes differ.
        """
        predicted = balanced = host_predicted = 0
        model, parallel = self._config.model, self._parallel
        for chunk, plan, _, rows in self._seen:
            sizes = self._sizes(chunk, rows)
            predicted += activation_bytes(model, plan, sizes)
            host_predicted += activation_bytes(model, plan, sizes, on_host=True)
            if model.num_experts is not None:
                balanced += activation_bytes(model, plan, self._sizes(chunk, ()))
        own_off = self._measured - predicted
        # One MAX finds both the largest surplus and the largest shortfall of any rank.
        figures = [
            *(predicted, self._measured, own_off, -own_off, self._unaccounted),
            *(host_predicted, self._host_measured, balanced),
        ]
        most = all_reduce_(
            torch.tensor(figures, device=parallel.device), parallel.world_group, dist.ReduceOp.MAX
        )
        predicted, measured, above, below, unaccounted, *others = most.tolist()
        host_predicted, host_measured, balanced = others
        off = above if above >= below else -below
        return ActivationBytes(
            predicted=predicted,
            measured=measured,
            balanced=balanced or None,
            off=off,
            unaccounted=unaccounted if self._thorough else None,
            host_predicted=host_predicted or None,
            host_measured=host_measured if host_predicted else None,
            layers=self._layers(differs=off == own_off) if off else "",
        )

    def _layers(self, *, differs: bool) -> str:
        """Returns the layers that differ on the first rank whose bytes are off by the most.

        Every rank must call this, since it gathers texts.
        """
        own = []
        for chunk, plan, saved, rows in self._seen if differs else ():
            predicted = Counter[int | None]()
            sizes = self._sizes(chunk, rows)
            for term in activation_terms(self._config.model, plan, sizes):
                # The meter's hooks see neither tensors in host memory nor unit inputs in an arena.
                of_unit = term.operation == UNIT  # the decoder saves it
                if not (term.on_host or (plan.contiguous and of_unit and not term.tensor.stays)):
                    outside = of_unit or term.layer is None
                    place = None if outside else chunk.stage.first_layer + (term.layer or 0)
                    predicted[place] += term.num_bytes
            own += [
                f"{'outside of the layers' if place is None else f'layer {place}'}: "
                f"{saved[place]:,} bytes saved, {predicted[place]:,} predicted"
                for place in {**saved, **predicted}
                if saved[place] != predicted[place]
            ]
        return next(filter(None, gather_texts("; ".join(own[:MOST_NAMED]), self._parallel)), "")

    def _sizes(self, chunk: GPTModel, rows: tuple[Any, ...]) -> Sizes:
        sizes = Sizes.of(self._config, device=self._parallel.device.type, stage=chunk.stage)
        return replace(sizes, expert_rows=rows) if any(rows) else sizes


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
