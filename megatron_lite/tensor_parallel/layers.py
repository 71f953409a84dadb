"""Linear layers and the token embedding, sharded over the TP group.

    ColumnParallelLinear   Y = X A^T       A split by output rows      Y is split by columns
                                           [ A_0 ; A_1 ]
    RowParallelLinear      Y = X A^T + b   A split by input columns    partial Ys are summed,
                                           [ A_0 | A_1 ]               and b is added once

Between the two layers nothing is communicated. Without sequence parallelism, X of the first and Y
of the second are [s, b, ...], the same on every rank. The sum is then an all-reduce. With sequence
parallelism they are [s/t, b, ...], and the sum is a reduce-scatter. The layers leave their
parameters uninitialised; `initialize.py` fills a whole model from the parameters' specs.

The matmuls have a handwritten backward. It lets a layer keep less, and overlaps collectives with
matmuls. `||` means that a collective runs beside a matmul.

    column-parallel: y = x A^T, A split by output rows
        sequence parallel   forward    gather x [s/t] -> [s],  y = x A^T    keeps the [s/t] of x
                            backward   gather x again     ||  dx = dy A,  then
                                       reduce-scatter dx  ||  dA = dy^T x
        else                backward   dx = dy A,  then
                                       all-reduce dx      ||  dA = dy^T x

    row-parallel: y = sum over the ranks of x A^T, plus b; A split by input columns
        forward    partial = x A^T,  all-reduce or reduce-scatter partial,  + b     keeps x and A
        backward   gather dy under sequence parallelism,  dx = dy A,  dA = dy^T x,
                   db = sum of this rank's dy

The gathered input is not stored (2205.05198 sec. 4.2.2). A group of None issues no collective.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel.collectives import (
    Group,
    all_gather_first_dim,
    all_reduce,
    all_reduce_,
    reduce_scatter_first_dim,
    results_may_be_kept,
    start_all_gather_first_dim,
    start_all_reduce_,
    start_reduce_scatter_first_dim,
)
from megatron_lite.parallel.compiled import Gradients, Pair, applied
from megatron_lite.parallel.weight_gradient import (
    LOOKUP_ATTRIBUTE,
    OwnSum,
    adds_unrounded,
    in_autocast_dtype,
    own_sum,
    weight_gradient,
)

from .mappings import reduce_from_tensor_parallel_region, reduce_scatter_to_sequence_parallel_region
from .rank_context import RankContext


def parallel_linear(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    tp_group: Group,
    sequence_parallel: bool,
    is_row: bool = False,
    skip_tail: bool = False,
) -> Tensor:
    """Returns x A^T plus the bias of a column-parallel layer, or of a row-parallel one if `is_row`.

    Column: this rank's output features of all tokens, [s, b, m/t]. hidden_states: [s, b, n], under
    sequence parallelism [s/t, b, n]. weight: [m/t, n]. bias: [m/t].
    Row: the sum over the TP ranks, plus the bias once: [s, b, m], under sequence parallelism
    [s/t, b, m]. hidden_states: [s, b, n/t]. weight: [m, n/t]. bias: [m].
    Collectives are in the module's table. Keeps hidden_states and the weight.
    skip_tail: builds only the graph, without matmul and collective, for a replay whose output is
        never read. Backward does not read the output. The values of the result are undefined.
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        hidden_states, weight, bias = in_autocast_dtype(hidden_states, weight, bias)
    return _ParallelMatmul.apply(
        hidden_states, weight, bias, tp_group, sequence_parallel, own_sum(weight), is_row, skip_tail
    )


class _ParallelMatmul(torch.autograd.Function):
    """x A^T of a column- or a row-parallel layer, with the collectives of the module's table."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp_group: Group,
        sequence_parallel: bool,
        add: OwnSum | None,
        is_row: bool,
        skip_tail: bool,
    ) -> Tensor:
        ctx.tp_group, ctx.sequence_parallel = tp_group, sequence_parallel
        ctx.add, ctx.is_row = add, is_row
        ctx.save_for_backward(hidden_states, weight)
        if skip_tail:
            # One element, expanded: the result has the right shape and takes no memory.
            s, *others = hidden_states.shape[:-1]
            rows = s // tp_group.size() if sequence_parallel and tp_group is not None else s
            return hidden_states.new_empty(()).expand(rows, *others, weight.shape[0])
        if is_row and tp_group is not None:
            output, is_kept = F.linear(hidden_states, weight), results_may_be_kept()
            if sequence_parallel:
                output = reduce_scatter_first_dim(output, tp_group)
            else:
                output = (all_reduce if is_kept else all_reduce_)(output, tp_group)
            if bias is None:
                return output
            # A result that a policy keeps must not be overwritten.
            return output + bias if is_kept else output.add_(bias)
        if sequence_parallel:
            hidden_states = all_gather_first_dim(hidden_states, tp_group)
        return F.linear(hidden_states, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Gradients:
        hidden_states, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Under sequence parallelism a row-parallel layer added its bias to this rank's tokens only.
        # The gradient of the bias therefore uses dy before the gather.
        own_grad, gather, reduction = grad_output, None, None
        if ctx.sequence_parallel and ctx.is_row:
            grad_output = all_gather_first_dim(grad_output, ctx.tp_group)
        elif ctx.sequence_parallel and needs_weight:
            gather = start_all_gather_first_dim(hidden_states, ctx.tp_group)
        # dx comes first: the gather of x runs beside this matmul, and dx is on its way to the other
        # ranks while dA is computed.
        grad_input = grad_output.matmul(weight) if needs_input else None
        whole = hidden_states if gather is None else gather.wait()
        if grad_input is not None and not ctx.is_row:
            start = start_reduce_scatter_first_dim if ctx.sequence_parallel else start_all_reduce_
            reduction, grad_input = start(grad_input, ctx.tp_group), None
        grad_weight = weight_gradient(ctx.add, whole, grad_output) if needs_weight else None
        grad_bias = None
        if needs_bias:
            # not while torch's compiler traces this: it would trace the product that is tried
            wide = not torch.compiler.is_compiling() and adds_unrounded(
                own_grad.device, own_grad.dtype
            )
            grad_bias = own_grad.flatten(0, -2).sum(0, dtype=torch.float32 if wide else None)
        # The wait comes last, so that dA and the bias's gradient are computed beside the reduction.
        if reduction is not None:
            grad_input = reduction.wait()
        return grad_input, grad_weight, grad_bias, *[None] * 5


class _ParallelLinear(nn.Module):
    """A linear layer whose weight [output_size, input_size] is sharded along `tp_dim`.

    tp_blocks: the rows form this many blocks, and each block is split over the ranks.
    padded_output_size: the number of rows to split, if it is greater than output_size (a padded
        vocabulary; without bias).
    matrices: see ParameterSpec; () for an output weight.
    skip_bias_add: whether the next kernel adds the bias (`skipped_bias`).
    """

    tp_dim: int | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        init_std: float,
        context: RankContext,
        tp_blocks: int = 1,
        padded_output_size: int | None = None,
        matrices: tuple[int, ...] = (1,),
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__()
        self.context, self.skip_bias_add = context, skip_bias_add
        new = partial(context.new_parameter, output_size, tp_blocks=tp_blocks)
        self.weight = new(
            input_size,
            tp_dim=self.tp_dim,
            padded_length=padded_output_size,
            matrices=matrices,
            init_std=init_std,
            sum_grad_over_tp=context.sequence_parallel and self.tp_dim is None,
        )
        sums = context.sequence_parallel and self.tp_dim != 0
        of_bias = dict(tp_dim=None if self.tp_dim else self.tp_dim, sum_grad_over_tp=sums)
        self.bias = new(**of_bias) if bias else None

    @property
    def skipped_bias(self) -> nn.Parameter | None:
        """The bias that `forward` does not add; None if there is none."""
        return self.bias if self.skip_bias_add else None

    def forward(
        self,
        hidden_states: Tensor,
        skip_tail: bool = False,
        function: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Returns the product.

        skip_tail: builds only the graph, for a replay whose output is never used. It runs neither
            the matmul nor the collective, and the values are undefined. For row-parallel layers.
        function: `function(hidden_states, weight)` is returned in place of the product, for example
            the loss in chunks (linear_cross_entropy.py), which never holds the whole product.
        """
        if function is not None:
            return function(hidden_states, self.weight)
        is_split = self.tp_dim is not None
        return parallel_linear(
            hidden_states,
            self.weight,
            None if self.skip_bias_add else self.bias,
            tp_group=self.context.tp_group if is_split else None,
            sequence_parallel=self.context.sequence_parallel and is_split,
            is_row=self.tp_dim == 1,
            skip_tail=skip_tail,
        )


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are sharded over the TP group.

    Input [s, b, input_size], under sequence parallelism [s/t, b, input_size]. Output
    [s, b, output_size/t]. Weight [output_size/t, input_size], bias [output_size/t].

    Forward issues an all-gather of the input under sequence parallelism, else no collective.
    Backward issues an all-reduce of the input's gradient. Under sequence parallelism it issues the
    all-gather again and a reduce-scatter instead. Keeps the input as received: [s/t] or [s].
    """

    tp_dim = 0


class ReplicatedLinear(_ParallelLinear):
    """A linear layer that every TP rank holds whole: [.., n] -> [.., m].

    Under sequence parallelism each rank runs it on its own tokens, so its gradient is summed over
    the ranks. Issues no collective. Keeps the input.
    """

    tp_dim = None


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are sharded over the TP group.

    Input [s, b, input_size/t]. Output [s, b, output_size], under sequence parallelism
    [s/t, b, output_size]. Weight [output_size, input_size/t].
    The bias [output_size] is whole on every rank and is added once, after the sum. Under sequence
    parallelism each rank adds it to its own tokens only, so its gradient is summed over the ranks.

    Forward issues an all-reduce of the output, or a reduce-scatter under sequence parallelism.
    Backward issues an all-gather under sequence parallelism, else no collective. Keeps the input.
    """

    tp_dim = 1


class VocabParallelEmbedding(nn.Module):
    """The token embedding, whose rows (the vocabulary) are sharded over the TP group.

    Input: token ids [b, s]. Output: hidden states [s, b, h], under sequence parallelism
    [s/t, b, h]. Weight [padded V / t, h]. An id whose row is on another rank contributes zeros to
    the sum over ranks.

    Forward issues an all-reduce of [s, b, h], or a reduce-scatter under sequence parallelism.
    Backward issues an all-gather under sequence parallelism, else no collective. Keeps the ids, and
    under tensor parallelism one byte per id.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        padded_vocab_size: int,
        init_std: float,
        context: RankContext,
    ) -> None:
        super().__init__()
        self.context = context
        self.weight = context.new_parameter(
            vocab_size, hidden_size, tp_dim=0, padded_length=padded_vocab_size, init_std=init_std
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.t()
        if self.context.tp_group is None:
            return token_rows(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.context.tp_rank * rows
        elsewhere = (local < 0) | (local >= rows)
        # The lookup refuses an id without a row, so row 0 stands in for it. The second fill makes
        # its output 0, and in backward the gradient of row 0 too.
        found = token_rows(local.masked_fill(elsewhere, 0), self.weight).masked_fill(
            elsewhere.unsqueeze(-1), 0.0
        )
        if self.context.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(found, self.context.tp_group)
        return reduce_from_tensor_parallel_region(found, self.context.tp_group)


def token_rows(tokens: Tensor, weight: Tensor) -> Tensor:
    """Returns the rows of the weight [rows, h] at the ids [..], as [.., h]. Keeps the ids.

    If the weight has a float32 sum (parallel/weight_gradient.py), backward adds the rows to it.
    Autograd would make a tensor of the table's size, most of it zeros. With a large vocabulary and
    a small batch this takes a few percent of a step on a CPU.
    """
    add = own_sum(weight, LOOKUP_ATTRIBUTE)
    if add is None:
        return F.embedding(tokens, weight)

    def backward(grad: Tensor, tokens: Tensor) -> tuple[None]:
        add(tokens, grad)
        return (None,)

    return applied(Pair(F.embedding, backward, slice(1)), tokens, weight)
