"""The work of the operations of the description: FLOPs, bytes, launches -> seconds.

What a transfer runs beside hides it: only the seconds by which it takes longer count. The host
launches kernels ahead of the device, so its time counts where it is longer than that of a pass
together (stage_time.py). Standard library only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.optimizer_settings import FORMATS
from megatron_lite.config.run import RunConfig
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SHIFT,
    Collective,
    Matmul,
    Operation,
    OperatorCall,
)
from megatron_lite.description.self_attention import CORE

from .hardware import Group, Hardware, Mode

FORWARD_MATMULS = "forward matmuls"
BACKWARD_MATMULS = "backward matmuls"
REPLAYED_MATMULS = "replayed matmuls"
MEMORY_BOUND = "memory-bound operations"
REPLAYED_MEMORY_BOUND = "replayed memory-bound operations"
TENSOR_PARALLEL = "tensor-parallel collectives"
CONTEXT_PARALLEL = "context-parallel collectives"
EXPERT_PARALLEL = "expert-parallel collectives"
# Kernels of an operation besides its matmuls, forward and backward, as torch's operators and as
# compiled ones. They were counted on the operators that a step dispatches.
LAUNCHES = {
    "rotary": ((16, 16), (2, 2)),  # with slices, which only the host sees
    "qk_layernorm": ((2, 6), (2, 4)),
    "activation": ((2, 4), (1, 1)),
    "loss": ((3, 3), (3, 3)),
    "embedding": ((3, 4), (3, 4)),
}
NORM_LAUNCHES = (1, 4)
OTHER_LAUNCHES = (1, 2)  # copies and additions; a bias has a sum and an addition
ACCUMULATIONS = 1  # launches to add the gradient of a parameter, if no matmul does it
COLLECTIVE_LAUNCHES = 3  # a collective, and the events by which streams wait for each other


class Work(NamedTuple):
    """Some work: the device's seconds by the terms of a step's time that they count in.

    host: the seconds in which the host launches the kernels.
    """

    terms: Mapping[str, float]
    host: float

    @property
    def seconds(self) -> float:
        """The device's seconds."""
        return sum(self.terms.values())


def sum_of(parts: Iterable[tuple[Work, float]]) -> Work:
    """Returns the sum of several, each of which happens so many times."""
    terms: dict[str, float] = {}
    host = 0.0
    for work, times in parts:
        for term, seconds in work.terms.items():
            terms[term] = terms.get(term, 0.0) + times * seconds
        host += times * work.host
    return Work(terms, host)


def seconds_of(works: Iterable[Work]) -> float:
    """Returns the device's seconds of several."""
    return sum(work.seconds for work in works)


class Clock(NamedTuple):
    """What decides the time of an operation besides the operation.

    element_bytes: the bytes of an element of weights and activations.
    mode: the way in which kernels run. is_fused: whether they are compiled.
    deterministic: whether attention has deterministic kernels.
    attended: the share of attention that flash kernels compute, since documents hide the rest.
    """

    hardware: Hardware
    element_bytes: int
    tp: Group
    cp: Group
    ep: Group
    mode: Mode
    is_fused: bool
    deterministic: bool
    attended: float

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware) -> Clock:
        """Returns the clock of a run."""
        t, training = config.parallel.tensor_model_parallel_size, config.training
        is_fused = config.uses_compiler(hardware.device)
        mode = hardware.compiled if is_fused else hardware.eager
        if hardware.device == "cuda" and training.cuda_graph_impl != "none":
            # The same kernels, which the host launches as one.
            captured = hardware.captured
            mode = replace(mode, launch_s=captured.launch_s, replay_s=captured.replay_s)
        return cls(
            hardware,
            FORMATS[training.precision],
            Group(t),
            Group(config.parallel.context_parallel_size, t),
            Group(
                config.parallel.expert_model_parallel_size, config.parallel.expert_tensor_parallel
            ),
            mode,
            is_fused,
            # The default is cuDNN's attention; both others are FlashAttention 2.
            training.deterministic_mode or config.model.attention_backend == "flash",
            config.data.plan_attended,
        )

    def work(self, term: str, seconds: float, launches: float) -> Work:
        """Returns the work of so many launches."""
        return Work({term: seconds}, launches * self.mode.launch_s)

    def passes(self, operation: Operation) -> tuple[Work, Work]:
        """Returns the work of the forward and of the backward of an operation, without a replay.

        y = x W has the gradients dx = dy W^T and dW = x^T dy.
        """
        forward, backward = (
            [self.pointwise(operation, MEMORY_BOUND, backward=half)] for half in (False, True)
        )
        for call in operation.calls:
            forward += self.call(operation, call, FORWARD_MATMULS)
        products = [one for call in operation.calls for one in call.matmuls]
        inputs, weights, rebuilt = (
            [self._matmul(one, BACKWARD_MATMULS, True) for one in matmuls]
            for matmuls in (
                [one._replace(n=one.k, k=one.n) for one in products],
                [
                    one._replace(m=one.k, k=one.m, groups=one.k_groups, k_groups=one.groups)
                    for one in products
                ],
                operation.rebuilds,
            )
        )
        gradients = forward if operation.gradients_in_forward else backward
        gradients += inputs + weights
        backward += rebuilt
        of_inputs, of_weights, of_rebuilt = map(seconds_of, (inputs, weights, rebuilt))
        beside = {SHIFT: of_inputs + of_weights + of_rebuilt}
        if operation.runs_beside:
            # A gather runs beside the gradient of the input, a sum beside that of the weight.
            beside = {ALL_GATHER: of_inputs, ALL_REDUCE: of_weights, REDUCE_SCATTER: of_weights}
        backward += self._collectives(operation, operation.backward, beside)
        return sum_of((one, 1.0) for one in forward), sum_of((one, 1.0) for one in backward)

    def call(self, operation: Operation, call: OperatorCall, term: str) -> Iterator[Work]:
        """Yields the works of one call of an operation's forward, or of its replay.

        term: the term that the matmuls count in.
        """
        works = [self._matmul(one, term) for one in call.matmuls]
        yield from works
        beside = {SHIFT: seconds_of(works)}
        yield from self._collectives(operation, call.collectives, beside)

    def pointwise(self, operation: Operation, term: str, *, backward: bool) -> Work:
        """Returns the work of the kernels of an operation besides matmuls and collectives."""
        name, num_bytes = operation.name, float(operation.moved[backward])
        if name == "loss" and self.is_fused:
            num_bytes *= self.hardware.loss_traffic
        launches, seconds = 0.0, self.hardware.memory_seconds(num_bytes, self.mode)
        if num_bytes:
            usual = NORM_LAUNCHES if name.endswith("layernorm") else OTHER_LAUNCHES
            launches = LAUNCHES.get(name, (usual, usual))[self.is_fused][backward]
            seconds += launches * self.hardware.kernel_s
        if backward and not self.hardware.fused_accumulation:
            launches += ACCUMULATIONS * len(operation.parameters)
        return self.work(term, seconds, launches)

    def exposed(
        self, seconds: float, beside: float, parts: float = math.inf, *, copies: bool = False
    ) -> float:
        """Returns by how much a transfer in equal parts delays the computation beside it.

        Each part is ready when the same share of the computation is done, or is needed for the
        next one, so nothing runs beside one of the parts. Collectives use memory and
        multiprocessors too, so computation hides a share of them at most.
        copies: whether computation may hide all of the transfer, as it does copies.
        """
        if self.hardware.shares_cores:
            return seconds
        least = 1 / parts if copies else max(1 / parts, 1 - self.hardware.overlap)
        return max(least * seconds, seconds - (1 - 1 / parts) * beside)

    def _matmul(self, matmul: Matmul, term: str, backward: bool = False) -> Work:
        if not matmul.fused:
            return self.work(term, self.hardware.matmul_seconds(matmul, self.element_bytes), 1.0)
        seconds = self.hardware.flash_seconds(
            matmul, self.element_bytes, backward=backward, deterministic=self.deterministic
        )
        # A flash kernel computes both matmuls of a forward, and all of a backward in two kernels.
        return self.work(term, self.attended * seconds, 0.5)

    def _collectives(
        self, operation: Operation, collectives: Iterable[Collective], beside: Mapping[str, float]
    ) -> Iterator[Work]:
        """Yields the work of collectives. beside: the seconds of the matmuls beside which those of
        a kind run.

        Core attention exchanges keys and values over context-parallel ranks. Other operations
        communicate with tensor-parallel ranks, and rows of experts with those of other experts.
        """
        in_core = operation.name == CORE
        usual = (CONTEXT_PARALLEL, self.cp) if in_core else (TENSOR_PARALLEL, self.tp)
        taken = defaultdict[tuple[str, str], list[float]](list)
        for one in collectives:
            term, group = (EXPERT_PARALLEL, self.ep) if one.over_experts else usual
            taken[term, one.kind].append(self.hardware.collective_seconds(one, group))
        for (term, kind), several in taken.items():
            seconds = self.exposed(sum(several), beside.get(kind, 0.0))
            yield self.work(term, seconds, COLLECTIVE_LAUNCHES * len(several))
