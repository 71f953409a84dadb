"""The workspaces of self-attention: the bytes that its operations allocate and free as they run.

self_attention.py has the operations themselves: what they keep, compute and communicate. A course
lists the changes of the allocated bytes in their order (operations.py). Each follows the code in
model/attention.py and torch's operators; tests/description/test_workspace.py compares it with the
allocations of a run.

Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.dropout import dropout_forward
from megatron_lite.description.norm_statistics import norm_backward, norm_forward
from megatron_lite.description.operations import Course, KeptTensor, Workspace, course
from megatron_lite.description.sizes import Heads, Sizes


def split_workspace(model: ModelConfig, heads: Heads, *, grouped: bool, rotary: bool) -> Workspace:
    """Returns the workspace of the split of linear_qkv's output into query, key and value.

    Each of the three is a view or a copy (model/attention.py). If all are copies, linear_qkv's
    output is freed. Backward writes each gradient into zeros as large as that output, and adds
    them up in place.
    """
    whole = heads.query + 2 * heads.kv
    copied_later = model.norm_impl == "apex" if model.qk_layernorm else rotary
    copies = [heads.query] if grouped else []
    copies += [heads.kv] if grouped and not copied_later else []
    copies += [heads.kv] if grouped or copied_later else []
    value, key, query = heads.kv, heads.kv, heads.query
    return Workspace(
        course(*copies, -whole if len(copies) == 3 else 0),
        course(+whole, -value, +whole, -key, -whole, +whole, -query, -whole),
    )


def norms_workspace(
    model: ModelConfig, sizes: Sizes, heads: Heads, *, grouped: bool, apart: bool
) -> Workspace:
    """Returns the workspace of the norms of query and key.

    The gradients have another layout than the heads, with these exceptions: the key's gradient of
    unfused attention if it is summed over a group, and both gradients of flash attention if there
    is one sample.
    """
    d = model.head_dim
    queries, keys = (size // sizes.element_bytes // d for size in heads)
    raw_query, raw_key = (heads.query, heads.kv) if apart else (heads.query + 2 * heads.kv, 0)
    unfused, samples = model.builds_scores(sizes.device), sizes.micro_batch_size
    copies_query = unfused or samples > 1
    copies_key = not grouped if unfused else samples > 1
    return Workspace(
        course(norm_forward(model, sizes, queries, d), norm_forward(model, sizes, keys, d)),
        course(
            norm_backward(model, sizes, keys, d, copies=copies_key),
            -raw_key,
            norm_backward(model, sizes, queries, d, copies=copies_query),
            -raw_query,
        ),
    )


def rotary_workspace(model: ModelConfig, heads: Heads, *, grouped: bool) -> Workspace:
    """Returns the workspace of the rotation of query and key."""
    # The last reference to a tensor that nobody keeps goes when the rotated one replaces it.
    replaced = (
        heads.query + heads.kv
        if model.qk_layernorm
        else heads.query + 2 * heads.kv + (heads.query if grouped else 0)
    )
    part = model.rotary_dim / model.head_dim
    return Workspace(
        course(_rotate(heads.query, part), _rotate(heads.kv, part), -replaced),
        course(_rotate_backward(heads.kv, part), _rotate_backward(heads.query, part)),
    )


def flash_workspace(
    model: ModelConfig, sizes: Sizes, log_sum_exp: int, freed: int, *, windowed: bool
) -> Workspace:
    """Returns the workspace of a flash kernel. With a window, both directions build its mask.

    log_sum_exp: the bytes of the row sums that the kernel keeps.
    freed: the bytes of the inputs that no earlier operation keeps.
    """
    heads = Heads.of(model, sizes)
    output = heads.query
    results = output + log_sum_exp
    masked = _window_mask(sizes) if windowed else ()
    built = sum(masked)
    return Workspace(
        course(*masked, +results, -built),
        course(*masked, +heads.query + 2 * heads.kv, -built - output - results - freed),
    )


def unfused_workspace(
    model: ModelConfig,
    sizes: Sizes,
    elements: int,
    softmax_bytes: int,
    heads: tuple[KeptTensor, ...],
    freed: dict[str, int],
    *,
    windowed: bool,
) -> Workspace:
    """Returns the workspace of attention that builds its scores.

    elements: the number of scores. softmax_bytes: the bytes of an element of the softmax.
    heads: the tensors that it keeps of query, key and value.
    freed: the names and bytes of the inputs that no earlier operation keeps.
    """
    return Workspace(
        _unfused_forward(model, sizes, elements, softmax_bytes, windowed=windowed),
        _unfused_backward(model, sizes, elements, softmax_bytes, heads, freed),
    )


def _rotate(heads: int, part: float) -> Course:
    """Returns the course of the rotation of a tensor of heads. It ends with a new tensor.

    heads: its bytes. part: the share of its channels that are rotated.
    """
    rotated = round(heads * part)
    half = rotated // 2  # the negated second half of the channels
    sums = course(+rotated, +half, +rotated, -half, +rotated, -rotated, +rotated, -2 * rotated)
    return sums if rotated == heads else course(sums, +heads, -rotated)


def _rotate_backward(heads: int, part: float) -> Course:
    """Returns the course of the backward of `_rotate`. It replaces one gradient by another."""
    rotated = round(heads * part)
    half = rotated // 2
    products = (+rotated, +half, +rotated)
    if rotated == heads:
        return course(*products, -heads, +rotated, -rotated - half, -rotated)
    # The rotated channels and the others are written into zeros, and the two are added up.
    return course(
        *products, +rotated, -rotated - half, -rotated, +heads, -heads, +heads, -rotated, -heads
    )


def _window_mask(sizes: Sizes) -> tuple[int, int, int]:
    """Returns the changes while the mask of a window is built."""
    mask = sizes.seq_length**2 * sizes.element_bytes
    return +mask, +mask, -mask


def _unfused_forward(
    model: ModelConfig, sizes: Sizes, elements: int, softmax_bytes: int, *, windowed: bool
) -> Course:
    """Returns the course of the forward of attention that builds its scores.

    elements: the number of scores. softmax_bytes: the bytes of an element of the softmax.
    """
    heads = Heads.of(model, sizes)
    scores, softmax = elements * sizes.element_bytes, elements * softmax_bytes
    mask = sizes.seq_length**2 * sizes.element_bytes
    grouped = model.query_groups < model.num_attention_heads
    changes: list[int | Course] = [*(_window_mask(sizes) if windowed else (+mask,))]
    changes += [+heads.query, +heads.query] if grouped else []  # key and value for every head
    changes += [+scores]
    cast = softmax != scores
    # On a CPU the scores are cast before the softmax. A CUDA kernel reads them as they are.
    copy = softmax if cast and sizes.device == "cpu" else 0
    changes += [+copy, +softmax, -copy]
    changes += [+scores] if cast else []
    dropped = model.attention_dropout > 0.0
    changes += [dropout_forward(elements, scores, sizes)] if dropped else []
    by_head = heads.query
    changes += [+by_head, +heads.query]
    return course(*changes, -mask - scores - by_head - (scores if cast and dropped else 0))


def _unfused_backward(
    model: ModelConfig,
    sizes: Sizes,
    elements: int,
    softmax_bytes: int,
    heads: tuple[KeptTensor, ...],
    freed: dict[str, int],
) -> Course:
    """Returns the course of the backward of attention that builds its scores.

    heads: the tensors that it keeps of query, key and value. freed: those of the inputs that no
    earlier operation keeps.
    """
    query, kv = Heads.of(model, sizes)
    scores, softmax = elements * sizes.element_bytes, elements * softmax_bytes
    cast, dropped = softmax != scores, model.attention_dropout > 0.0
    grouped = model.query_groups < model.num_attention_heads
    gradient = query  # of the output; those of the repeated key and value are as large
    own = {one.name: one.num_bytes for one in heads if grouped or one.name in freed}
    value = own.pop(heads[-1].name, 0) if len(heads) == 3 else 0
    # softmax times value: the factor that is not the softmax itself is freed, and so is the value
    changes = [+scores, +query, -gradient - value - (scores if cast or dropped else 0)]
    changes += [+scores, -scores - elements] if dropped else []
    changes += [+softmax, -scores] if cast else []
    changes += [+softmax, -2 * softmax]
    changes += [+scores, -softmax] if cast else []
    # The gradients of query and key are products, multiplied by the scale.
    changes += [+query, +query, -query, +query, +query, -query - scores - sum(own.values())]
    changes += [+kv, -query, +kv, -query] if grouped else []
    return course(*changes)
