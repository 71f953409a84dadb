"""The layout in which each data-parallel rank holds FSDP2's rows of the model: `--use-torch-fsdp2`.

The sharded parameters are the float32 masters themselves, since FSDP2 rounds the weights that it
gathers. It reduces the gradients of every micro-batch while backward runs, and adds up the rows'
gradients in float32. Before the reduction gradients have the dtype of the gathered weights. The
gradient of a tied weight is therefore the sum of two rounded ones. Norm, clipping and the sums over
tensor-parallel ranks are our own code, because torch's functions know one mesh only.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lite.optim.layouts import Piece, gather_parts
from megatron_lite.parallel.collectives import all_reduce_
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.torch_internals import address_of, foreach_copy_
from megatron_lite.parallel.weights import gathered_dtype


class FullySharded:
    """The Layout, and its Gradients, of a model that FSDP2 has sharded (parallel/fsdp.py).

    In a step it issues only the sums over the TP ranks and over the pipeline's first and last
    stage. FSDP2 issues the others.
    """

    def __init__(self, model: nn.Module, parallel: ParallelState) -> None:
        assert parallel.dp_cp_group is not None
        self._parallel, self.shard_group = parallel, parallel.dp_cp_group
        self.gradients = self
        self.own_norm: Tensor | None = None
        self.replicates_weights = False
        self.keeps_masters = any(
            gathered_dtype(parameter) != parameter.dtype for parameter in model.parameters()
        )
        self._parameters = {
            name: _sharded(name, parameter) for name, parameter in model.named_parameters()
        }
        self.pieces: list[Piece] = []
        for name, parameter in model.named_parameters():
            rows = self._rows(name)
            start = sum(self._lengths(name)[: parallel.dp_cp_rank])
            if rows.numel():
                self.pieces.append(Piece.of(name, parameter, rows, start=start))

    def measure_own_norm(self) -> None:
        """Does nothing: FSDP2 sums the gradients before anyone can read them."""

    def forget(self) -> None:
        """Implements GradBuffer.forget. Frees the rows' gradients, those of FSDP2 and those of
        the optimizer."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for piece in self.pieces:
            piece.master.grad = None

    def sync_next_backward(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Does nothing: FSDP2 reduces in every backward."""

    def reduce_(self) -> None:
        """Implements GradBuffer.reduce_. Issues one all-reduce over TP for all partial gradients
        together.

        A tied weight's gradient needs another all-reduce, over the first and last stage.
        """
        # A parameter that took no part in the step has no gradient. Its piece gets zeros.
        for piece in self.pieces:
            self._follow(piece)
            grad = self._parameters[piece.name].grad
            piece.master.grad = (
                grad.to_local() if isinstance(grad, DTensor) else torch.zeros_like(piece.master)
            )
        partial = [piece.grad for piece in self.pieces if piece.spec.sum_grad_over_tp]
        if partial and self._parallel.tp_group is not None:
            summed = all_reduce_(
                torch.cat([grad.reshape(-1) for grad in partial]), self._parallel.tp_group
            )
            parts = summed.split([grad.numel() for grad in partial])
            foreach_copy_(
                partial, [part.view(grad.shape) for part, grad in zip(parts, partial, strict=True)]
            )
        for piece in self.pieces:
            if piece.spec.tied:
                all_reduce_(piece.grad, self._parallel.embedding_group)

    def publish(self) -> None:
        """Does nothing: the next forward gathers the masters themselves."""

    def finish(self) -> None:
        """Does nothing, because `publish` starts no collective."""

    def whole(self, name: str, value: Tensor | None) -> Tensor:
        """Implements Replicated.whole. Issues one all-gather."""
        parameter = self._parameters[name]
        return gather_parts(value, self._lengths(name), self.shard_group, like=parameter).view(
            parameter.shape
        )

    def weight(self, name: str) -> Tensor:
        """Implements Replicated.weight. Issues one all-gather."""
        return self.whole(name, self._rows(name)).to(gathered_dtype(self._parameters[name]))

    def set_weight(self, name: str, values: Tensor) -> None:
        """Implements Replicated.set_weight."""
        for piece in self.pieces:
            if piece.name == name:
                piece.take_(piece.master, values)

    def _follow(self, piece: Piece) -> None:
        """Makes the master the rows that FSDP2 gathers.

        torch 2.8 and 2.9 copy the rows of an uneven shard to new memory in the first forward.
        """
        rows = self._rows(piece.name)
        if address_of(rows.untyped_storage()) != address_of(piece.master.untyped_storage()):
            piece.master.data = rows.view(piece.master.shape)

    @torch.no_grad()
    def _rows(self, name: str) -> Tensor:
        return self._parameters[name].to_local().detach()

    def _lengths(self, name: str) -> list[int]:
        """Returns how many elements each rank holds. FSDP2 splits the rows like torch.chunk."""
        shape = self._parameters[name].shape
        size, row = self.shard_group.size(), shape[1:].numel()
        rows = -(-shape[0] // size)
        return [max(0, min(rows, shape[0] - rank * rows)) * row for rank in range(size)]


def _sharded(name: str, parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor), f"{name} is not sharded: fully_shard_ comes first"
    return parameter
