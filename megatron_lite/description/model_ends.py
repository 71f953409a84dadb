"""The description of the embedding and of the model's head as operations.

The head is the final norm, the output projection and the loss. The code is in model/embedding.py
and model/gpt.py. Standard library only.
"""

from dataclasses import replace

from megatron_lite.config.row_blocks import rows_at_a_time

from .norms import norm_keeps, norm_parameters, norm_temporary
from .operations import (
    ALL_REDUCE,
    ID_BYTES,
    Collective,
    KeptTensor,
    Matmul,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
)
from .sizes import Sizes

LOSS_ROWS = 4  # float32 numbers of each token: factors of its gradient, loss and statistics


def embedding_operations(of: Sizes) -> tuple[Operation, ...]:
    """Returns the embedding of a first stage; nothing for another stage.

    Each tensor-parallel rank looks up the ids of its own rows of the vocabulary. A collective sums
    the results: an all-reduce, or a reduce-scatter under sequence parallelism.
    """
    if not of.has_embedding:
        return ()
    model, ids = of.model, ID_BYTES * of.tokens
    keeps = [KeptTensor("token ids", ids, given=True)]
    if of.tp_size > 1:
        keeps.append(KeptTensor("which ids are elsewhere", of.tokens))
    tied = not model.untie_embeddings_and_output_weights and not of.has_head
    words = Parameter("word_embeddings.weight", _words(of), tied=tied)
    parameters, table = [words], words.num_elements * of.element_bytes
    # The rows of the tokens are copied. Backward fills a gradient of the whole table with zeros and
    # adds the rows to it.
    moved = Moved(2 * of.whole, table + 3 * of.whole)
    moved += (2 * of.whole * (model.embedding_multiplier != 1.0),) * 2
    if model.learns_positions:
        shape = model.max_position_embeddings, model.hidden_size
        positions = Parameter("position_embeddings.weight", shape, of.sequence_parallel)
        parameters.append(positions)
        moved += (3 * of.whole, 0)
        if of.resets_positions:  # a second look-up, in place of a slice
            keeps.append(KeptTensor("position ids", ids, given=True))
            moved += (2 * of.whole, positions.num_elements * of.element_bytes + 3 * of.whole)
    if model.hidden_dropout > 0.0:
        keeps.append(KeptTensor("embedding dropout mask", of.hidden // of.element_bytes))
        moved += (2 * of.whole, 2 * of.whole)
    return (
        Operation(
            "embedding",
            "embedding",
            tuple(keeps),
            calls=(OperatorCall(collectives=of.reduces),),
            backward=of.gathers,
            parameters=tuple(parameters),
            moved=moved,
            temporary=_embedding_temporary(of, words.num_elements),
        ),
    )


def head_operations(of: Sizes) -> tuple[Operation, ...]:
    """Returns the final norm, the output projection and the loss of a last stage; else nothing.

    With several tensor-parallel ranks the loss issues two all-reduces. The first takes the maximum
    of the logits; the second sums the label's logit and the exponentials, two numbers per token.
    """
    if not of.has_head:
        return ()
    model = of.model
    columns = of.padded_vocab_size // of.tp_size
    weight = Parameter("weight", _words(of))
    logits = KeptTensor("logits", of.tokens * columns * of.element_bytes)
    product = (Matmul("logits", of.tokens, columns, model.hidden_size),)
    # With loss chunks no logits are kept. In two passes backward of the output layer runs the
    # projection again. In one pass forward computes all gradients, and keeps that of its input.
    one_pass, chunk = of.loss_in_one_pass, of.loss_chunk_size
    # One step for all tokens, or for each chunk in one pass, which sums its statistics apart.
    steps = range(0, of.tokens, (one_pass and chunk) or of.tokens)
    sums = tuple(
        Collective(ALL_REDUCE, factor * of.accumulate_bytes * min(steps.step, of.tokens - at))
        for at in steps
        for factor in (1, 2)
        if of.tp_size > 1
    )
    # Forward reads the logits twice, and writes and reads a softmax in float32. Backward reads the
    # logits, writes the softmax, scales it in place and writes the gradient from it.
    reads, softmax = 2 * logits.num_bytes, of.wide(logits.num_bytes)
    moved = Moved(reads + 2 * softmax, reads + 4 * softmax)
    if model.final_logit_softcapping is not None:  # three operators in place, and tanh's backward
        moved += (3 * reads, logits.num_bytes + 6 * softmax)
    weights: tuple[Parameter, ...] = (weight,)
    if not model.untie_embeddings_and_output_weights:
        # A tied model multiplies by the embedding's weight. A last stage without the embedding
        # holds a copy of that weight.
        copy = weight._replace(name="embedding.word_embeddings.weight", tied=True)
        weights = () if of.has_embedding else (copy,)
    keeps = [
        KeptTensor("labels", ID_BYTES * of.tokens),
        KeptTensor("which labels are here", of.tokens),
        KeptTensor("share of the softmax", of.row),
    ]
    if chunk is None:
        keeps.insert(0, logits)
        temporary = of.column_temporary(logits.num_bytes, weight)
    else:
        temporary = _chunked_temporary(of, columns)
    if one_pass:
        # The input is gathered once, so only the sum of its gradient is left of the collectives of
        # backward.
        sums, moved, keeps = sums + of.reduces, Moved(sum(moved), 0), []
    if of.masks_loss:
        # float32: the trainer multiplies the losses by it
        keeps.append(KeptTensor("loss mask", 4 * of.tokens, given=True))
    return (
        Operation(
            "final_layernorm",
            "decoder.final_layernorm",
            (KeptTensor("output of the last layer", of.residual), *norm_keeps(of, "final norm")),
            parameters=norm_parameters(of),
            moved=Moved(of.residual + of.hidden, 2 * of.residual + of.hidden)
            + (2 * of.hidden * (model.logits_scaling != 1.0),) * 2,
            temporary=norm_temporary(of, of.hidden),
        ),
        Operation(
            "output_layer",
            "output_layer" if model.untie_embeddings_and_output_weights else "",
            (KeptTensor(f"{'gradient of the ' * one_pass}normed output", of.hidden),),
            calls=(OperatorCall(matmuls=product, collectives=of.gathers),),
            backward=() if one_pass else of.gathers + of.reduces,
            runs_beside=True,
            rebuilds=product if chunk is not None and not one_pass else (),
            gradients_in_forward=one_pass,
            parameters=weights,
            temporary=temporary,
        ),
        Operation(
            "loss",
            "",
            tuple(keeps),
            calls=(OperatorCall(collectives=sums),),
            moved=moved,
            temporary=0 if one_pass else _loss_temporary(of, columns),
        ),
    )


def loss_blocks(of: Sizes, tokens: int, columns: int) -> int:
    """Returns the bytes with which the loss computes the softmax of some rows of its logits.

    torch casts bfloat16 rows to float32 before its softmax, on every device. It casts float16 rows
    on a CPU only. One compiled kernel for all rows has none of these. A cap takes the tanh of the
    rows too.
    """
    caps = of.model.final_logit_softcapping is not None
    if of.compiled:
        return 0
    rows = min(tokens, rows_at_a_time(tokens, columns, of.device))
    softmax = rows * columns * of.accumulate_bytes
    casts = of.is_rounded and (not of.is_float16 or of.device == "cpu")
    return softmax * (1 + (caps or casts))


def _loss_temporary(of: Sizes, columns: int) -> int:
    """Returns the number of the loss, in forward and in backward.

    The gradient takes the place of the logits, which are kept. Those of a chunk are not.
    columns: the columns of the logits on one rank.
    """
    tokens, chunks = _chunk(of), of.loss_chunk_size is not None
    logits = tokens * columns * of.element_bytes * chunks
    return logits + loss_blocks(of, tokens, columns) + LOSS_ROWS * of.row


def _chunked_temporary(of: Sizes, columns: int) -> int:
    """Returns the number of the output projection with the loss, one chunk of tokens at a time."""
    hidden = of.model.hidden_size
    total = cast = gathered = scattered = 0
    if not of.adds_by_itself:
        # The gradient is summed over the chunks in float32, and cast when it is complete.
        of = replace(of, narrow_sums=False)
        total = columns * hidden * of.accumulate_bytes
        cast = columns * hidden * of.element_bytes * of.is_rounded
    if of.gathers:
        gathered, scattered = of.whole, of.hidden + of.gloo_copy(of.whole)
    product = of.weight_rows(columns, hidden, True)
    blocks = loss_blocks(of, _chunk(of), columns)
    inside = _loss_temporary(of, columns) + max(0, scattered + product - blocks)
    return of.whole + gathered + total + max(inside, cast)


def _embedding_temporary(of: Sizes, num_words: int) -> int:
    """Returns the number of the embedding. num_words: the elements of the table of the tokens.

    A lookup on a CPU adds the rows of the tokens to a float32 sum of gradients, cast to it. Any
    other one makes a gradient of the table's size.
    """
    # The gradient of the rows that were looked up is that of the residual stream, or another one.
    scaled = of.model.embedding_multiplier != 1.0
    own = of.tp_size > 1 or of.model.hidden_dropout or of.widened or scaled
    rows = of.whole if own else 0
    if of.adds_by_itself and of.device == "cpu" and not of.narrow_sums:
        return rows + of.wide(of.whole) * of.is_rounded
    # Autograd casts the gradient, and adds that of the head to it in place.
    casts = of.sums_gradients and of.casts_gradients and not of.adds_by_itself
    return rows + num_words * (of.element_bytes + of.accumulate_bytes * casts)


def waits_for_lookup(of: Sizes) -> bool:
    """Returns whether the head's gradient of a tied weight waits for that of the embedding."""
    tied = not of.model.untie_embeddings_and_output_weights
    return of.has_embedding and of.has_head and tied and not of.adds_by_itself


def _chunk(of: Sizes) -> int:
    """Returns the tokens that have logits at a time."""
    return min(of.loss_chunk_size or of.tokens, of.tokens)


def _words(of: Sizes) -> tuple[int, int]:
    return of.padded_vocab_size // of.tp_size, of.model.hidden_size
