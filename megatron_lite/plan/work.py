"""The work of the operations of the description, as rows: FLOPs, bytes, launches -> seconds.

A row is one kind of work of an operation's forward, backward or replay. What a transfer runs beside
hides it: only the seconds by which it takes longer count. The host launches kernels ahead of the
device, so its time counts where it is longer than that of a pass together (stage_time.py).
Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron_lite.config.checks import chosen
from megatron_lite.config.run import RunConfig
from megatron_lite.description.operations import SHIFT, Collective, Matmul, Operation, OperatorCall
from megatron_lite.description.self_attention import CORE
from megatron_lite.description.sizes import ELEMENT_BYTES
from megatron_lite.plan.hardware import Group, Hardware, Mode

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


class Row(NamedTuple):
    """One kind of work of an operation.

    term: the term of a step's time that it counts in.
    seconds: those of the device. host: those in which the host launches the kernels.
    """

    operation: str
    term: str
    seconds: float
    host: float = 0.0
    launches: float = 0.0
    flops: float = 0.0
    num_bytes: float = 0.0


class Work(NamedTuple):
    """The sum of some rows: the device's seconds by term, and the seconds of the host."""

    terms: Mapping[str, float]
    host: float

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Work:
        """Returns the sum of the rows."""
        return sum_of((cls({row.term: row.seconds}, row.host), 1.0) for row in rows)

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


class Clock(NamedTuple):
    """What decides the time of an operation besides the operation.

    element_bytes: the bytes of an element of weights and activations.
    mode: the way in which kernels run. is_fused: whether they are compiled.
    deterministic: whether attention has deterministic kernels.
    """

    hardware: Hardware
    element_bytes: int
    tp: Group
    cp: Group
    ep: Group
    mode: Mode
    is_fused: bool
    deterministic: bool

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware) -> Clock:
        """Returns the clock of a run."""
        t, training = config.parallel.tensor_model_parallel_size, config.training
        element_bytes = chosen("the precision", training.precision, ELEMENT_BYTES)
        is_fused = config.uses_compiler(hardware.device)
        mode = hardware.compiled if is_fused else hardware.eager
        if hardware.device == "cuda" and training.cuda_graph_impl != "none":
            # The same kernels, which the host launches as one.
            captured = hardware.captured
            mode = replace(mode, launch_s=captured.launch_s, replay_s=captured.replay_s)
        return cls(
            hardware,
            element_bytes,
            Group(t),
            Group(config.parallel.context_parallel_size, t),
            Group(
                config.parallel.expert_model_parallel_size, config.parallel.expert_tensor_parallel
            ),
            mode,
            is_fused,
            # The default is cuDNN's attention; both others are FlashAttention 2.
            training.deterministic_mode or config.model.attention_backend == "flash",
        )

    def row(
        self, operation: str, term: str, seconds: float, launches: float, **sizes: float
    ) -> Row:
        """Returns a row of so many launches. sizes: its FLOPs and bytes."""
        return Row(operation, term, seconds, launches * self.mode.launch_s, launches, **sizes)

    def forward(self, operation: Operation) -> Iterator[Row]:
        """Yields the rows of the forward of an operation."""
        yield self.pointwise(operation, MEMORY_BOUND, backward=False)
        for call in operation.calls:
            yield from self.call(operation, call, FORWARD_MATMULS)
        if operation.gradients_in_forward:
            yield from self._gradients(operation)

    def backward(self, operation: Operation) -> Iterator[Row]:
        """Yields the rows of the backward of an operation, without a replay."""
        yield self.pointwise(operation, MEMORY_BOUND, backward=True)
        rebuilt = [
            self._matmul(operation, one, BACKWARD_MATMULS, backward=True)
            for one in operation.rebuilds
        ]
        halves: list[list[Row]] = [[], []]
        if not operation.gradients_in_forward:
            rows = list(self._gradients(operation))
            halves = [rows[::2], rows[1::2]]
        yield from (*rebuilt, *halves[0], *halves[1])
        seconds = [sum(row.seconds for row in rows) for rows in (*halves, rebuilt)]
        if not operation.beside:
            yield from self._collectives(operation, operation.backward, sum(seconds))
            return
        for collective, half in zip(operation.backward, operation.beside, strict=True):
            beside = {"": 0.0, "input": seconds[0], "weight": seconds[1]}[half]
            exposed = self.exposed(self.hardware.collective_seconds(collective, self.tp), beside)
            yield self.row(operation.name, TENSOR_PARALLEL, exposed, COLLECTIVE_LAUNCHES)

    def call(self, operation: Operation, call: OperatorCall, term: str) -> Iterator[Row]:
        """Yields the rows of one call of an operation's forward, or of its replay.

        term: the term that the matmuls count in.
        """
        rows = [self._matmul(operation, one, term) for one in call.matmuls]
        yield from rows
        yield from self._collectives(operation, call.collectives, sum(row.seconds for row in rows))

    def pointwise(self, operation: Operation, term: str, *, backward: bool) -> Row:
        """Returns the row of the kernels of an operation besides matmuls and collectives."""
        num_bytes = float(operation.moved[backward])
        if operation.name == "loss" and self.is_fused:
            num_bytes *= self.hardware.loss_traffic
        launches, seconds = 0.0, self.hardware.memory_seconds(num_bytes, self.mode)
        if num_bytes:
            launches = self._launches(operation)[backward]
            seconds += launches * self.hardware.kernel_s
        if backward and not self.hardware.fused_accumulation:
            launches += ACCUMULATIONS * len(operation.parameters)
        return self.row(operation.name, term, seconds, launches, num_bytes=num_bytes)

    def _launches(self, operation: Operation) -> tuple[int, int]:
        name = operation.name
        if name in LAUNCHES:
            return LAUNCHES[name][self.is_fused]
        return NORM_LAUNCHES if name.endswith("layernorm") else OTHER_LAUNCHES

    def streamed(self, operation: str, term: str, num_bytes: float, launches: float = 1.0) -> Row:
        """Returns the row of kernels that stream through buffers of so many bytes."""
        seconds = self.hardware.memory_seconds(num_bytes) + launches * self.hardware.kernel_s
        return self.row(operation, term, seconds, launches, num_bytes=num_bytes)

    def exposed(self, seconds: float, beside: float) -> float:
        """Returns by how much a transfer delays the computation that runs beside it."""
        return seconds if self.hardware.shares_cores else max(0.0, seconds - beside)

    def in_parts(self, seconds: float, parts: int, beside: float) -> float:
        """Returns by how much copies in equal parts delay the computation beside them.

        Each part is ready when the same share of the computation is done, or is needed for the
        next one, so nothing runs beside one of the parts.
        """
        rest = (parts - 1) / parts
        return seconds / parts + self.exposed(rest * seconds, rest * beside)

    def reduced(self, seconds: float, parts: int, beside: float) -> float:
        """Returns by how much collectives in equal parts delay the computation beside them.

        They use memory and multiprocessors too, so computation hides a share of them at most.
        """
        return max(self.in_parts(seconds, parts, beside), (1 - self.hardware.overlap) * seconds)

    def _matmul(
        self, operation: Operation, matmul: Matmul, term: str, *, backward: bool = False
    ) -> Row:
        if not matmul.fused:
            seconds = self.hardware.matmul_seconds(matmul, self.element_bytes)
            return self.row(operation.name, term, seconds, 1.0, flops=matmul.flops)
        seconds = self.hardware.flash_seconds(
            matmul, self.element_bytes, backward=backward, deterministic=self.deterministic
        )
        # A flash kernel computes both matmuls of a forward, and all of a backward in two kernels.
        return self.row(operation.name, term, seconds, 0.5, flops=matmul.flops)

    def _gradients(self, operation: Operation) -> Iterator[Row]:
        """Yields the rows of dx = dy W^T and dW = x^T dy for each y = x W of the forward."""
        for call in operation.calls:
            for one in call.matmuls:
                of_weight = one._replace(m=one.k, k=one.m, groups=one.k_groups, k_groups=one.groups)
                for other in (one._replace(n=one.k, k=one.n), of_weight):
                    yield self._matmul(operation, other, BACKWARD_MATMULS, backward=True)

    def _collectives(
        self, operation: Operation, collectives: Iterable[Collective], matmuls: float
    ) -> Iterator[Row]:
        """Yields the row of collectives, of which only ring shifts run beside the matmuls.

        Core attention exchanges keys and values over context-parallel ranks. Other operations
        communicate with tensor-parallel ranks, and rows of experts with those of other experts.
        """
        in_core = operation.name == CORE
        term, group = (CONTEXT_PARALLEL, self.cp) if in_core else (TENSOR_PARALLEL, self.tp)
        shifts = waits = launches = 0.0
        for collective in collectives:
            if collective.over_experts:
                wait = self.hardware.collective_seconds(collective, self.ep)
                yield self.row(operation.name, EXPERT_PARALLEL, wait, COLLECTIVE_LAUNCHES)
                continue
            seconds = self.hardware.collective_seconds(collective, group)
            launches += COLLECTIVE_LAUNCHES
            if collective.kind == SHIFT:
                shifts += seconds
            else:
                waits += seconds
        if launches:
            yield self.row(operation.name, term, waits + self.exposed(shifts, matmuls), launches)
