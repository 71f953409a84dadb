"""The workspaces of the loss, with the output projection in chunks or apart from it.

They describe tensor_parallel/cross_entropy.py and linear_cross_entropy.py. Columns of the padding
count as columns of true ids. They are left out of the float32 copies of a few rows, so a rank whose
columns are padded holds a little less. Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.row_blocks import rows_at_a_time
from megatron_lite.description.operations import Course, Parameter, Workspace, course
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.weight_gradients import rounded_product


def loss_workspace(sizes: Sizes, columns: int) -> Workspace:
    """Returns the workspace of the loss of all tokens, whose logits exist.

    columns: the columns of the logits on one rank.
    """
    tokens, row = sizes.tokens, sizes.accumulate_bytes * sizes.tokens
    return Workspace(
        course(
            _local_labels(sizes),
            _row_statistics(sizes, tokens, columns),
            _combined(sizes, tokens),
            -3 * row,
        ),
        # The gradient of the logits takes their place.
        course(
            _gradient_factors(sizes),
            _write_gradient(sizes, tokens, columns),
            -2 * row - row - _kept(sizes),
        ),
    )


def linear_loss_workspace(
    model: ModelConfig, sizes: Sizes, columns: int, chunk_size: int, *, then: Course
) -> Workspace:
    """Returns the workspace of the output projection and the loss, one chunk of tokens at a time.

    columns: the columns of the logits on one rank. chunk_size: the tokens of a chunk.
    then: what happens to the gradient of the weight when backward has computed it.
    """
    h, element, accumulate = model.hidden_size, sizes.element_bytes, sizes.accumulate_bytes
    tokens, row = sizes.tokens, accumulate * sizes.tokens
    whole, own = tokens * h * element, sizes.local_tokens * h * element
    gathered = whole if sizes.tp_size > 1 and sizes.sequence_parallel else 0
    copy = sizes.gloo_copy(gathered)  # by the gather, and by the sum of the input's gradient
    full, rest = divmod(tokens, chunk_size)
    chunks = ([chunk_size] if full else []) + ([rest] if rest else [])
    buffer = chunks[0] * columns * element  # of all chunks
    # The statistics of earlier chunks stay. The last of the full chunks is the fullest moment.
    forward = course(
        _local_labels(sizes),
        *(+gathered, +copy, -copy, +buffer),
        3 * accumulate * chunk_size * max(0, full - 1),
        *(_row_statistics(sizes, chunk, columns) for chunk in chunks),
        -buffer,
        *(+row, +row, +row),  # the statistics of all chunks in one tensor each
        _combined(sizes, tokens),
        -3 * row - 3 * row - gathered,
    )
    # A 16-bit weight's gradient for autograd is summed in float32, a few rows at a time, and then
    # cast.
    apart = sizes.is_rounded and not sizes.adds_by_itself
    total, cast = columns * h * accumulate, columns * h * element
    if sizes.adds_by_itself:
        total, cast = 0, 0
    weight = Parameter("weight", (columns, h))
    scattered = own if gathered else 0
    steps: list[int | Course] = []
    for number, chunk in enumerate(chunks):
        adds = number > 0 or full > 1 or (sizes.accumulates and not apart)
        steps += [
            _write_gradient(sizes, chunk, columns),
            scattered + copy if number == len(chunks) - 1 else 0,
            rounded_product(weight, sizes, adds=adds) if sizes.is_rounded else Course(),
        ]
    # Without sequence parallelism the whole gradient of the input is the result.
    backward = course(
        _gradient_factors(sizes),
        *(+gathered, +copy, -copy, +whole, +total, +buffer),
        *steps,
        -copy - 2 * gathered - buffer - 2 * row - row,
        *((+cast, -total) if apart else ()),
        then,
        -own - _kept(sizes),
    )
    return Workspace(forward, backward)


def one_pass_workspace(
    model: ModelConfig, sizes: Sizes, columns: int, chunk_size: int
) -> Workspace:
    """Returns the workspace of the output projection and the loss in one pass over the chunks.

    Forward computes the gradients of each chunk too. It ends with the losses and the gradient of
    the hidden states. The gradient of the weight is no tensor of its own. The arguments are those
    of `linear_loss_workspace`.
    """
    element, accumulate = sizes.element_bytes, sizes.accumulate_bytes
    tokens = sizes.tokens
    whole = tokens * model.hidden_size * element
    gathered = whole if sizes.tp_size > 1 and sizes.sequence_parallel else 0
    copy = sizes.gloo_copy(gathered)  # by the gather, and by the sum of the input's gradient
    scattered = whole // sizes.tp_size if gathered else 0
    losses = accumulate * tokens
    incoming = losses if sizes.masks_loss else accumulate
    full, rest = divmod(tokens, chunk_size)
    chunks = [chunk_size] * min(full, 1) + ([rest] if rest else [])
    buffer = chunks[0] * columns * element  # of all chunks
    steps: list[int | Course] = []
    for number, chunk in enumerate(chunks):
        row = accumulate * chunk
        steps += [
            _row_statistics(sizes, chunk, columns),
            _combined(sizes, chunk),
            -3 * row,
            *(+row, +row, +row, -row),  # the factors of the gradient
            _write_gradient(sizes, chunk, columns),
            -2 * row - row,  # the factors and the share of the softmax
            -row,  # the losses, which are copied
            scattered + copy if number == len(chunks) - 1 else 0,
        ]
    forward = course(
        _local_labels(sizes),
        *(+gathered, +copy, -copy),
        _incoming_gradient(sizes),
        *(+losses, +whole, +buffer),
        *steps,
        -copy - buffer - incoming - 2 * gathered - 9 * tokens,
    )
    return Workspace(forward, course(-losses))


def _incoming_gradient(sizes: Sizes) -> Course:
    """Returns the course of the gradient of the losses: one number, or with a mask one for each."""
    number, row = sizes.accumulate_bytes, sizes.accumulate_bytes * sizes.tokens
    factors = (+number, +number, -number)
    if not sizes.masks_loss:
        return course(*factors)
    copy = _flattened(row, sizes)
    return course(*factors, +row, -number, +copy, -copy)


def _kept(sizes: Sizes) -> int:
    """Returns the bytes of the labels, the marks of labels on this rank and the softmax's share."""
    return (8 + 1 + sizes.accumulate_bytes) * sizes.tokens


def _local_labels(sizes: Sizes) -> Course:
    """Returns the course of `local_labels`. It ends with a column and a mark for each label."""
    tokens = sizes.tokens
    ids = 8 * tokens
    copy = _flattened(ids, sizes)
    return course(+copy, +ids, -copy, +ids, +tokens, +tokens, +tokens, -2 * tokens - ids)


def _row_statistics(sizes: Sizes, tokens: int, columns: int) -> Course:
    """Returns the course of `row_statistics`. It ends with three numbers for each of the rows."""
    row, own_row = sizes.accumulate_bytes * tokens, sizes.element_bytes * tokens
    rows = min(tokens, rows_at_a_time(columns, sizes.device))
    cast = sizes.element_bytes != sizes.accumulate_bytes
    maximum, softmax = rows * sizes.accumulate_bytes, rows * columns * sizes.accumulate_bytes
    own_maximum = rows * sizes.element_bytes
    parts = [+own_maximum, +maximum, -own_maximum, -maximum] if cast else [+maximum, -maximum]
    copy = rows * columns * sizes.element_bytes if _copies_slice(sizes) else 0
    copy = softmax if cast and sizes.device == "cpu" else copy
    # the softmax of a part, and the largest value of each of its rows
    parts += [+copy, +softmax, -copy, +maximum, -softmax, -maximum]
    at_label = [+own_row, +row, -own_row - row] if cast else [+row, -row]
    return course(+row, +row, +row, *parts, *at_label)


def _combined(sizes: Sizes, tokens: int) -> Course:
    """Returns the course of `combined`. It ends with the losses and the share of the softmax."""
    row = sizes.accumulate_bytes * tokens
    maximum = row if sizes.tp_size > 1 else 0
    zero = sizes.accumulate_bytes
    return course(
        *(+maximum, +row, +row, -row),
        *(+row, +zero, +row, -row - zero),  # the label's logit, if the label is here
        *(+2 * row, -row),  # the two sums
        *(+row, +row, -row),  # the logarithm and the losses
        -2 * row - maximum,
    )


def _gradient_factors(sizes: Sizes) -> Course:
    """Returns the course of `gradient_factors`. It ends with two factors for each row."""
    row = sizes.accumulate_bytes * sizes.tokens
    copy = _flattened(row, sizes)
    return course(+copy, +row, +row, +row, -row - copy)


def _flattened(num_bytes: int, sizes: Sizes) -> int:
    """Returns the bytes of the copy that flattens a transposed [b, s]. One sample needs no copy."""
    return num_bytes if sizes.micro_batch_size > 1 else 0


def _write_gradient(sizes: Sizes, tokens: int, columns: int) -> Course:
    """Returns the course of `write_gradient_`. The last rows' softmax is freed with it."""
    step = rows_at_a_time(columns, sizes.device)
    full, rest = divmod(tokens, step)
    changes: list[int] = []
    before = 0
    for rows in [step] * min(full, 2) + ([rest] if rest else []):
        softmax = rows * columns * sizes.accumulate_bytes
        cast = sizes.element_bytes != sizes.accumulate_bytes and sizes.device == "cpu"
        # A slice without the padding is copied too. A cast copies it in any case.
        slice_bytes = rows * columns * sizes.element_bytes if _copies_slice(sizes) else 0
        copy = softmax if cast else slice_bytes
        changes += [+copy, +softmax, -copy, -before]
        before = softmax
    return course(*changes, -before)


def _copies_slice(sizes: Sizes) -> bool:
    """Returns whether softmax copies its rows, since they are a slice of the padded columns."""
    return sizes.inside_operators and sizes.has_padding
