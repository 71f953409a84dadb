"""The largest temporary of each operation, in bytes: one number for the fullest moment of it.

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
from megatron_lite.config.row_blocks import (
    has_gradient_tensor,
    has_loss_blocks,
    product_rows,
    rows_at_a_time,
)
from megatron_lite.description.operations import ID_BYTES, Parameter
from megatron_lite.description.sizes import Heads, Sizes, is_widened


def weight_gradient(weight: Parameter, sizes: Sizes) -> int:
    """Returns the bytes of the gradient of a linear layer's weight while it is computed.

    A float32 product goes straight into the sum of gradients, as a 16-bit one does on CUDA.
    Elsewhere that is computed some rows at a time and then added, for which a CPU casts it. A
    gradient that autograd gets exists whole, and is cast to float32.
    """
    rows, columns = weight.shape
    wide = sizes.accumulate_bytes if sizes.is_rounded else 0
    if not sizes.sums_gradients:
        return rows * columns * sizes.element_bytes
    if not sizes.adds_by_itself:
        return rows * columns * (sizes.element_bytes + wide)
    if not sizes.is_rounded or not has_gradient_tensor(sizes.device):
        return 0
    cast = wide if sizes.device == "cpu" and sizes.accumulates else 0
    return min(rows, product_rows(columns)) * columns * (sizes.element_bytes + cast)


def column_linear(model: ModelConfig, sizes: Sizes, output: int, weight: Parameter) -> int:
    """Returns the number of a column-parallel linear layer. output: the bytes of its output.

    It holds the gradients of output and input. Under sequence parallelism it also holds the
    gathered input and this rank's part of the input's gradient.
    """
    whole = _hidden(model, sizes)
    gathered = 0
    if sizes.splits_sequence:
        gathered = whole + whole // sizes.tp_size + sizes.gloo_copy(whole)
    return output + whole + gathered + weight_gradient(weight, sizes)


def row_linear(
    model: ModelConfig, sizes: Sizes, width: int, weight: Parameter, *, own_gradient: bool
) -> int:
    """Returns the number of a row-parallel linear layer with `width` input features on one rank.

    own_gradient: whether the gradient of its output is another tensor than that of the residual
        stream.
    """
    whole = _hidden(model, sizes)
    input_bytes = sizes.tokens * width * sizes.element_bytes
    own_gradient = own_gradient or model.hidden_dropout > 0.0 or is_widened(model, sizes)
    inside = input_bytes + weight_gradient(weight, sizes)
    if sizes.splits_sequence:
        inside = whole + max(inside, sizes.gloo_copy(whole))
    return inside + own_gradient * sizes.local_tokens * model.hidden_size * sizes.element_bytes


def activation(model: ModelConfig, sizes: Sizes, intermediate: int, output: int) -> int:
    """Returns the number of the MLP's activation.

    intermediate: the bytes of its input. output: those of its result.
    """
    if model.activation == "gelu" and model.bias_gelu_fusion and sizes.device == "cpu":
        # The forward computes in float32: a 16-bit input and the result are cast.
        wide = output // sizes.element_bytes * sizes.accumulate_bytes if sizes.is_rounded else 0
        return max(intermediate, 2 * wide) + output
    # The backward of swiglu holds silu(gate) and two gradients of that size.
    return intermediate + output + (2 * output if model.activation == "swiglu" else 0)


def flash_attention(model: ModelConfig, sizes: Sizes, *, windowed: bool) -> int:
    """Returns the number of a flash kernel: the gradients of the output, query, key and value.

    With a window or documents the mask is built again. Over context-parallel ranks
    (context_parallel/sharded_attention.py) keys, values and the sum of their gradients travel
    besides.
    """
    query, kv = Heads.of(model, sizes)
    part, mask = 2 * kv, 0
    if sizes.cp_size == 1:
        if windowed or sizes.resets_attention:
            mask = attention_mask(sizes)
        return 2 * query + part + mask
    wide = query // sizes.element_bytes * sizes.accumulate_bytes
    gradients, second = query + part, max(query + part // 2, query // 2 + part)
    if sizes.cp_comm_type == "p2p":
        # The ring holds a part, the one that arrives and, beyond two ranks, the next one.
        others = min(sizes.cp_size - 1, 2) * part
        travels = 2 * part
        return query + part + wide + others + travels + second + max(gradients, part)
    whole = sizes.cp_size * part
    copy = sizes.gloo_copy(whole)
    most = max(gradients + max(copy, second), second + part + copy)
    return query + part + wide + 2 * whole + most


def attention_mask(sizes: Sizes) -> int:
    """Returns the most bytes while a mask of documents or of a window is built."""
    scores = sizes.own_seq_length * sizes.seq_length
    if not sizes.resets_attention:
        return 2 * scores * sizes.element_bytes
    return sizes.micro_batch_size * (scores * (1 + sizes.element_bytes) + ID_BYTES)


def unfused_attention(model: ModelConfig, sizes: Sizes, elements: int, softmax_bytes: int) -> int:
    """Returns the number of attention that builds its scores.

    elements: the number of scores. softmax_bytes: the bytes of an element of the softmax.
    """
    query, kv = Heads.of(model, sizes)
    repeated = sizes.cp_size * query  # the gradient of the key, or of the value, for every head
    scores = elements * sizes.element_bytes
    # The product with the values keeps a tensor besides the softmax, and frees it early.
    freed = scores if softmax_bytes != sizes.element_bytes or model.attention_dropout else 0
    exchange = 0
    if sizes.cp_size > 1:
        exchange = 2 * sizes.cp_size * kv + sizes.gloo_copy(2 * sizes.cp_size * kv)
    return max(
        query + scores + repeated,
        repeated + 2 * elements * softmax_bytes - freed,
        2 * query + 3 * repeated + exchange + scores - freed,
    )


def loss_blocks(sizes: Sizes, tokens: int, columns: int) -> int:
    """Returns the bytes with which the loss computes the softmax of some rows of its logits.

    torch casts bfloat16 rows to float32 before its softmax, on every device. It casts float16 rows
    on a CPU only. Rows that are a slice of padded columns are copied, unless they are cast. One
    compiled kernel for all rows, as on CUDA, has none of these.
    """
    if not has_loss_blocks(sizes.device):
        return 0
    rows = min(tokens, rows_at_a_time(tokens, columns, sizes.device))
    softmax = rows * columns * sizes.accumulate_bytes
    if sizes.is_rounded and (not sizes.is_float16 or sizes.device == "cpu"):
        return 2 * softmax
    return softmax + (rows * columns * sizes.element_bytes if sizes.has_padding else 0)


def loss(sizes: Sizes, columns: int) -> int:
    """Returns the number of the loss, in forward and in backward.

    The gradient takes the place of the logits, which are kept. Those of a chunk are not.
    columns: the columns of the logits on one rank.
    """
    tokens = _chunk(sizes)
    logits = tokens * columns * sizes.element_bytes if sizes.loss_chunk_size is not None else 0
    return logits + loss_blocks(sizes, tokens, columns) + LOSS_ROWS * _row(sizes)


def chunked_loss(model: ModelConfig, sizes: Sizes, columns: int) -> int:
    """Returns the number of the output projection with the loss, one chunk of tokens at a time."""
    weight = columns * model.hidden_size
    whole = _hidden(model, sizes)
    total = cast = product = 0
    if not sizes.adds_by_itself:
        # The gradient is summed over the chunks in float32, and cast when it is complete.
        total = weight * sizes.accumulate_bytes
        cast = weight * sizes.element_bytes if sizes.is_rounded else 0
    if sizes.is_rounded and has_gradient_tensor(sizes.device):
        wide = sizes.accumulate_bytes if sizes.device == "cpu" else 0
        rows = min(columns, product_rows(model.hidden_size))
        product = rows * model.hidden_size * (sizes.element_bytes + wide)
    gathered = scattered = 0
    if sizes.splits_sequence:
        gathered, scattered = whole, whole // sizes.tp_size + sizes.gloo_copy(whole)
    of_loss = loss(sizes, columns)
    inside = of_loss + max(0, scattered + product - loss_blocks(sizes, _chunk(sizes), columns))
    return whole + gathered + total + max(inside, cast)


def embedding(model: ModelConfig, sizes: Sizes, words: Parameter) -> int:
    """Returns the number of the embedding. words: the table of the tokens.

    A lookup on a CPU adds the rows of the tokens to the sum of gradients, cast to float32. Any
    other one makes a gradient of the table's size.
    """
    whole = _hidden(model, sizes)
    # The gradient of the rows that were looked up is that of the residual stream, or another one.
    rows = whole if sizes.tp_size > 1 or model.hidden_dropout or is_widened(model, sizes) else 0
    if sizes.adds_by_itself and sizes.device == "cpu":
        wide = sizes.tokens * model.hidden_size * sizes.accumulate_bytes
        return rows + (wide if sizes.is_rounded else 0)
    # Autograd casts the gradient. It adds that of the head to it, in place if it can.
    casts = sizes.sums_gradients and sizes.is_rounded and not sizes.adds_by_itself
    is_view = sizes.tp_size == 1 and sizes.loss_chunk_size is None and not casts
    copied = waits_for_lookup(model, sizes) and is_view
    element = (1 + copied) * sizes.element_bytes + (sizes.accumulate_bytes if casts else 0)
    return rows + words.num_elements * element


def waits_for_lookup(model: ModelConfig, sizes: Sizes) -> bool:
    """Returns whether the head's gradient of a tied weight waits for that of the embedding."""
    untied = model.untie_embeddings_and_output_weights
    both = sizes.has_embedding and sizes.has_head
    return both and not untied and not sizes.adds_by_itself


LOSS_ROWS = 4  # float32 numbers of each token: factors of its gradient, loss and statistics


def _chunk(sizes: Sizes) -> int:
    """Returns the tokens that have logits at a time."""
    return min(sizes.loss_chunk_size or sizes.tokens, sizes.tokens)


def _row(sizes: Sizes) -> int:
    return sizes.tokens * sizes.accumulate_bytes


def _hidden(model: ModelConfig, sizes: Sizes) -> int:
    """Returns the bytes of the hidden states of all tokens: [s/c, b, h]."""
    return sizes.tokens * model.hidden_size * sizes.element_bytes
