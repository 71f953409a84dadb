"""What the optimizer works on: pieces of parameters, and the layout over data-parallel ranks that they come from.

    replicated.py   a piece is a whole parameter; ranks sum their gradients and make the same update
    zero1.py        a piece is what this rank's share of a bucket covers of a parameter; weights are gathered after the update
    fsdp.py         a piece is this rank's rows of a parameter, which is all that it holds of it

Whole here is the parameter as one rank of a tensor-parallel group holds it: pieces know nothing of tensor parallelism, except
that some gradients are summed over it.
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


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements [start, stop) of a flattened parameter, never none.

    master: their float32 (float64) weights, which the optimizer updates: shaped like the parameter if the piece is all of it.
    Its `.grad` is the gradient, complete once the layout has reduced. decays: whether weight decay applies.
    """

    name: str
    spec: ParameterSpec
    start: int
    stop: int
    master: Tensor
    decays: bool

    @property
    def grad(self) -> Tensor:
        """The gradient."""
        assert self.master.grad is not None, self.name
        return self.master.grad

    @torch.no_grad()
    def take_(self, target: Tensor, whole: Tensor) -> None:
        """Overwrites `target`, shaped like the master, with this piece's elements of a whole tensor."""
        target.copy_(whole.reshape(-1)[self.start : self.stop].view(target.shape))


class Gradients(Protocol):
    """Where backward leaves its gradients. Every rank must reach every call.

    own_norm: 2-norm of this rank's gradients before they were summed over data-parallel ranks, 0-d; None where nobody watches.
    """

    own_norm: Tensor | None

    def watch(self) -> None:
        """Has `own_norm` filled from now on, where there are data-parallel ranks and the sums are ours."""

    def forget(self) -> None:
        """Begins a step: the gradients so far count no more."""

    def sync_next_backward(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """The next gradient of these parameters (of all) is the last of this step, and may be sent as soon as it is there."""

    def reduce_(self) -> None:
        """Completes the gradients of all pieces, after the last backward."""


class Layout(Protocol):
    """Where a model's gradients and master weights live. Every rank must reach every call but `set_weight`: most send."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """This rank's, in the order of the model's parameters."""

    @property
    def gradients(self) -> Gradients:
        """Of all pieces."""

    @property
    def shard_group(self) -> ProcessGroup | None:
        """The ranks that hold different pieces; None where each holds them all."""

    @property
    def replicates_weights(self) -> bool:
        """Whether every rank of `data_group` holds all weights."""

    @property
    def keeps_masters(self) -> bool:
        """Whether masters are more precise than the weights that a checkpoint holds, and so are saved beside them."""

    def publish(self) -> None:
        """Makes the updated masters the weights that the model computes with, or begins to: its modules wait for the rest."""

    def finish(self) -> None:
        """Waits for what `publish` has begun."""

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """The whole tensor of which each rank holds the part of its piece (None: no piece), such as a moment."""

    def weight(self, name: str) -> Tensor:
        """A whole weight, as a checkpoint holds it."""

    def set_weight(self, name: str, values: Tensor) -> None:
        """Overwrites a weight with a whole tensor, and its master without rounding."""


def new_piece(name: str, parameter: nn.Parameter, master: Tensor, *, start: int, stop: int) -> Piece:
    """A piece of a parameter. Megatron's rule: biases and one-dimensional parameters (norms) do not decay."""
    return Piece(name=name, spec=spec_of(parameter), start=start, stop=stop, master=master,
                 decays=parameter.dim() > 1 and not name.endswith(".bias"))


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype need a float32 master."""
    return torch.promote_types(dtype, torch.float32) != dtype


def gather_parts(part: Tensor | None, lengths: Sequence[int], group: ProcessGroup, *, like: Tensor) -> Tensor:
    """[sum of lengths]: the parts of all ranks one after the other; the i-th has lengths[i] elements (None: 0).

    One all-gather of the longest length. like: gives dtype and device.
    """
    padded = torch.zeros(max(lengths), dtype=like.dtype, device=like.device)
    if part is not None:
        padded[: part.numel()].copy_(part.detach().reshape(-1))
    gathered = all_gather_first_dim(padded, group).view(len(lengths), -1)
    return torch.cat([row[:length] for row, length in zip(gathered, lengths, strict=True)])
