"""The description of the embedding and of the model's head as operations.

The head is the final norm, the output projection and the loss. The code is in model/embedding.py
and model/gpt.py. Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.dropout_workspace import dropout_forward, masked
from megatron_lite.description.linears import (
    column_backward,
    column_beside,
    column_workspace,
    hidden_collective,
    row_backward,
    row_forward,
)
from megatron_lite.description.loss_workspace import (
    linear_loss_workspace,
    loss_workspace,
    one_pass_workspace,
)
from megatron_lite.description.norm_statistics import (
    norm_parameters,
    residual_norm_backward,
    residual_norm_forward,
    residual_norm_keeps,
)
from megatron_lite.description.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    ID_BYTES,
    Collective,
    Course,
    KeptTensor,
    Matmul,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
    Workspace,
    course,
)
from megatron_lite.description.sizes import Sizes, is_widened, residual_bytes
from megatron_lite.description.weight_gradients import (
    added_rounded,
    added_up,
    adds_rounded,
    apart,
    cast,
    gradient_bytes,
    weight_product,
)


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
            workspace=Workspace(
                _embedding_forward(model, sizes), _embedding_backward(model, sizes, parameters)
            ),
        ),
    )


def _embedding_forward(model: ModelConfig, sizes: Sizes) -> Course:
    """Returns the course of the embedding's forward.

    With several ranks it looks for the ids that are elsewhere, looks up the others, and sums the
    ranks' rows. The token ids themselves exist before.
    """
    tokens = sizes.tokens
    whole = tokens * model.hidden_size * sizes.element_bytes
    hidden = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    changes: list[int | Course] = [+hidden]
    if sizes.tp_size > 1:
        ids, elsewhere = 8 * tokens, tokens
        # local ids; two comparisons and their union; the ids with row 0 for those elsewhere
        changes = [+ids, +elsewhere, +elsewhere, +elsewhere, -2 * elsewhere, +ids]
        # The all-reduce sums a copy. The reduce-scatter writes to a tensor of its own.
        copy = sizes.gloo_copy(whole) if sizes.sequence_parallel else 0
        changes += [+whole, +whole, -whole, +hidden, +copy, -copy - whole - ids]
    if model.positions.learned:
        rows = hidden if sizes.resets_positions else 0  # without position ids they are a view
        changes += [+rows, +hidden, -hidden - rows]
    residual = residual_bytes(model, sizes)
    if is_widened(model, sizes):
        changes += [+residual, -hidden]
    if model.hidden_dropout > 0.0:
        mask = sizes.local_tokens * model.hidden_size
        changes += [dropout_forward(mask, residual, sizes), -residual]
    return course(*changes)


def _embedding_backward(model: ModelConfig, sizes: Sizes, parameters: list[Parameter]) -> Course:
    """Returns the course of the embedding's backward."""
    tokens, several = sizes.tokens, sizes.tp_size > 1
    whole = tokens * model.hidden_size * sizes.element_bytes
    hidden = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    residual = residual_bytes(model, sizes)
    changes: list[int | Course] = []
    if model.hidden_dropout > 0.0:
        mask = sizes.local_tokens * model.hidden_size
        changes += [masked(residual, sizes), -residual - mask]
    if is_widened(model, sizes):
        changes += [+hidden, -residual]
    words, *positions = parameters
    for one in positions:  # summed over the samples, and written into zeros as large as the weight
        samples = hidden // sizes.micro_batch_size if sizes.micro_batch_size > 1 else 0
        if sizes.resets_positions:  # each sample adds to rows of its own
            samples = 0
        changes += [+samples, +gradient_bytes((one,), sizes), -samples, added_up((one,), sizes)]
    if several and sizes.sequence_parallel:
        copy = sizes.gloo_copy(whole)
        changes += [+whole, +copy, -copy, -hidden]
    if several:  # the rows of ids that are elsewhere become zeros
        changes += [+whole, -whole - tokens]
    gradient = gradient_bytes((words,), sizes)
    used = whole + (8 * tokens if several else 0)
    if sizes.adds_by_itself and sizes.device == "cpu":
        wide = tokens * model.hidden_size * sizes.accumulate_bytes if sizes.is_rounded else 0
        return course(*changes, +wide, -wide, -used)
    if adds_rounded(sizes):
        return course(
            *changes, +gradient, added_rounded(words, sizes, adds=sizes.accumulates), -used
        )
    changes += [+gradient, -used]
    if _waits_for_lookup(model, sizes):
        # The head's gradient of the tied weight waits here for this one. Autograd adds them up in
        # place, unless the head's gradient is a view, which it is for torch's own linear layer.
        if sizes.sums_gradients:
            changes += [cast(words, sizes)]
            gradient = words.num_elements * sizes.accumulate_bytes
        is_cast = sizes.sums_gradients and sizes.is_rounded
        is_view = not several and sizes.loss_chunk_size is None and not is_cast
        changes += [+gradient, -2 * gradient] if is_view else [-gradient]
        return course(*changes, -gradient if sizes.sums_gradients else 0)
    return course(*changes, added_up((words,), sizes))


def _waits_for_lookup(model: ModelConfig, sizes: Sizes) -> bool:
    """Returns whether the head's gradient of a tied weight waits for that of the embedding."""
    untied = model.untie_embeddings_and_output_weights
    both = sizes.has_embedding and sizes.has_head
    return both and not untied and not sizes.adds_by_itself


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
    output_weight = Parameter("weight", _words(model, sizes))
    waits = _waits_for_lookup(model, sizes) and sizes.sums_gradients
    apart_weights = apart((output_weight,), sizes)
    output_gradient = cast(output_weight, sizes) if waits else added_up(apart_weights, sizes)
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
    moved, after = _cross_entropy(logits.num_bytes, sizes), Workspace()
    if sizes.loss_chunk_size is None:
        workspace = column_workspace(
            model,
            sizes,
            width=columns,
            weight=weight_product(output_weight, sizes),
            then=output_gradient,
        )
        after = loss_workspace(sizes, columns)
    elif one_pass:
        workspace = one_pass_workspace(model, sizes, columns, sizes.loss_chunk_size)
        after = Workspace(course(-hidden))  # nothing keeps the normed output
        # The statistics of each chunk are summed apart. The input is gathered once, so only the
        # sum of its gradient is left of the collectives of backward.
        sums = (*_sums_by_chunk(sizes), *in_backward[-1:])
        moved = Moved(moved.forward + moved.backward, 0)
    else:
        workspace = linear_loss_workspace(
            model, sizes, columns, sizes.loss_chunk_size, then=output_gradient
        )
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
            workspace=Workspace(
                residual_norm_forward(model, sizes),
                course(residual_norm_backward(model, sizes), added_up(vectors, sizes), -residual),
            ),
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
            workspace=workspace,
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
            workspace=after,
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
