"""The bytes of the tensors of a model on one rank, for one micro-batch, and collectives of them.

A number is the largest temporary of an operation, at the fullest moment of it:

    memory at that moment = tensors kept for backward and not yet used + what a replay has rebuilt
                            + the gradient of the residual stream + the operation's number

A number counts the gradients of the operation's output and input, gathered tensors, and what its
kernels allocate. The fullest moment of an operation is in its backward, because its forward holds
no more. The exception is the loss in one pass, whose forward computes the gradients. Operations
that never hold the most of their layer have the number 0: norms, dropout, rotary embedding and the
split into heads. docs/memory.md tells how far the sum is from measured peaks. Standard library
only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.row_blocks import has_gradient_tensor, product_rows
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collective,
    Parameter,
)
from megatron_lite.description.sizes import Sizes


class Shape:
    """A model and the sizes of a micro-batch. The figures are bytes.

    input_size: h; of a linear layer that reads other channels, theirs, in `whole` and `hidden` too.
    whole: the hidden states of all tokens, [s/c, b, h]. hidden: those of this rank, [s', b, h],
        where s' is s/(c t) under sequence parallelism, else s/c.
    residual: the residual stream. widened: whether its dtype is wider than that of the branches.
    query, kv: the query, and the key: s/c b a/t d and s/c b g/t d elements. value, attended: the
        value and the result of attention, which differ in multi-latent attention alone.
    row: one float32 number for each token.
    gathers: the all-gather of [s', b, h] under sequence parallelism. reduces: the collective that
        sums the partial [s/c, b, h] of the ranks. Each moves a whole [s/c, b, h].
    beside: see Operation, for the backward of a column-parallel linear layer, which has both.
    """

    def __init__(self, model: ModelConfig, sizes: Sizes, input_size: int | None = None) -> None:
        self.model, self.sizes = model, sizes
        self.input_size = model.hidden_size if input_size is None else input_size
        self.element, self.tp_size = sizes.element_bytes, sizes.tp_size
        token = sizes.tokens * self.element
        self.whole = token * self.input_size
        self.hidden = sizes.local_tokens * self.input_size * self.element
        self.widened = model.fp32_residual_connection and sizes.is_rounded
        self.residual = self.wide(self.hidden) if self.widened else self.hidden
        (self.query, self.kv), (self.attended, self.value) = (
            [
                token * (heads * channels // self.tp_size)
                for heads in (model.num_attention_heads, model.query_groups)
            ]
            for channels in (model.head_dim, model.value_dim)
        )
        self.row = sizes.tokens * sizes.accumulate_bytes
        several = self.tp_size > 1
        kind = REDUCE_SCATTER if sizes.sequence_parallel else ALL_REDUCE
        self.reduces = (Collective(kind, self.whole),) * several
        self.gathers = (Collective(ALL_GATHER, self.whole),) * (several and sizes.sequence_parallel)
        self.beside = ("input",) * len(self.gathers) + ("weight",) * len(self.reduces)

    def reading(self, input_size: int) -> Shape:
        """Returns the shape of a linear layer that reads so many channels a token."""
        return Shape(self.model, self.sizes, input_size)

    def wide(self, num_bytes: int) -> int:
        """Returns the bytes of a tensor of activations in float32."""
        return num_bytes // self.element * self.sizes.accumulate_bytes

    def weight_gradient(self, weight: Parameter) -> int:
        """Returns the bytes of the gradient of a linear layer's weight while it is computed.

        A float32 product goes straight into the sum of gradients, as a 16-bit one does on CUDA.
        Elsewhere that is computed some rows at a time and then added, for which a CPU casts it. A
        gradient that autograd gets exists whole, and is cast to float32.
        """
        sizes, (rows, columns) = self.sizes, weight.shape
        wide = sizes.accumulate_bytes if sizes.is_rounded else 0
        if not sizes.sums_gradients:
            return rows * columns * self.element
        if not sizes.adds_by_itself:
            return rows * columns * (self.element + wide)
        if not sizes.is_rounded or not has_gradient_tensor(sizes.device):
            return 0
        cast = wide if sizes.device == "cpu" and sizes.accumulates else 0
        return min(rows, product_rows(columns)) * columns * (self.element + cast)

    def column_temporary(self, output: int, weight: Parameter) -> int:
        """Returns the number of a column-parallel linear layer. output: the bytes of its output.

        It holds the gradients of output and input. Under sequence parallelism it also holds the
        gathered input and this rank's part of the input's gradient.
        """
        gathered = 0
        if self.gathers:
            gathered = self.whole + self.hidden + self.sizes.gloo_copy(self.whole)
        return output + self.whole + gathered + self.weight_gradient(weight)
