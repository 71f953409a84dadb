"""The time of one operation of the description: forward, backward, and calls that a replay repeats.

A time is a number of seconds for each term. Terms add up: what runs beside something else counts
only with the seconds by which it takes longer. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from megatron_lite.config.checks import chosen
from megatron_lite.config.run import RunConfig
from megatron_lite.description.operations import SHIFT, Collective, Matmul, Operation, OperatorCall
from megatron_lite.description.self_attention import CORE
from megatron_lite.description.sizes import ELEMENT_BYTES
from megatron_lite.plan.hardware import Group, Hardware

FORWARD_MATMULS = "forward matmuls"
BACKWARD_MATMULS = "backward matmuls"
REPLAYED_MATMULS = "replayed matmuls"
MEMORY_BOUND = "memory-bound operations"
REPLAYED_MEMORY_BOUND = "replayed memory-bound operations"
TENSOR_PARALLEL = "tensor-parallel collectives"
CONTEXT_PARALLEL = "context-parallel collectives"


class Seconds(dict[str, float]):
    """Seconds by term. A sum has the terms of both, and a term that is missing has none."""

    def __missing__(self, term: str) -> float:
        return 0.0

    def __add__(self, other: Mapping[str, float]) -> Seconds:
        both = Seconds(self)
        for term, seconds in other.items():
            both[term] += seconds
        return both

    def times(self, number: float) -> Seconds:
        """Returns every term so many times."""
        return Seconds({term: number * seconds for term, seconds in self.items()})

    def total(self) -> float:
        """Returns the sum over all terms."""
        return sum(self.values())


class Clock(NamedTuple):
    """The machine and the groups of ranks that decide the time of an operation.

    element_bytes: the bytes of an element of weights and activations.
    """

    hardware: Hardware
    element_bytes: int
    tp: Group
    cp: Group

    @classmethod
    def of(cls, config: RunConfig, hardware: Hardware) -> Clock:
        """Returns the clock of a run."""
        t = config.parallel.tensor_model_parallel_size
        element_bytes = chosen("the precision", config.training.precision, ELEMENT_BYTES)
        return cls(
            hardware, element_bytes, Group(t), Group(config.parallel.context_parallel_size, t)
        )

    def forward(self, operation: Operation) -> Seconds:
        """Returns the time of the forward of an operation."""
        seconds = self.memory_bound(MEMORY_BOUND, operation.moved.forward)
        for call in operation.calls:
            seconds += self.call(operation, call, FORWARD_MATMULS)
        if operation.gradients_in_forward:
            seconds[BACKWARD_MATMULS] += self._input_gradients(operation)
            seconds[BACKWARD_MATMULS] += self._weight_gradients(operation)
        return seconds

    def call(self, operation: Operation, call: OperatorCall, term: str) -> Seconds:
        """Returns the time of one call of an operation's forward, or of its replay.

        term: the term that the matmuls count in.
        """
        matmuls = self._matmuls(call.matmuls)
        return Seconds({term: matmuls}) + self._collectives(operation, call.collectives, matmuls)

    def backward(self, operation: Operation) -> Seconds:
        """Returns the time of the backward of an operation, without a replay."""
        seconds = self.memory_bound(MEMORY_BOUND, operation.moved.backward)
        seconds[BACKWARD_MATMULS] = self._matmuls(operation.rebuilds)
        halves = {"": 0.0}
        if not operation.gradients_in_forward:
            halves["input"] = self._input_gradients(operation)
            halves["weight"] = self._weight_gradients(operation)
        seconds[BACKWARD_MATMULS] += sum(halves.values())
        if not operation.beside:
            return seconds + self._collectives(
                operation, operation.backward, seconds[BACKWARD_MATMULS]
            )
        for collective, half in zip(operation.backward, operation.beside, strict=True):
            seconds[TENSOR_PARALLEL] += self.exposed(
                self.hardware.collective_seconds(collective, self.tp), halves[half]
            )
        return seconds

    def memory_bound(self, term: str, num_bytes: int) -> Seconds:
        """Returns the time of kernels that read and write so many bytes."""
        if not num_bytes:
            return Seconds()
        return Seconds({term: self.hardware.memory_seconds(num_bytes) + self.hardware.kernel_s})

    def exposed(self, seconds: float, beside: float) -> float:
        """Returns by how much a transfer delays the computation that runs beside it."""
        return seconds if self.hardware.shares_cores else max(0.0, seconds - beside)

    def in_parts(self, seconds: float, parts: int, beside: float) -> float:
        """Returns by how much transfers in equal parts delay the computation beside them.

        Each part is ready when the same share of the computation is done, or is needed for the
        next one, so nothing runs beside one of the parts.
        """
        rest = (parts - 1) / parts
        return seconds / parts + self.exposed(rest * seconds, rest * beside)

    def _matmuls(self, matmuls: Iterable[Matmul]) -> float:
        return sum(self.hardware.matmul_seconds(one, self.element_bytes) for one in matmuls)

    def _input_gradients(self, operation: Operation) -> float:
        """Returns the time of dx = dy W^T for each y = x W of the forward."""
        return self._matmuls(one._replace(n=one.k, k=one.n) for one in _matmuls(operation))

    def _weight_gradients(self, operation: Operation) -> float:
        """Returns the time of dW = x^T dy for each y = x W of the forward."""
        return self._matmuls(one._replace(m=one.k, k=one.m) for one in _matmuls(operation))

    def _collectives(
        self, operation: Operation, collectives: Iterable[Collective], matmuls: float
    ) -> Seconds:
        """Returns the time of collectives, of which only ring shifts run beside the matmuls.

        Core attention exchanges keys and values over context-parallel ranks. All other operations
        communicate with tensor-parallel ranks.
        """
        in_core = operation.name == CORE
        term, group = (CONTEXT_PARALLEL, self.cp) if in_core else (TENSOR_PARALLEL, self.tp)
        shifts = waits = 0.0
        for collective in collectives:
            seconds = self.hardware.collective_seconds(collective, group)
            if collective.kind == SHIFT:
                shifts += seconds
            else:
                waits += seconds
        return Seconds({term: waits + self.exposed(shifts, matmuls)})


def _matmuls(operation: Operation) -> Iterator[Matmul]:
    for call in operation.calls:
        yield from call.matmuls
