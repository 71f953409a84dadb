"""The workspaces around attention: the split into heads, the norms and the rotation.

A workspace is the bytes that an operation allocates and frees as it runs.

A course lists its changes of the allocated bytes in their order (operations.py). Each follows the
code in model/attention.py and torch's operators; tests/description/test_workspace.py compares it
with the allocations of a run. core_attention_workspace.py has the workspaces of attention itself.
self_attention.py has the operations: what they keep, compute and communicate.

Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.norm_statistics import norm_backward, norm_forward, norm_parameters
from megatron_lite.description.operations import Course, Workspace, course
from megatron_lite.description.query_key_norms import (
    all_heads_backward,
    all_heads_forward,
    all_heads_parameters,
)
from megatron_lite.description.sizes import Heads, Sizes
from megatron_lite.description.weight_gradients import added_up


def split_workspace(model: ModelConfig, heads: Heads, *, grouped: bool, rotary: bool) -> Workspace:
    """Returns the workspace of the split of linear_qkv's output into query, key and value.

    Each of the three is a view or a copy (model/attention.py). If all are copies, linear_qkv's
    output is freed. Backward joins the three gradients.
    """
    whole = heads.query + 2 * heads.kv
    copied_later = model.norm_impl == "apex" if model.qk_layernorm else rotary
    copies = [heads.query] if grouped else []
    copies += [heads.kv] if grouped and not copied_later else []
    copies += [heads.kv] if grouped or copied_later else []
    return Workspace(course(*copies, -whole if len(copies) == 3 else 0), course(+whole, -whole))


def norms_workspace(
    model: ModelConfig, sizes: Sizes, heads: Heads, *, grouped: bool, apart: bool
) -> Workspace:
    """Returns the workspace of the norms of query and key.

    The gradients have another layout than the heads, with these exceptions: the key's gradient of
    unfused attention if it is summed over a group, and both gradients of flash attention if there
    is one sample or if they are computed by products.

    """
    d = model.head_dim
    queries, keys = (size // sizes.element_bytes // d for size in heads)
    vectors = norm_parameters(model, d, partial=True)
    raw_query, raw_key = (heads.query, heads.kv) if apart else (heads.query + 2 * heads.kv, 0)
    if model.norms_all_heads:
        of_query, of_key = all_heads_parameters(model, sizes)
        shifted_query, shifted_key = (
            one.num_elements * sizes.element_bytes * model.apply_layernorm_1p
            for one in (of_query, of_key)
        )
        return Workspace(
            course(
                all_heads_forward(sizes, heads.query, shifted_query),
                all_heads_forward(sizes, heads.kv, shifted_key),
            ),
            course(
                all_heads_backward(sizes, heads.kv, of_key, shifted_key),
                added_up((of_key,), sizes),
                -raw_key,
                all_heads_backward(sizes, heads.query, of_query, shifted_query),
                added_up((of_query,), sizes),
                -raw_query,
            ),
        )
    unfused, samples = model.builds_scores(sizes.device), sizes.micro_batch_size
    flash_copies = samples > 1
    copies_query = unfused or flash_copies
    copies_key = not grouped if unfused else flash_copies
    return Workspace(
        course(norm_forward(model, sizes, queries, d), norm_forward(model, sizes, keys, d)),
        course(
            norm_backward(model, sizes, keys, d, copies=copies_key),
            added_up(vectors, sizes),
            -raw_key,
            norm_backward(model, sizes, queries, d, copies=copies_query),
            added_up(vectors, sizes),
            -raw_query,
        ),
    )


def rotary_workspace(model: ModelConfig, heads: Heads, *, grouped: bool) -> Workspace:
    """Returns the workspace of the rotation of query and key."""
    # A tensor that no operation keeps is freed when the rotated one takes its name in the layer.
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


def _rotate(heads: int, part: float) -> Course:
    """Returns the course of the rotation of a tensor of heads. It ends with a new tensor.

    heads: its bytes. part: the share of its channels that are rotated.
    """
    rotated = round(heads * part)
    half = rotated // 2  # the negated second half of the channels
    # x cos; -x2, joined with x1, times sin; the sum, after which both products are freed
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
