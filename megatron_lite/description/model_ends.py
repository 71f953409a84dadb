"""The description of the embedding and of the model's head as operations.

The head is the final norm, the output projection and the loss. The code is in model/embedding.py
and model/gpt.py. Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.description import temporaries
from megatron_lite.description.linears import (
    column_backward,
    column_beside,
    hidden_collective,
    row_backward,
    row_forward,
)
from megatron_lite.description.norms import norm_parameters, residual_norm_keeps
from megatron_lite.description.operations import (
    ALL_GATHER,
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
from megatron_lite.description.sizes import Sizes, residual_bytes


def embedding_operations(model: ModelConfig, sizes: Sizes) -> tuple[Operation, ...]:
    """Returns the embedding of a first stage.

    Each tensor-parallel rank looks up the ids of its own rows of the vocabulary. A collective sums
    the results: an all-reduce, or a reduce-scatter under sequence parallelism.
    """
    keeps = [KeptTensor("token ids", ID_BYTES * sizes.tokens, given=True)]
    if sizes.tp_size > 1:
        keeps.append(KeptTensor("which ids are elsewhere", sizes.tokens))
    untied = model.untie_embeddings_and_output_weights
    parameters = [
        Parameter(
            "word_embeddings.weight", _words(model, sizes), tied=not untied and not sizes.has_head
        )
    ]
    if sizes.resets_positions:
        keeps.append(KeptTensor("position ids", ID_BYTES * sizes.tokens, given=True))
    if model.positions.learned:
        parameters.append(
            Parameter(
                "position_embeddings.weight",
                (model.max_position_embeddings, model.hidden_size),
                partial=sizes.sequence_parallel,
            )
        )
    if model.hidden_dropout > 0.0:
        keeps.append(KeptTensor("embedding dropout mask", sizes.local_tokens * model.hidden_size))
    return (
        Operation(
            "embedding",
            "embedding",
            tuple(keeps),
            calls=(OperatorCall("", (), (), row_forward(model, sizes)),),
            backward=row_backward(model, sizes),
            parameters=tuple(parameters),
            moved=_lookup(model, sizes),
            temporary=temporaries.embedding(model, sizes, parameters[0]),
        ),
    )


def head_operations(model: ModelConfig, sizes: Sizes) -> tuple[Operation, ...]:
    """Returns the final norm, the output projection and the loss of a last stage.

    With several tensor-parallel ranks the loss issues two all-reduces. The first takes the maximum
    of the logits; the second sums the label's logit and the exponentials, two numbers per token.
    The output weight is a parameter of the head unless it is tied to an embedding on the same
    stage.
    """
    hidden = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    residual = residual_bytes(model, sizes)
    columns = sizes.padded_vocab_size // sizes.tp_size
    untied = model.untie_embeddings_and_output_weights
    weights: tuple[Parameter, ...] = (Parameter("weight", _words(model, sizes)),)
    # A tied model multiplies by the embedding's weight. A last stage without the embedding holds a
    # copy of that weight.
    if not untied:
        copy = Parameter("embedding.word_embeddings.weight", _words(model, sizes), tied=True)
        weights = () if sizes.has_embedding else (copy,)
    row = sizes.tokens * sizes.accumulate_bytes
    several = sizes.tp_size > 1
    gathers = (
        (hidden_collective(ALL_GATHER, model, sizes),)
        if several and sizes.sequence_parallel
        else ()
    )
    vectors = norm_parameters(model, model.hidden_size, partial=sizes.sequence_parallel)
    logits = KeptTensor("logits", sizes.tokens * columns * sizes.element_bytes)
    project = OperatorCall(
        "", (), (Matmul("logits", sizes.tokens, columns, model.hidden_size),), gathers
    )
    sums: tuple[Collective, ...] = ()
    if several:
        sums = (Collective(ALL_REDUCE, row), Collective(ALL_REDUCE, 2 * row))
    # With loss chunks no logits are kept. In two passes backward of the output layer runs the
    # projection again. In one pass forward computes all gradients, and keeps that of its input.
    one_pass = sizes.loss_in_one_pass
    in_backward = column_backward(model, sizes)
    kept_for_loss = (
        *((logits,) if sizes.loss_chunk_size is None else ()),
        KeptTensor("labels", 8 * sizes.tokens),
        KeptTensor("which labels are here", sizes.tokens),
        KeptTensor("share of the softmax", sizes.accumulate_bytes * sizes.tokens),
    )
    moved = _cross_entropy(logits.num_bytes, sizes)
    if sizes.loss_chunk_size is None:
        weight = Parameter("weight", _words(model, sizes))
        temporary = temporaries.column_linear(model, sizes, logits.num_bytes, weight)
    else:
        temporary = temporaries.chunked_loss(model, sizes, columns)
    if one_pass:
        # The statistics of each chunk are summed apart. The input is gathered once, so only the
        # sum of its gradient is left of the collectives of backward.
        sums = (*_sums_by_chunk(sizes), *in_backward[-1:])
        moved = Moved(moved.forward + moved.backward, 0)
    return (
        Operation(
            "final_layernorm",
            "decoder.final_layernorm",
            (
                KeptTensor("output of the last layer", residual),
                *residual_norm_keeps("final norm", model, sizes),
            ),
            parameters=vectors,
            moved=Moved(residual + hidden, 2 * residual + hidden),
        ),
        Operation(
            "output_layer",
            "output_layer" if untied else "",
            (KeptTensor(f"{'gradient of the ' * one_pass}normed output", hidden),),
            calls=(project,),
            backward=() if one_pass else in_backward,
            beside=() if one_pass else column_beside(sizes),
            rebuilds=(
                project.matmuls if sizes.loss_chunk_size is not None and not one_pass else ()
            ),
            gradients_in_forward=one_pass,
            parameters=weights,
            temporary=temporary,
        ),
        Operation(
            "loss",
            "",
            (
                *(() if one_pass else kept_for_loss),
                *((loss_mask(sizes),) if sizes.masks_loss else ()),
            ),
            calls=(OperatorCall("", (), (), sums),),
            moved=moved,
            temporary=0 if one_pass else temporaries.loss(sizes, columns),
        ),
    )


def _sums_by_chunk(sizes: Sizes) -> tuple[Collective, ...]:
    """Returns the all-reduces of the statistics of each loss chunk, if there are several ranks."""
    if sizes.tp_size == 1 or sizes.loss_chunk_size is None:
        return ()
    return tuple(
        Collective(ALL_REDUCE, factor * sizes.accumulate_bytes * chunk)
        for start in range(0, sizes.tokens, sizes.loss_chunk_size)
        for chunk in [min(sizes.loss_chunk_size, sizes.tokens - start)]
        for factor in (1, 2)
    )


def loss_mask(sizes: Sizes) -> KeptTensor:
    """Returns the loss mask of a micro-batch, float32. The trainer multiplies the losses by it."""
    return KeptTensor("loss mask", 4 * sizes.tokens, given=True)


def _lookup(model: ModelConfig, sizes: Sizes) -> Moved:
    """Returns the bytes that the embedding moves.

    The rows of the tokens are copied. Backward fills a gradient of the whole table with zeros and
    adds the rows to it.
    """
    hidden = sizes.tokens * model.hidden_size * sizes.element_bytes
    rows, width = _words(model, sizes)
    added = 3 * hidden if model.positions.learned else 0
    dropped = 2 * hidden if model.hidden_dropout > 0.0 else 0
    moved = Moved(
        2 * hidden + added + dropped, rows * width * sizes.element_bytes + 3 * hidden + dropped
    )
    if sizes.resets_positions:  # a second look-up, in place of a slice
        table = model.max_position_embeddings * width * sizes.element_bytes
        moved += (2 * hidden, table + 3 * hidden)
    return moved


def _cross_entropy(logits_bytes: int, sizes: Sizes) -> Moved:
    """Returns the bytes that tensor_parallel/cross_entropy.py moves.

    Forward reads the logits twice, and writes and reads a softmax in float32. Backward reads the
    logits, writes the softmax, scales it in place and writes the gradient from it.
    """
    softmax = logits_bytes // sizes.element_bytes * sizes.accumulate_bytes
    return Moved(2 * logits_bytes + 2 * softmax, 2 * logits_bytes + 4 * softmax)


def _words(model: ModelConfig, sizes: Sizes) -> tuple[int, int]:
    return sizes.padded_vocab_size // sizes.tp_size, model.hidden_size
