"""Linear layers and the token embedding, sharded over the TP group.

    ColumnParallelLinear  Y = X A^T      A split by output rows:    [ A_0 ; A_1 ]     Y comes out split by columns
    RowParallelLinear     Y = X A^T + b  A split by input columns:  [ A_0 | A_1 ]     partial Ys are summed, then b once

Between the two nothing is communicated. Without sequence parallelism X of the first and Y of the second are [s, b, ...],
the same on every rank; with it they are [s/t, b, ...], and the sum is a reduce-scatter. Parameters are left
uninitialised: `initialize.py` fills a whole model from its marks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel.parameter_spec import ParameterSpec, mark
from megatron_lite.tensor_parallel.column_linear import column_parallel_linear
from megatron_lite.tensor_parallel.context import TensorParallelContext
from megatron_lite.tensor_parallel.mappings import (
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_lite.tensor_parallel.row_linear import row_parallel_linear


def new_parameter(spec: ParameterSpec, context: TensorParallelContext) -> nn.Parameter:
    """An uninitialised, marked parameter that holds this rank's shard."""
    local = torch.empty(spec.local_shape(context.size), dtype=context.params_dtype, device=context.device)
    return mark(nn.Parameter(local), spec)


class ColumnParallelLinear(nn.Module):
    """[s/t under sequence parallelism else s, b, input_size] -> [s, b, output_size/t].

    Weight [output_size/t, input_size], bias [output_size/t]; in `tp_blocks` blocks each split over the ranks.
    padded_output_size: rows to split, where they are more than output_size (a padded vocabulary; without bias).
    Forward: an all-gather of the input under sequence parallelism, else nothing. Backward: the gather again and a
    reduce-scatter, or an all-reduce, of the input's gradient. Keeps the input as it came: [s/t] or [s].
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, init_std: float, context: TensorParallelContext,
                 tp_blocks: int = 1, padded_output_size: int | None = None) -> None:
        super().__init__()
        self.context = context
        self.weight = new_parameter(ParameterSpec(global_shape=(output_size, input_size), tp_dim=0, tp_blocks=tp_blocks,
                                                  padded_length=padded_output_size, init_std=init_std), context)
        self.bias = new_parameter(ParameterSpec(global_shape=(output_size,), tp_dim=0, tp_blocks=tp_blocks),
                                  context) if bias else None

    def forward(self, hidden_states: Tensor, function: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """function: what to return of hidden_states and the weight in place of their product."""
        if function is not None:
            return function(hidden_states, self.weight)
        return column_parallel_linear(hidden_states, self.weight, self.bias, tp_group=self.context.group,
                                      sequence_parallel=self.context.sequence_parallel)


class RowParallelLinear(nn.Module):
    """[s, b, input_size/t] -> [s/t under sequence parallelism else s, b, output_size].

    Weight [output_size, input_size/t]; the bias [output_size] is whole on every rank and added once, after the sum.
    Under sequence parallelism each rank adds it to its own tokens only, so its gradient is summed over the ranks.
    Forward: a reduce-scatter of the output under sequence parallelism, else an all-reduce. Backward: an all-gather or
    nothing. Keeps the input.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool, init_std: float, context: TensorParallelContext) -> None:
        super().__init__()
        self.context = context
        self.weight = new_parameter(ParameterSpec(global_shape=(output_size, input_size), tp_dim=1, init_std=init_std), context)
        self.bias = new_parameter(ParameterSpec(global_shape=(output_size,), sum_grad_over_tp=context.sequence_parallel),
                                  context) if bias else None

    def forward(self, hidden_states: Tensor, unread: bool = False) -> Tensor:
        """unread: only the graph is needed; neither matmul nor collective is done, and the values are anything."""
        return row_parallel_linear(hidden_states, self.weight, self.bias, tp_group=self.context.group,
                                   sequence_parallel=self.context.sequence_parallel, unread=unread)


def leave_row_parallel(partial: Tensor, context: TensorParallelContext) -> Tensor:
    """The sum of the ranks' partial outputs: whole on every rank, or this rank's tokens under sequence parallelism."""
    if context.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(partial, context.group)
    return reduce_from_tensor_parallel_region(partial, context.group)


class VocabParallelEmbedding(nn.Module):
    """Token ids [b, s] -> hidden states [s/t under sequence parallelism else s, b, h].

    Weight [padded V / t, h], split by rows; ids of other ranks' rows contribute zeros to the sum over ranks.
    Forward: a reduce-scatter or an all-reduce of [s, b, h]; backward: an all-gather under sequence parallelism, else nothing.
    Keeps the ids, and under tensor parallelism one byte per id.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, padded_vocab_size: int, init_std: float,
                 context: TensorParallelContext) -> None:
        super().__init__()
        self.context = context
        self.weight = new_parameter(ParameterSpec(global_shape=(vocab_size, hidden_size), tp_dim=0,
                                                  padded_length=padded_vocab_size, init_std=init_std), context)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.t()
        if self.context.group is None:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.context.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        partial = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return leave_row_parallel(partial, self.context)
