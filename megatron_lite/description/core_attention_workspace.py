"""The workspaces of attention itself: the bytes that it allocates and frees as it runs.

Each course follows the code in model/core_attention.py and torch's operators. See
attention_workspace.py. Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.dropout_workspace import dropout_forward, masked
from megatron_lite.description.operations import ID_BYTES, Course, KeptTensor, Workspace, course
from megatron_lite.description.sizes import Heads, Sizes


def flash_workspace(
    model: ModelConfig, sizes: Sizes, log_sum_exp: int, freed: int, *, windowed: bool
) -> Workspace:
    """Returns the workspace of a flash kernel. With a mask, both directions build it.

    log_sum_exp: the bytes of the row sums that the kernel keeps.
    freed: the bytes of the inputs that no earlier operation keeps.
    """
    heads = Heads.of(model, sizes)
    output = heads.query
    results = output + log_sum_exp
    if sizes.cp_size > 1:
        return _exchanging(model, sizes, results, freed)
    masked = windowed or sizes.resets_attention
    mask = _mask(sizes, windowed=windowed) if masked else Course()
    return Workspace(
        course(mask, +results, -mask.end),
        course(mask, +heads.query + 2 * heads.kv, -mask.end - output - results - freed),
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
    in_replay: bool = False,
) -> Workspace:
    """Returns the workspace of attention that builds its scores.

    elements: the number of scores. softmax_bytes: the bytes of an element of the softmax.
    heads: the tensors that it keeps of query, key and value.
    freed: the names and bytes of the inputs that no earlier operation keeps.
    in_replay: whether it ends a replay, which leaves the product with the values out and holds the
        gradient of the output to the end.
    """
    return Workspace(
        _unfused_forward(
            model, sizes, elements, softmax_bytes, windowed=windowed, skip_tail=in_replay
        ),
        _unfused_backward(
            model, sizes, elements, softmax_bytes, heads, freed, holds_gradient=in_replay
        ),
    )


def _exchanging(model: ModelConfig, sizes: Sizes, results: int, freed: int) -> Workspace:
    """Returns the workspace of flash attention over context-parallel ranks.

    It describes context_parallel/sharded_attention.py on the rank that reads most keys.

    results: the bytes of the output and the log-sum-exp. freed: see `flash_workspace`.
    """
    query, kv = Heads.of(model, sizes)
    part, log_sum_exp = 2 * kv, results - query
    ring = sizes.cp_comm_type == "p2p"
    # The ring holds a part, the one that arrives and, beyond two ranks, the next one.
    others = min(sizes.cp_size - 1, 2) * part if ring else sizes.cp_size * part
    copy = 0 if ring else sizes.gloo_copy(others)
    wide = query // sizes.element_bytes * sizes.accumulate_bytes
    sums = wide if wide != query else 0
    forward = course(
        # own and other parts, the first result, its float32 copy, the result of another part
        *(+part, +others, +copy, +results, -copy, +sums, +results),
        *((+sums, -sums) if sums else ()),
        *(+2 * log_sum_exp, -2 * log_sum_exp),  # the factor of the merge: sigmoid(l2 - l1)
        *((-query, -results, +query, -sums) if sums else (-results,)),
        -part - others,
    )
    # The sum of the gradients travels in two tensors, or lies in one of all parts.
    travels = 2 * part if ring else 0
    gathered_sum = 0 if ring else sizes.cp_size * part
    gradients, second = query + part, max(query + part // 2, query // 2 + part)
    backward = course(
        *(+part, +gathered_sum, +wide, +others, +copy),
        *(+gradients, -copy, +travels, +second, -gradients),
        *(part + copy, -copy),  # the sum that arrives, or this rank's part of the reduce-scatter
        -second - others - travels - gathered_sum - part,
        *((+query, -wide) if sums else ()),
        -query - results - freed,
    )
    return Workspace(forward, backward)


def _mask(sizes: Sizes, *, windowed: bool) -> Course:
    """Returns the course of the mask of documents, of a window, or of both. It ends with the mask.

    See model/documents.py and model/window.py.
    """
    mask = sizes.own_seq_length * sizes.seq_length * sizes.element_bytes
    if not sizes.resets_attention:
        return course(+mask, +mask, -mask)
    samples = sizes.micro_batch_size
    places = ID_BYTES * sizes.own_seq_length
    first = samples * places if windowed else 0
    earlier = samples * sizes.own_seq_length * sizes.seq_length
    limits = (+places, +first, -places) if windowed else ()
    # places, the first key that a window reaches, the keys before the first one, the mask
    return course(+places, *limits, +earlier, samples * mask, -places - first - earlier)


def _unfused_forward(
    model: ModelConfig,
    sizes: Sizes,
    elements: int,
    softmax_bytes: int,
    *,
    windowed: bool,
    skip_tail: bool = False,
) -> Course:
    """Returns the course of the forward of attention that builds its scores.

    elements: the number of scores. softmax_bytes: the bytes of an element of the softmax.
    skip_tail: whether the product with the values is left out.
    """
    heads = Heads.of(model, sizes)
    scores, softmax = elements * sizes.element_bytes, elements * softmax_bytes
    mask = Course(*[sizes.own_seq_length * sizes.seq_length * sizes.element_bytes] * 2)
    if windowed or sizes.resets_attention:
        mask = _mask(sizes, windowed=windowed)
    grouped = model.query_groups < model.num_attention_heads
    part, ranks = 2 * heads.kv, sizes.cp_size
    changes: list[int | Course] = []
    copy = sizes.gloo_copy(ranks * part)
    # all keys and values
    changes += [+part, +ranks * part, +copy, -copy, -part] if ranks > 1 else []
    changes += [mask]
    hidden = mask.end
    if sizes.resets_attention and sizes.micro_batch_size > 1 and scores > mask.end:
        # The masks of several samples are copied for every head.
        changes, hidden = [*changes, +scores, -mask.end], scores
    repeated = ranks * heads.query  # the key, or the value, for every head
    changes += [+repeated, +repeated, -ranks * part if ranks > 1 else 0] if grouped else []
    changes += [+scores]
    cast = softmax != scores
    # On a CPU the scores are cast before the softmax. A CUDA kernel reads them as they are.
    copy = softmax if cast and sizes.device == "cpu" else 0
    changes += [+copy, +softmax, -copy]
    changes += [+scores] if cast else []
    dropped = model.attention_dropout > 0.0
    changes += [dropout_forward(elements, scores, sizes)] if dropped else []
    by_head = 0 if skip_tail else heads.query
    changes += [+by_head, +by_head]
    return course(*changes, -hidden - scores - by_head - (scores if cast and dropped else 0))


def _unfused_backward(
    model: ModelConfig,
    sizes: Sizes,
    elements: int,
    softmax_bytes: int,
    heads: tuple[KeptTensor, ...],
    freed: dict[str, int],
    *,
    holds_gradient: bool = False,
) -> Course:
    """Returns the course of the backward of attention that builds its scores.

    holds_gradient: whether the caller of a replay holds the gradient of the output to the end.

    heads: the tensors that it keeps of query, key and value. freed: those of the inputs that no
    earlier operation keeps.
    """
    query, kv = Heads.of(model, sizes)
    scores, softmax = elements * sizes.element_bytes, elements * softmax_bytes
    cast, dropped = softmax != scores, model.attention_dropout > 0.0
    grouped = model.query_groups < model.num_attention_heads
    gradient = 0 if holds_gradient else query  # of the output
    own = {one.name: one.num_bytes for one in heads if grouped or one.name in freed}
    part, ranks = 2 * kv, sizes.cp_size
    if ranks > 1 and not grouped:
        own[heads[-1].name] = heads[-1].num_bytes
    value = own.pop(heads[-1].name, 0) if len(heads) == 3 else 0
    repeated = ranks * query  # the gradient of the key, or of the value, for every head
    # softmax times value: the factor that is not the softmax itself is freed, and so is the value
    changes: list[int | Course] = [+scores, +repeated]
    changes += [-gradient - value - (scores if cast or dropped else 0)]
    changes += [masked(scores, sizes), -scores - elements] if dropped else []
    changes += [+softmax, -scores] if cast else []
    changes += [+softmax, -2 * softmax]
    changes += [+scores, -softmax] if cast else []
    # The gradients of query and key are products, multiplied by the scale.
    changes += [+query, +query, -query, +repeated, +repeated, -repeated]
    changes += [-scores - sum(own.values())]
    changes += [+ranks * kv, -repeated, +ranks * kv, -repeated] if grouped else []
    # The gradients of all keys and values are joined and summed over the ranks.
    copy = sizes.gloo_copy(ranks * part)
    sums = (+ranks * part, -ranks * part, +part, +copy, -copy - ranks * part)
    changes += sums if ranks > 1 else ()
    return course(*changes)
