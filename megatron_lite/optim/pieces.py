"""Pieces of parameters, on which the optimizer works, and the layouts over data-parallel ranks.

    replicated.py   a piece is a whole parameter; the ranks sum their gradients and make the same
                    update
    zero1.py        a piece is the part of a parameter in this rank's part of a bucket; the weights
                    are gathered after the update
    fsdp_layout.py  a piece is this rank's rows of a parameter; the rank holds no other rows

A "whole" parameter is the shard that one tensor-parallel rank holds. Pieces do not depend on tensor
parallelism, except that some gradients are summed over its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_lite.parallel.collectives import all_gather_first_dim
from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of

# The weights that --decoupled-lr is for, by the ends of their names.
ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a flattened parameter; at least one.

    master: their float32 (float64) weights, which the optimizer updates. It has the parameter's
        shape if the piece is the whole parameter. Its `.grad` is the gradient, which is complete
        after the layout's `reduce_`.
    decays: whether weight decay applies.
    at_an_end: whether it belongs to the word embedding or the output layer (--decoupled-lr).
    """

    name: str
    spec: ParameterSpec
    start: int
    stop: int
    master: Tensor
    decays: bool
    at_an_end: bool = False

    @property
    def grad(self) -> Tensor:
        """The gradient of the master."""
        assert self.master.grad is not None, self.name
        return self.master.grad

    @torch.no_grad()
    def take_(self, target: Tensor, whole: Tensor) -> None:
        """Overwrites `target` with this piece's elements of a whole tensor.

        target: a tensor in the master's shape.
        """
        target.copy_(whole.reshape(-1)[self.start : self.stop].view(target.shape))


class Gradients(Protocol):
    """The gradients that backward produces. Every rank must make every call.

    own_norm: the 2-norm, 0-d, of this rank's gradients before the sum over data-parallel ranks. It
        is None without `measure_own_norm`.
    """

    own_norm: Tensor | None

    def measure_own_norm(self) -> None:
        """Makes each `reduce_` set `own_norm`.

        It has no effect without other data-parallel ranks, or under FSDP2.
        """

    def forget(self) -> None:
        """Begins a step: drops the gradients so far."""

    def sync_next_backward(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Declares that the next gradient of these parameters is the last of this step.

        Its reduction may begin as soon as it arrives. parameters: None for all.
        """

    def reduce_(self) -> None:
        """Completes the gradients of all pieces, after the last backward."""


class Layout(Protocol):
    """The place of a model's gradients and master weights.

    Every rank must make every call except `set_weight`, because most calls issue collectives.
    """

    @property
    def pieces(self) -> Sequence[Piece]:
        """This rank's pieces, in the order of the model's parameters."""

    @property
    def gradients(self) -> Gradients:
        """The gradients of all pieces."""

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The ranks that hold different pieces; None if every rank holds all pieces."""

    @property
    def replicates_weights(self) -> bool:
        """Tells whether every rank of `dp_cp_group` holds all weights."""

    @property
    def keeps_masters(self) -> bool:
        """Tells whether masters are more precise than a checkpoint's weights, and so are saved
        too."""

    def publish(self) -> None:
        """Makes the updated masters the weights that the model computes with.

        It may return while gathers run: the forward of each module waits for its own weights.
        """

    def finish(self) -> None:
        """Waits for the gathers that `publish` has begun."""

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """Returns a whole tensor, such as a moment, from the parts of all ranks.

        value: this rank's part, the elements of its piece; None if it has no piece.
        """

    def weight(self, name: str) -> Tensor:
        """Returns a whole weight, as a checkpoint holds it."""

    def set_weight(self, name: str, values: Tensor) -> None:
        """Overwrites a weight with a whole tensor, and its master without rounding."""


def new_piece(
    name: str, parameter: nn.Parameter, master: Tensor, *, start: int, stop: int
) -> Piece:
    """Returns a piece of a parameter.

    By Megatron's rule biases and one-dimensional parameters (norms) do not decay.
    """
    return Piece(
        name=name,
        spec=spec_of(parameter),
        start=start,
        stop=stop,
        master=master,
        decays=parameter.dim() > 1 and not name.endswith(".bias"),
        at_an_end=name.endswith(ENDS),
    )


def is_rounded(dtype: torch.dtype) -> bool:
    """Returns whether weights of this dtype need a float32 master."""
    return torch.promote_types(dtype, torch.float32) != dtype


def gather_parts(
    part: Tensor | None, lengths: Sequence[int], group: ProcessGroup, *, like: Tensor
) -> Tensor:
    """Returns the parts of all ranks one after the other: [sum of lengths].

    The function issues one all-gather of parts padded to the longest length.
    part: this rank's part; None if it is empty. Rank i's part has lengths[i] elements.
    like: a tensor with the dtype and the device of the parts.
    """
    padded = torch.zeros(max(lengths), dtype=like.dtype, device=like.device)
    if part is not None:
        padded[: part.numel()].copy_(part.detach().reshape(-1))
    gathered = all_gather_first_dim(padded, group).view(len(lengths), -1)
    return torch.cat([row[:length] for row, length in zip(gathered, lengths, strict=True)])
