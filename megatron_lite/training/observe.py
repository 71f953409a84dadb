"""What a run measures of its own memory, beside what was predicted.

first micro-batch    the bytes kept for backward
second step          its peak: the largest of any rank. On CUDA torch's allocator counts anyway.
                     On a CPU a profiler has to run during the step, so --log-peak-memory asks
                     for it. States and buffers exist from this step on.
its first forward and backward    the memory timeline, by --memory-timeline
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.run import RunConfig
from megatron_lite.config.units import size
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.predict.kept_tensors import UNIT, activation_bytes, activation_terms
from megatron_lite.memory.predict.stage_course import kept_course
from megatron_lite.memory.predict.states import RankStates, rank_states
from megatron_lite.memory.predict.step_peak import StepPeak, step_peak
from megatron_lite.model.gpt import GPTModel, ModelStages
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.collectives import gloo_has_freed
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.weights import bytes_of, local_part, storages_of, weights_in_use
from megatron_lite.recompute.recompute_plan import RecomputePlan

# Runs the forward of a stage under a plan, and looks at its memory.
Look = Callable[[GPTModel, RecomputePlan, Callable[[], Tensor]], Tensor]
MOST_NAMED = 6  # places that differ from the prediction
OUTSIDE, HOST = "outside of the layers", "in host memory"


class ActivationMeter:
    """Measures the kept bytes of each stage, and predicts them from the rows that the routers have
    sent to this rank's experts. Both are counted by place: "layer 3", OUTSIDE and HOST.

    Under --recompute-verify it also looks for tensors that outlive the forward without being saved
    for backward.
    """

    def __init__(self, config: RunConfig, parallel: ParallelState) -> None:
        self._config, self._parallel = config, parallel
        self._measured, self._predicted = Counter[str](), Counter[str]()
        self._balanced = self._unaccounted = 0

    def forward(self, chunk: GPTModel, plan: RecomputePlan, run: Callable[[], Tensor]) -> Tensor:
        """Runs the forward of one stage under the plan. Returns the result of `run`."""
        config, live = self._config, None
        if config.recompute.recompute_verify:  # imported here because the import takes seconds
            from megatron_lite.memory.measure.live_storages import LiveStorages

            live = LiveStorages()
        weights = list(weights_in_use(chunk))
        with kept_for_backward(exclude=weights, model=chunk) as meter, live or nullcontext():
            output = run()
        for kept in meter.storages().values():
            named = re.match(r"decoder\.layers\.(\d+)", kept.label)
            self._measured[f"layer {named[1]}" if named else OUTSIDE] += kept.num_bytes
        # Saved inputs in an arena (contiguous) or in host memory pass by the meter's hooks.
        stores = chunk.decoder.stores if plan.uses_stores else None
        if stores is not None:
            self._measured[OUTSIDE] += stores.device_bytes
            self._measured[HOST] += stores.host_bytes
        sizes = Sizes.of(config, device=self._parallel.device.type, stage=chunk.stage)
        if config.model.num_experts is not None:
            self._balanced += activation_bytes(plan, sizes)
            rows: list[Any] = [getattr(one.mlp, "num_rows", ()) for one in chunk.decoder.layers]
            sizes = replace(sizes, expert_rows=tuple(rows) if any(rows) else ())
        for term in activation_terms(plan, sizes):
            place = HOST if term.on_host else OUTSIDE
            # The decoder saves the inputs of units.
            if not (term.on_host or term.layer is None or term.operation == UNIT):
                place = f"layer {chunk.stage.first_layer + term.layer}"
            self._predicted[place] += term.num_bytes
        if live is not None:
            # Outputs, weights and constants outlive the forward legitimately. Anything else that
            # lives and that no hook saw was put aside by a cache or on a Function's context.
            known = storages_of((output, *weights, *chunk.constants())).keys()
            self._unaccounted += live.bytes_beside(
                known | meter.storages().keys() | (set() if stores is None else stores.storages())
            )
        return output

    def result(self) -> tuple[dict[str, Any], str]:
        """Returns the figures of the rank that keeps most, by their names in IterationRecord, and
        a sentence about the first difference from the prediction, on the rank where they differ
        most; "" if there is none.

        Gathers figures and a text of all ranks.
        """
        expected, saved = self._predicted, self._measured
        on_host = [counts.pop(HOST, 0) for counts in (expected, saved)]
        own = [counts.total() for counts in (expected, saved)]
        places = [
            f"{place}: {saved[place]:,} bytes saved, {expected[place]:,} predicted"
            for place in {**saved, **expected}
            if saved[place] != expected[place]
        ]
        figures = [*own, *on_host, self._balanced, self._unaccounted]
        off = own[1] - own[0], "; ".join(places[:MOST_NAMED])
        rows = self._parallel.gathered((figures, off))
        most = map(max, zip(*(figures for figures, _ in rows), strict=True))
        predicted, measured, host_predicted, host_measured, balanced, unaccounted = most
        # on the first rank whose bytes are off by the most
        difference, text = max((off for _, off in rows), key=lambda off: abs(off[0]))
        fault = ""
        if difference:
            fault = (
                f"the first micro-batch keeps {measured} bytes for backward, and {predicted} were "
                f"predicted ({difference:+d}): {text}"
            )
        elif host_measured != host_predicted:
            fault = (
                f"the first micro-batch keeps {host_measured} bytes in host memory, and "
                f"{host_predicted} were predicted"
            )
        elif unaccounted:
            fault = f"{unaccounted} bytes live on after the forward that are not saved for backward"
        return dict(
            activation_bytes_predicted=predicted,
            activation_bytes_measured=measured,
            activation_bytes_balanced=balanced or None,
            activation_host_bytes_predicted=host_predicted or None,
            activation_host_bytes_measured=host_measured or None,
        ), fault


def own_states(config: RunConfig, parallel: ParallelState) -> RankStates:
    """Returns the bytes that this rank holds between two steps."""
    return rank_states(
        config, parallel.pp_rank, dp_cp_size=parallel.dp_cp_size, dp_cp_rank=parallel.dp_cp_rank
    )


def own_step_peak(config: RunConfig, parallel: ParallelState) -> StepPeak:
    """Returns the predicted peak of this rank in a step."""
    return step_peak(
        config,
        parallel.pp_rank,
        device=parallel.device.type,
        dp_size=parallel.dp_size,
        dp_cp_rank=parallel.dp_cp_rank,
    )


def measures_peak(config: RunConfig, device: torch.device) -> bool:
    """Tells whether the second step measures its peak: always on CUDA, and by a flag on a CPU.

    What compiled layers keep is not known, so their peak is not measured.
    """
    asked = device.type == "cuda" or config.logging.log_peak_memory
    return asked and not config.compiles_layers


class PeakMemory(NamedTuple):
    """The peak of a step on the rank that holds most.

    predicted, measured: bytes.
    reserved: on CUDA, the most that the allocator held of the device, with its free pieces; else 0.
    """

    predicted: int
    measured: int
    reserved: int

    def __str__(self) -> str:
        return (
            f"{size(self.measured)} measured, {size(self.predicted)} predicted "
            f"({self.predicted / self.measured:.1%} of it)"
            + (f"; {size(self.reserved)} reserved" if self.reserved else "")
        )


@contextmanager
def peak_of_step(
    config: RunConfig, model: ModelStages, optimizer: Optimizer, parallel: ParallelState
) -> Iterator[list[PeakMemory]]:
    """Measures the peak of the block, which is one step. The list has it after the block.

    Every rank must call this: at the end it gathers figures of all ranks.
    """
    device, found = parallel.device, list[PeakMemory]()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        peak_bytes = torch.cuda.max_memory_allocated(device)
        reserved_bytes = torch.cuda.max_memory_reserved(device)
    else:
        # The profiler does not see what was allocated before, such as the buffers of @host and the
        # slots of --contiguous-saved-activations, which the first step made.
        optimizer.zero_grad()  # under FSDP2 a step begins with new gradients
        held = bytes_of(
            tensor for _, tensors in held_tensors(model, optimizer) for tensor in tensors
        )
        for chunk in model:
            if chunk.decoder.plan.uses_stores:
                held += chunk.decoder.stores.allocated_bytes
        from megatron_lite.memory.measure.live_storages import allocator_peak

        with gloo_has_freed(), allocator_peak() as seen:
            yield found
            optimizer.finish()  # gathers of weights; a profiler must not end beside them
        peak_bytes, reserved_bytes = held + seen.peak_bytes, 0
    predicted = own_step_peak(config, parallel).num_bytes
    figures = parallel.gathered((predicted, peak_bytes, reserved_bytes))
    found.append(PeakMemory(*map(max, zip(*figures, strict=True))))


def held_tensors(
    model: ModelStages, optimizer: Optimizer
) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Yields the tensors that this rank holds from step to step, by category (step_meter.py).

    A tensor may come several times, such as a float32 master that is the weight itself. Its
    category is the last one.
    """
    from megatron_lite.memory.measure import step_meter

    layout = optimizer.layout
    yield step_meter.OTHER, model.constants()
    for piece in layout.pieces:
        yield step_meter.OPTIMIZER, piece.states.values()
    yield step_meter.MASTERS, [piece.master.detach() for piece in layout.pieces]
    yield (
        step_meter.GRADIENTS,
        [bucket.flat for bucket in layout.gradients.buckets]
        if isinstance(layout.gradients, GradBuffer)
        else [piece.grad for piece in layout.pieces if piece.master.grad is not None],
    )
    yield step_meter.WEIGHTS, map(local_part, model.parameters())
    yield step_meter.HOST, optimizer.host_tensors()


def record_step(
    attempt: Callable[..., None],
    path: str,
    config: RunConfig,
    model: GPTModel,
    plan: RecomputePlan,
    run: Callable[[], Tensor],
) -> Tensor:
    """Writes the memory timeline of a micro-batch of a whole model, and the predicted bytes.

    Runs the forward `run` and its backward. Returns the loss, detached.
    attempt: as `RunLog.attempt`, for this path.
    """
    # Imported here because the import takes seconds.
    from megatron_lite.memory.measure.recorder import record_timeline
    from megatron_lite.memory.measure.timeline import write_timeline

    timeline, loss = record_timeline(model, run, name=str(config.recompute.policy))
    sizes = Sizes.of(config, device=loss.device.type, stage=model.stage)
    timeline = timeline._replace(predicted=tuple(kept_course(plan, sizes)))
    attempt("the memory timeline", write_timeline, timeline, path)
    return loss
