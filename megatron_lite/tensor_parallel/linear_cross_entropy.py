"""The loss of the output projection y = x A^T in chunks of tokens, without all logits at a time.

`vocab_parallel_linear_cross_entropy` takes the operands of the projection. It
computes the logits of one loss chunk at a time, [N, V/t] with N = --loss-chunk-size.

    two passes   forward    each chunk   logits = x A^T, row statistics
                            all rows     all-reduces of the statistics
                 backward   each chunk   logits again, overwritten by their gradient g
                                         dx = g A,  dA += g^T x
                            beside the last dA    all-reduce or reduce-scatter of dx
    one pass     forward    each chunk   logits, statistics, all-reduces, g, dx and dA as above
                 backward                (returns dx)

A linear layer has three matmuls; two passes have a fourth, for the logits in backward. dA sums over
tokens, so one pass needs the incoming gradient of each token's loss in forward.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import (
    all_gather_first_dim,
    start_all_reduce_,
    start_reduce_scatter_first_dim,
)
from megatron_lite.parallel.compiled import Gradients, Pair, Tensors, applied, at_least_float32
from megatron_lite.parallel.weight_gradient import (
    OwnSum,
    add_weight_product_,
    in_autocast_dtype,
    own_sum,
    weight_gradient,
)

from .cross_entropy import (
    Columns,
    LocalLabels,
    RowStatistics,
    combined,
    local_labels,
    row_statistics,
    write_gradient_,
)


def vocab_parallel_linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    columns: Columns,
    *,
    loss_chunk_size: int,
    sequence_parallel: bool,
    grad_losses: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Returns the losses [s, b] of the output projection, without ever holding all logits.

    The result equals vocab_parallel_cross_entropy of parallel_linear. Each loss may have its
    own incoming gradient. Raises RuntimeError under create_graph.

    hidden_states: [s, b, h], under sequence parallelism [s/t, b, h].
    weight: [padded V / t, h].
    labels: see vocab_parallel_cross_entropy.
    loss_chunk_size: the number of tokens that have logits at a time. The s b tokens are taken in
        this order, and the last chunk may be shorter.
    grad_losses: returns the incoming gradient [s, b] that backward will bring. Forward then
        computes the gradients in the same pass, if gradients are on and the weight has a sum of
        gradients (parallel/weight_gradient.py). It adds dA to that sum at once, so each such
        forward needs its backward in the same step. Backward ignores its incoming gradient.

    In one pass the bits of dx and dA are those of two passes. It issues the two all-reduces once
    for each chunk, and the collective of dx in forward. It keeps dx alone.

    In two passes it issues the collectives of those two functions, in the same number at every
    chunk size. It keeps hidden_states and the weight. In place of the logits it keeps the labels,
    one byte per label and this rank's share of each softmax.

    dA is summed over the chunks in float32 (float64). On a CPU a bf16 weight has each chunk's part
    rounded to bf16 before the sum; CUDA adds it unrounded. The sum is a [V/t, h] float32 tensor
    that lives until autograd has added it to the weight's gradient. If the weight has a float32 sum
    (parallel/weight_gradient.py), each chunk's part is added to it at once, and that tensor does
    not exist.

    A product of fewer rows may sum in another order, so chunks can change low bits. In bf16 the
    losses and the gradient of hidden_states are as exact as without chunks. Where the parts are
    rounded, the error of dA is at most 1.5 times that of the unchunked dA, and its norm is right
    within 2^-9. A test compares them with float64 on a grid.
    """
    hidden_states, weight = in_autocast_dtype(hidden_states, weight)
    needed = hidden_states.requires_grad, weight.requires_grad
    head = _Head(columns, loss_chunk_size, sequence_parallel, own_sum(weight), needed)
    pair = Pair(head.two_passes, head.backward, slice(2))
    # Without a backward nothing may be added. The weight is an argument also of one pass, although
    # its gradient is None: autograd runs the hooks of the weight in backward, once the other parts
    # of its gradient have arrived too. Those hooks send the sum to other ranks.
    if grad_losses is not None and head.add is not None and torch.is_grad_enabled():
        pair = Pair(partial(head.one_pass, grad_losses), lambda _, grad: grad, slice(0))
    return applied(pair, hidden_states, weight, labels)


class _Head(NamedTuple):
    """The output projection in chunks of loss_chunk_size tokens.

    add: the weight's own sum of gradients, if it has one.
    needed: whether the hidden states and the weight need a gradient.
    """

    columns: Columns
    loss_chunk_size: int
    sequence_parallel: bool
    add: OwnSum | None
    needed: tuple[bool, bool]

    def two_passes(self, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
        """Returns the losses [s, b], and what `backward` needs besides the operands."""
        local, parts = local_labels(labels, self.columns), []
        for tokens, logits in self.logits(self.whole(hidden_states), weight):
            parts.append(row_statistics(logits, local.of(tokens), self.columns))
            del logits  # which would hold the buffer after the loop
        statistics = RowStatistics(*map(torch.cat, zip(*parts, strict=True)))
        losses, share = combined(statistics, local, self.columns)
        return losses.view(labels.shape), *local, share

    def backward(
        self,
        grad_output: Tensor,
        hidden_states: Tensor,
        weight: Tensor,
        column: Tensor,
        here: Tensor,
        share: Tensor,
    ) -> Gradients:
        """Returns the gradients of `two_passes`."""
        grad, local = grad_output.flatten(), LocalLabels(column, here)

        def write_(tokens: slice, logits: Tensor) -> None:
            write_gradient_(logits, grad[tokens], share[tokens], local.of(tokens), self.columns)

        return self.gradients(hidden_states, weight, write_, *self.needed)

    def one_pass(
        self,
        grad_losses: Callable[[], Tensor],
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
    ) -> Gradients:
        """Returns the losses [s, b], and the gradient of the hidden states."""
        columns, local = self.columns, local_labels(labels, self.columns)
        grad = grad_losses().flatten()
        losses = torch.empty_like(grad)

        def write_(tokens: slice, logits: Tensor) -> None:
            own = local.of(tokens)
            # no name holds the statistics, so they are freed before the gradient is made
            losses[tokens], share = combined(row_statistics(logits, own, columns), own, columns)
            write_gradient_(logits, grad[tokens], share, own, columns)

        return losses.view(labels.shape), self.gradients(hidden_states, weight, write_)[0]

    def whole(self, hidden_states: Tensor) -> Tensor:
        """Returns the hidden states of all tokens, [s, b, h]."""
        if not self.sequence_parallel:
            return hidden_states
        return all_gather_first_dim(hidden_states, self.columns.tp_group)

    def logits(self, whole: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields each chunk's tokens, and their logits [N, V/t]. All chunks share one buffer."""
        rows = whole.flatten(0, 1)
        num_rows = rows.shape[0]
        buffer = rows.new_empty((min(self.loss_chunk_size, num_rows), weight.shape[0]))
        for start in range(0, num_rows, self.loss_chunk_size):
            tokens = slice(start, min(start + self.loss_chunk_size, num_rows))
            logits = buffer[: tokens.stop - start]
            yield tokens, self.columns.capped_(torch.mm(rows[tokens], weight.t(), out=logits))

    def gradients(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        write_: Callable[[slice, Tensor], None],
        needs_input: bool = True,
        needs_weight: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of the hidden states and of the weight, each if it is needed.

        The weight's is None if it is added to the weight's own sum.
        write_: overwrites the logits of some tokens with their gradient.
        """
        whole = self.whole(hidden_states)
        rows = whole.flatten(0, 1)
        grad_rows = torch.empty_like(rows) if needs_input else None
        grad_weight, reduction = None, None
        if needs_weight and self.add is None:
            dtype = at_least_float32(rows.dtype)
            grad_weight = torch.empty_like(weight, dtype=dtype)
        for tokens, logits in self.logits(whole, weight):
            write_(tokens, logits)
            if grad_rows is not None:
                torch.mm(logits, weight, out=grad_rows[tokens])
                if tokens.stop == rows.shape[0]:  # the reduction runs beside the last dA
                    start = (
                        start_reduce_scatter_first_dim
                        if self.sequence_parallel
                        else start_all_reduce_
                    )
                    reduction = start(grad_rows.view(whole.shape), self.columns.tp_group)
            if grad_weight is not None:
                add_weight_product_(grad_weight, rows[tokens], logits, first=tokens.start == 0)
            elif needs_weight:
                weight_gradient(self.add, rows[tokens], logits)
            del logits
        return None if reduction is None else reduction.wait(), grad_weight
