"""The description of self-attention between its two linear layers, as operations.

The code is in model/attention.py. Attention over c context-parallel ranks exchanges keys and
values. Each rank has a part of them with 2 s/c b g/t d elements.

                 forward         backward                      tensor of each collective
    p2p          c - 1 shifts    2 c - 1 shifts                one part
    allgather    all-gather      all-gather, reduce-scatter    all parts
    unfused      all-gather      reduce-scatter                all parts

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import CORE_ATTENTION
from megatron_lite.description.dropout import dropout_forward, masked
from megatron_lite.description.linears import OPERATORS, RowFrees
from megatron_lite.description.norm_statistics import (
    norm_backward,
    norm_forward,
    norm_parameters,
    norm_statistics,
)
from megatron_lite.description.operations import (
    ALL_GATHER,
    QK_LAYERNORM,
    REDUCE_SCATTER,
    SHIFT,
    Collective,
    Course,
    KeptTensor,
    Matmul,
    Moved,
    Operation,
    OperatorCall,
    RegionEntry,
    Workspace,
    course,
    shared_table,
)
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.weight_gradients import added_up

CORE = "core_attention"
CONTEXT_PARALLEL_ATTENTION = "megatron_lite.context_parallel_attention.default"


class Heads(NamedTuple):
    """The bytes of the query and of the key on one rank. The value has the bytes of the key.

    query: s/c b a/t d elements.
    kv: s/c b g/t d elements.
    """

    query: int
    kv: int

    @classmethod
    def of(cls, model: ModelConfig, sizes: Sizes) -> Heads:
        """Returns the bytes for one micro-batch of a model."""
        per_channel = sizes.tokens * sizes.element_bytes
        return cls(
            per_channel * (model.num_attention_heads * model.head_dim // sizes.tp_size),
            per_channel * (model.query_groups * model.head_dim // sizes.tp_size),
        )


def attention_output(model: ModelConfig, sizes: Sizes) -> KeptTensor:
    """Returns the tensor that core attention returns and linear_proj saves."""
    return KeptTensor("attention output", Heads.of(model, sizes).query, True)


def attention_operations(model: ModelConfig, sizes: Sizes, layer: int) -> Iterator[Operation]:
    """Yields the operations between linear_qkv and linear_proj of a layer.

    layer: the number of the layer in the whole model, counted from 0.
    """
    heads = Heads.of(model, sizes)
    grouped = model.query_groups < model.num_attention_heads
    # In these two cases the norms keep contiguous copies of query and key. Otherwise they keep
    # views of linear_qkv's output, which is one storage.
    apart = grouped or model.norm_impl == "apex"
    rotary, normed = model.layer_rotates(layer), model.qk_layernorm
    yield Operation(
        "split_heads",
        "self_attention",
        workspace=_split_workspace(model, heads, grouped=grouped, rotary=rotary),
    )
    whole = KeptTensor("query, key and value", heads.query + 2 * heads.kv, not normed)
    if normed:
        raw = (KeptTensor("query", heads.query), KeptTensor("key", heads.kv)) if apart else (whole,)
        rows = (heads.query + heads.kv) // sizes.element_bytes // model.head_dim
        yield Operation(
            QK_LAYERNORM,
            "self_attention",
            (*raw, norm_statistics("qk norm", model, sizes, rows)),
            parameters=(
                *norm_parameters(model, model.head_dim, "q_layernorm.", partial=True),
                *norm_parameters(model, model.head_dim, "k_layernorm.", partial=True),
            ),
            moved=Moved(2 * (heads.query + heads.kv), 3 * (heads.query + heads.kv)),
            workspace=_norms_workspace(model, sizes, heads, grouped=grouped, apart=apart),
        )
    if rotary:
        tables = 2 * sizes.own_seq_length * model.rotary_dim * sizes.element_bytes
        # x cos + rotate_half(x) sin takes five kernels for the query and five for the key.
        both = heads.query + heads.kv
        # The last reference to a tensor that nobody keeps goes when the rotated one replaces it.
        replaced = (
            heads.query + heads.kv
            if normed
            else heads.query + 2 * heads.kv + (heads.query if grouped else 0)
        )
        part = model.rotary_dim / model.head_dim
        yield Operation(
            "rotary",
            "self_attention",
            (shared_table("rotary tables", tables),),
            moved=Moved(10 * both, 12 * both),
            workspace=Workspace(
                course(_rotate(heads.query, part), _rotate(heads.kv, part), -replaced),
                course(_rotate_backward(heads.kv, part), _rotate_backward(heads.query, part)),
            ),
        )
    # Without rotation, norm and groups, core attention saves views of linear_qkv's output.
    inputs: tuple[KeptTensor, ...] = (whole,)
    if rotary or normed or grouped:
        prefix = "normed " if normed else ""
        if rotary:
            prefix = "rotated "
        value = whole if normed and not apart else KeptTensor("value", heads.kv, True)
        inputs = (
            KeptTensor(f"{prefix}query", heads.query, True),
            KeptTensor(f"{prefix}key", heads.kv, True),
            value,
        )
    windowed = model.layer_reach(layer, sizes.seq_length) is not None
    # The norms keep linear_qkv's output too, and their backward frees it.
    held = {whole.name} if normed else set()
    freed = {one.name: one.num_bytes for one in inputs if one.name not in held}
    if model.builds_scores(sizes.device):
        yield _unfused(model, sizes, inputs, freed, windowed=windowed)
    else:
        yield _flash(model, sizes, inputs, sum(freed.values()), windowed=windowed)


def projection_frees(model: ModelConfig, sizes: Sizes) -> RowFrees:
    """Returns the tensors that are freed with linear_proj.

    Flash attention keeps its output too. Unfused attention keeps key and value repeated for every
    query head, and the layer holds the key and the value themselves until linear_proj has run.
    """
    heads = Heads.of(model, sizes)
    if not model.builds_scores(sizes.device):
        return RowFrees(0, 0)
    grouped = model.query_groups < model.num_attention_heads
    return RowFrees(2 * heads.kv if grouped else 0, heads.query)


def _split_workspace(model: ModelConfig, heads: Heads, *, grouped: bool, rotary: bool) -> Workspace:
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


def _norms_workspace(
    model: ModelConfig, sizes: Sizes, heads: Heads, *, grouped: bool, apart: bool
) -> Workspace:
    """Returns the workspace of the norms of query and key.

    The gradients have another layout than the heads, with these exceptions: the key's gradient of
    unfused attention if it is summed over a group, and both gradients of flash attention if there
    is one sample.
    """
    d = model.head_dim
    queries, keys = (size // sizes.element_bytes // d for size in heads)
    vectors = norm_parameters(model, d, partial=True)
    raw_query, raw_key = (heads.query, heads.kv) if apart else (heads.query + 2 * heads.kv, 0)
    unfused, samples = model.builds_scores(sizes.device), sizes.micro_batch_size
    copies_query = unfused or samples > 1
    copies_key = not grouped if unfused else samples > 1
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


def _flash(
    model: ModelConfig, sizes: Sizes, inputs: tuple[KeptTensor, ...], freed: int, *, windowed: bool
) -> Operation:
    """Returns core attention by a flash kernel.

    The kernel keeps its inputs, its output and one number per row: the log of the row's sum of
    exponentials. Its backward builds the scores again. With a window the layer keeps the same
    tensors, since its mask is built again too (model/window.py). The exception is a window with
    dropout on CUDA: torch's own function keeps the mask.

    freed: the bytes of the inputs that no earlier operation keeps.
    """
    attended = attention_output(model, sizes)
    rows = (
        sizes.micro_batch_size * model.num_attention_heads // sizes.tp_size * sizes.own_seq_length
    )
    log_sum_exp = KeptTensor("log-sum-exp", rows * sizes.accumulate_bytes)
    kernel = "efficient_attention" if windowed else "flash_attention"
    if sizes.device == "cpu":
        kernel = "flash_attention_for_cpu"
    operator = (
        f"aten._scaled_dot_product_{kernel}.default"
        if sizes.cp_size == 1
        else CONTEXT_PARALLEL_ATTENTION
    )
    scores, context = (
        one._replace(causal=not windowed, fused=True) for one in _matmuls(model, sizes)
    )
    forward, backward = _exchange(model, sizes)
    # No policy may keep a result that depends on random numbers: the replay would not draw them,
    # and all later draws would differ.
    call = OperatorCall(
        "" if model.attention_dropout > 0.0 else operator,
        (attended, log_sum_exp),
        (scores, context),
        forward,
    )
    mask = (
        (KeptTensor("window mask", sizes.seq_length**2 * sizes.element_bytes),)
        if windowed and model.attention_dropout
        else ()
    )
    heads = Heads.of(model, sizes)
    results = attended.num_bytes + log_sum_exp.num_bytes
    masked = _window_mask(sizes) if windowed else ()
    built = sum(masked)
    return Operation(
        CORE,
        "self_attention.core_attention",
        (*inputs, attended, log_sum_exp, *mask),
        (CORE_ATTENTION,),
        (RegionEntry(CORE_ATTENTION, inputs),),
        (call,),
        backward,
        rebuilds=(scores,),
        workspace=_exchanging(model, sizes, results, freed)
        if sizes.cp_size > 1
        else Workspace(
            course(*masked, +results, -built),
            course(
                *masked, +heads.query + 2 * heads.kv, -built - attended.num_bytes - results - freed
            ),
        ),
    )


def _exchanging(model: ModelConfig, sizes: Sizes, results: int, freed: int) -> Workspace:
    """Returns the workspace of flash attention over context-parallel ranks.

    It describes context_parallel/sharded_attention.py on the rank that reads most keys.

    results: the bytes of the output and the log-sum-exp. freed: see `_flash`.
    """
    query, kv = Heads.of(model, sizes)
    part, log_sum_exp = 2 * kv, results - query
    ring = sizes.cp_comm_type == "p2p"
    # The ring holds a part, the one that arrives and, beyond two ranks, the next one.
    others = min(sizes.cp_size - 1, 2) * part if ring else sizes.cp_size * part
    wide = query // sizes.element_bytes * sizes.accumulate_bytes
    sums = wide if wide != query else 0
    forward = course(
        *(+part, +others, +results, +sums, +results),
        *((+sums, -sums) if sums else ()),
        *(+2 * log_sum_exp, -2 * log_sum_exp),
        *((-query, -results, +query, -sums) if sums else (-results,)),
        -part - others,
    )
    # The sum of the gradients travels in two tensors, or lies in one of all parts.
    travels = 2 * part if ring else 0
    gathered_sum = 0 if ring else sizes.cp_size * part
    gradients, second = query + part, max(query + part // 2, query // 2 + part)
    backward = course(
        *(+part, +gathered_sum, +wide, +others),
        *(+gradients, +travels, +second, -gradients),
        part,  # the sum that arrives, or this rank's part of the reduce-scatter
        -second - others - travels - gathered_sum - part,
        *((+query, -wide) if sums else ()),
        -query - results - freed,
    )
    return Workspace(forward, backward)


def _unfused(
    model: ModelConfig,
    sizes: Sizes,
    inputs: tuple[KeptTensor, ...],
    freed: dict[str, int],
    *,
    windowed: bool,
) -> Operation:
    """Returns core attention that builds its scores.

    It keeps the softmax, s/c x s for each head. With dropout it also keeps the mask, one byte per
    element, and the dropped softmax.

    freed: the names and bytes of the inputs that no earlier operation keeps.
    """
    attended = attention_output(model, sizes)
    # The keys of all context-parallel ranks, repeated for every query head of a group.
    repeated = attended.num_bytes * sizes.cp_size
    heads = inputs
    if model.query_groups < model.num_attention_heads:
        heads = (
            inputs[0],
            KeptTensor("repeated key", repeated),
            KeptTensor("repeated value", repeated),
        )
    elif sizes.cp_size > 1:
        heads = (inputs[0], KeptTensor("gathered key and value", 2 * repeated))
    elements = (
        sizes.micro_batch_size
        * model.num_attention_heads
        // sizes.tp_size
        * sizes.own_seq_length
        * sizes.seq_length
    )
    softmax = (
        max(4, sizes.element_bytes) if model.attention_softmax_in_fp32 else sizes.element_bytes
    )
    kept = [KeptTensor("softmax", elements * softmax, True)]
    if model.attention_dropout > 0.0:
        kept += [
            KeptTensor("softmax dropout mask", elements, True),
            KeptTensor("dropped softmax", elements * sizes.element_bytes, True),
        ]
    # A float32 softmax is cast before the product with V, which saves the cast tensor.
    elif softmax != sizes.element_bytes:
        kept += [KeptTensor("cast softmax", elements * sizes.element_bytes)]
    moved = Moved(
        # The mask is spread over the scores. Softmax reads them and writes its result. The
        # attended values are copied to the layout [s, b, h].
        2 * elements * sizes.element_bytes + elements * softmax + 2 * attended.num_bytes,
        elements * sizes.element_bytes + 2 * elements * softmax + 4 * attended.num_bytes,
    )
    if softmax != sizes.element_bytes:
        cast = elements * (softmax + sizes.element_bytes)
        moved += (cast, cast)
    if model.attention_dropout > 0.0:
        dropped = elements * (2 * sizes.element_bytes + 1)
        moved += (dropped, dropped)
    if model.query_groups < model.num_attention_heads:
        moved += (4 * repeated, 4 * repeated)
    scores, context = _matmuls(model, sizes)
    forward, backward = _exchange(model, sizes)
    gathers = []
    if forward:
        gathered = KeptTensor("gathered key and value", forward[0].num_bytes)
        gathers = [OperatorCall(OPERATORS[ALL_GATHER], (gathered,), collectives=forward)]
    calls = (
        *gathers,
        OperatorCall(
            "aten.baddbmm.default",
            (KeptTensor("scores", elements * sizes.element_bytes),),
            (scores,),
        ),
        OperatorCall(
            "aten.bmm.default",
            (attended._replace(name="attention output by head"),),
            (context,),
            output_only=True,
        ),
    )
    return Operation(
        CORE,
        "self_attention.core_attention",
        (*heads, *kept),
        (CORE_ATTENTION,),
        (RegionEntry(CORE_ATTENTION, inputs),),
        calls,
        backward,
        moved=moved,
        workspace=Workspace(
            _unfused_forward(model, sizes, elements, softmax, windowed=windowed),
            _unfused_backward(model, sizes, elements, softmax, heads, freed),
        ),
        replayed=Workspace(
            _unfused_forward(model, sizes, elements, softmax, windowed=windowed, skip_tail=True),
            _unfused_backward(model, sizes, elements, softmax, heads, freed, holds_gradient=True),
        ),
    )


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
    mask = sizes.own_seq_length * sizes.seq_length * sizes.element_bytes
    grouped = model.query_groups < model.num_attention_heads
    part, ranks = 2 * heads.kv, sizes.cp_size
    changes: list[int | Course] = []
    changes += [+part, +ranks * part, -part] if ranks > 1 else []  # all keys and values
    changes += [*(_window_mask(sizes) if windowed else (+mask,))]
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
    return course(*changes, -mask - scores - by_head - (scores if cast and dropped else 0))


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
    changes += [+ranks * part, -ranks * part, +part, -ranks * part] if ranks > 1 else []
    return course(*changes)


def _matmuls(model: ModelConfig, sizes: Sizes) -> tuple[Matmul, Matmul]:
    """Returns the matmuls Q K^T and softmax times V.

    Each is over the whole sequence, without the saving of a causal mask.
    """
    queries, keys, d = sizes.own_seq_length, sizes.seq_length, model.head_dim
    heads = sizes.micro_batch_size * model.num_attention_heads // sizes.tp_size
    return Matmul("scores", queries, keys, d, heads), Matmul("context", queries, d, keys, heads)


def _exchange(
    model: ModelConfig, sizes: Sizes
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Returns the forward and the backward collectives of attention over context-parallel ranks."""
    if sizes.cp_size == 1:
        return (), ()
    part = 2 * Heads.of(model, sizes).kv
    gather = Collective(ALL_GATHER, sizes.cp_size * part)
    scatter = Collective(REDUCE_SCATTER, sizes.cp_size * part)
    if model.builds_scores(sizes.device):
        return (gather,), (scatter,)
    shift = Collective(SHIFT, part)
    return chosen(
        "--cp-comm-type",
        sizes.cp_comm_type,
        {
            "p2p": ((shift,) * (sizes.cp_size - 1), (shift,) * (2 * sizes.cp_size - 1)),
            "allgather": ((gather,), (gather, scatter)),
        },
    )
