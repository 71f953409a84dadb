"""The description of a parameter: its global shape, its split over TP ranks, its initial values.

A layer attaches the description to its parameters once. Initialisation, gradient reduction,
clipping, the optimizer and checkpoints read it. A parameter is split over t ranks along `tp_dim`,
in `tp_blocks` blocks (2 for swiglu's [gate; up], else 1):

    global         [ block 0: r0 r1 .. | block 1: r0 r1 .. ]
    rank 0 holds   [ block 0: r0 | block 1: r0 ]
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

Marked = TypeVar("Marked", bound=Tensor)


class Span(NamedTuple):
    """A range of rows along tp_dim, with its place in the shard and in the whole tensor."""

    local_start: int
    global_start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """The description of one parameter.

    global_shape: the unsharded shape, without vocabulary padding.
    tp_dim: the dim that is split over TP ranks, or None if every rank holds the same values.
    tp_blocks: the number of blocks along tp_dim, each of which is split over the ranks.
    padded_length: the length of tp_dim with padding, if it differs from the global shape. Padding
        is zero and stays zero.
    sum_grad_over_tp: whether each TP rank's gradient covers only its tokens or heads, so that the
        ranks' gradients must be summed.
    of_experts: whether dim 0 is the experts of a layer, which expert-parallel ranks share out. The
        groups of such a parameter are those of `ParallelState.experts`.
    matrices: how the rows of a linear layer's weight form matrices. Each number is the number of
        rows of one matrix, and the pattern repeats down the weight.
        (1,): the weight is one matrix.
        (q d, d, d): the query, key and value rows of linear_qkv, query group by query group.
        (): any other parameter (embeddings, output weight, norms, biases).
    tied: whether the first and the last pipeline stage both hold it and sum their gradients.
    is_copy: whether it is the last stage's copy of a tied parameter. Figures of the whole model
        count the parameter once, without the copy.
    init_std: the standard deviation of the normal initial values. None: all are `init_value`.
    """

    global_shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_blocks: int = 1
    padded_length: int | None = None
    sum_grad_over_tp: bool = False
    of_experts: bool = False
    matrices: tuple[int, ...] = ()
    tied: bool = False
    is_copy: bool = False
    init_std: float | None = None
    init_value: float = 0.0

    def local_shape(self, tp_size: int, ep_size: int = 1) -> tuple[int, ...]:
        """Returns the shape of one rank's shard, padding included.

        ep_size: the number of expert-parallel ranks, which counts for experts only.

        Raises ValueError if tp_dim is not divisible by tp_size times tp_blocks.
        """
        shape = list(self.global_shape)
        if self.of_experts:
            shape[0] //= ep_size
        if self.tp_dim is None:
            return tuple(shape)
        length = self._padded()
        if length % (tp_size * self.tp_blocks):
            raise ValueError(
                f"a dim of {length} in {self.tp_blocks} blocks is not divisible by "
                f"tensor-parallel size {tp_size}"
            )
        shape[self.tp_dim] = length // tp_size
        return tuple(shape)

    def spans(self, tp_rank: int, tp_size: int) -> list[Span]:
        """Returns the places of the true (unpadded) rows of one rank's shard in the whole tensor.

        tp_dim must not be None.
        """
        assert self.tp_dim is not None
        block = self._padded() // self.tp_blocks
        part = block // tp_size
        spans = []
        for index in range(self.tp_blocks):
            start = index * block + tp_rank * part
            length = min(part, self.global_shape[self.tp_dim] - start)
            if length > 0:  # else the rank's part of the block is padding alone
                spans.append(Span(index * part, start, length))
        return spans

    def _padded(self) -> int:
        assert self.tp_dim is not None
        return self.padded_length or self.global_shape[self.tp_dim]


def mark(parameter: Marked, spec: ParameterSpec) -> Marked:
    """Attaches the spec to the parameter, or to a buffer that checkpoints save, and returns it."""
    parameter.parameter_spec = spec  # type: ignore[attr-defined]
    return parameter


def spec_of(parameter: Tensor) -> ParameterSpec:
    """Returns the spec that a layer has attached to a parameter."""
    spec: ParameterSpec = parameter.parameter_spec  # type: ignore[attr-defined]
    return spec


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of a model, and its buffers that carry a spec, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: one for name, one in tensors.items() if hasattr(one, "parameter_spec")}
