"""What every parameter says of itself: its global shape, how it is split over TP ranks, how it starts.

A layer marks its parameters once; initialisation, gradient reduction, clipping, the optimizer and checkpoints read the mark.
A parameter split over t ranks along `tp_dim` in `tp_blocks` blocks (2 for swiglu's [gate; up], else 1):

    global   [ block 0: r0 r1 .. | block 1: r0 r1 .. ]        rank 0 holds [ block 0: r0 | block 1: r0 ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn


class Span(NamedTuple):
    """`length` rows along tp_dim that stand at `local_start` in the shard and at `global_start` in the whole tensor."""

    local_start: int
    global_start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """The facts of one parameter.

    global_shape: the unsharded shape, without vocabulary padding.
    tp_dim: the dim that is split over TP ranks, or None where every rank holds the same values.
    padded_length: length of tp_dim with padding, where it differs from the global shape; padding is zero and stays zero.
    tied: first and last pipeline stage hold it alike, and add their gradients. is_copy: the last stage's, which no figure of the
    whole model counts again.
    sum_grad_over_tp: each TP rank's gradient covers only its tokens or heads, so that the ranks' gradients must be added.
    init_std: standard deviation of the normal start; None starts at `init_value`.
    """

    global_shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_blocks: int = 1
    padded_length: int | None = None
    sum_grad_over_tp: bool = False
    tied: bool = False
    is_copy: bool = False
    init_std: float | None = None
    init_value: float = 0.0

    def local_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one rank's shard, padding included. ValueError where tp_dim does not divide."""
        if self.tp_dim is None:
            return self.global_shape
        length = self._padded()
        if length % (tp_size * self.tp_blocks):
            raise ValueError(f"a dim of {length} in {self.tp_blocks} blocks is not divisible by tensor-parallel size {tp_size}")
        shape = list(self.global_shape)
        shape[self.tp_dim] = length // tp_size
        return tuple(shape)

    def spans(self, tp_rank: int, tp_size: int) -> list[Span]:
        """Where the true (unpadded) rows of one rank's shard stand in the whole tensor. tp_dim must not be None."""
        assert self.tp_dim is not None
        block = self._padded() // self.tp_blocks
        part = block // tp_size
        spans = []
        for index in range(self.tp_blocks):
            start = index * block + tp_rank * part
            length = min(part, self.global_shape[self.tp_dim] - start)
            if length > 0:
                spans.append(Span(index * part, start, length))
        return spans

    def _padded(self) -> int:
        assert self.tp_dim is not None
        return self.global_shape[self.tp_dim] if self.padded_length is None else self.padded_length


def mark(parameter: nn.Parameter, spec: ParameterSpec) -> nn.Parameter:
    """Attaches the spec to the parameter and returns it."""
    parameter.parameter_spec = spec  # type: ignore[attr-defined]
    return parameter


def spec_of(parameter: Tensor) -> ParameterSpec:
    """The mark of a parameter. TypeError where a layer forgot it."""
    spec = getattr(parameter, "parameter_spec", None)
    if not isinstance(spec, ParameterSpec):
        raise TypeError(f"a parameter of shape {tuple(parameter.shape)} carries no ParameterSpec")
    return spec
