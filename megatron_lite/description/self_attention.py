"""The description of self-attention between its two linear layers, as operations.

The code is in model/attention.py and core_attention.py. Attention over c
context-parallel ranks exchanges keys and values. Each rank has a part of them with 2 s/c b g/t d
elements.

                 forward         backward                      tensor of each collective
    p2p          c - 1 shifts    2 c - 1 shifts                one part
    allgather    all-gather      all-gather, reduce-scatter    all parts
    unfused      all-gather      reduce-scatter                all parts
    a2a          4 all-to-alls   4 all-to-alls                 query, key, value and output

Standard library only.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_lite.config.regions import CORE_ATTENTION

from .norms import query_key_norms
from .operations import (
    ALL_GATHER,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SHIFT,
    Collective,
    KeptTensor,
    Matmul,
    Moved,
    Operation,
    OperatorCall,
)
from .sizes import Sizes

CORE = "core_attention"
# The bytes in which CUDA's kernels keep the place of their random numbers, also without dropout.
SEED_AND_OFFSET, OF_FLASH = 16, 24
CONTEXT_PARALLEL_ATTENTION = "megatron_lite.context_parallel_attention.default"

Tensors = tuple[KeptTensor, ...]


def attention_output(of: Sizes) -> KeptTensor:
    """Returns the tensor that core attention returns and linear_proj saves."""
    return KeptTensor("attention output" + " of own tokens" * of.exchanges_heads, of.attended)


def attention_operations(of: Sizes, layer: int) -> Iterator[Operation]:
    """Yields the operations between linear_qkv and linear_proj of a layer.

    layer: the number of the layer in the whole model, counted from 0.
    """
    model = of.model
    grouped = model.query_groups < model.num_attention_heads
    # In these cases the norms keep contiguous copies of query and key. Otherwise they keep views of
    # linear_qkv's output, which is one storage.
    by_head = of.compiled and not model.norms_all_heads
    apart = grouped and not by_head
    rotary, normed = model.layer_rotates(layer), model.qk_layernorm
    yield Operation("split_heads", "self_attention")
    whole = KeptTensor("query, key and value", of.query + 2 * of.kv)
    if normed:
        yield query_key_norms(of, _heads(of) if apart else (whole,))
    if rotary:
        # x cos + rotate_half(x) sin takes five kernels for the query and five for the key. A
        # compiled norm rotates too, and without norms one kernel splits and rotates.
        both = (of.query + of.kv) * (not (normed and by_head))
        both += of.kv * (of.compiled and not normed)
        # Forward holds the output of linear_qkv, copies of heads, and four tensors of the query.
        held = (2 * whole.num_bytes - of.kv * (not normed)) * (apart or not normed)
        turned = 4 * of.query * model.rotary_dim // model.head_dim
        yield Operation(
            "rotary",
            "self_attention",
            (rotary_tables(of, "local " * model.layer_is_local(layer)),),
            moved=Moved(2 * both, 2 * both) if of.compiled else Moved(10 * both, 12 * both),
            temporary=0 if of.compiled else held + turned,
        )
    # Without rotation, norm and groups, core attention saves views of linear_qkv's output.
    inputs: Tensors = (whole,)
    if rotary or normed or grouped:
        prefix = "rotated " if rotary else "normed " * normed
        value = whole if normed and not apart else KeptTensor("value", of.kv)
        inputs = (*_heads(of, prefix), value)
    yield core_attention(of, inputs, layer)


def rotary_tables(of: Sizes, kind: str = "") -> KeptTensor:
    """Returns the constant tables that all layers save."""
    num_bytes = 2 * of.own_seq_length * of.model.rotary_dim * of.element_bytes
    return KeptTensor(f"{kind}rotary tables", num_bytes, stays=True, shared=True)


def core_attention(of: Sizes, inputs: Tensors, layer: int) -> Operation:
    """Returns attention itself. inputs: query, key and value."""
    model = of.model
    if of.exchanges_heads:
        # attention of one rank, with the heads of more tensor-parallel ranks, and the exchanges
        # around it (model/dispatch.py)
        alone = replace(of, tp_size=of.tp_size * of.cp_size, cp_size=1)
        received = (*_heads(of, "exchanged "), KeptTensor("exchanged value", of.value))
        core = core_attention(alone, received, layer)
        moved = dict(query=of.query, key=of.kv, value=of.value, output=of.attended)
        sent = {name: Collective(ALL_TO_ALL, num_bytes) for name, num_bytes in moved.items()}
        *before, after = (
            one.call(f"received {name}", output_only=name == "output") for name, one in sent.items()
        )
        # Forward still holds what it has sent, and exchanges the output.
        callers = sum(one.num_bytes for one in inputs) + _output_of_qkv(of, inputs)
        return core._replace(
            enters=inputs,
            calls=(*before, *core.calls, after),
            backward=tuple(sent.values()),
            temporary=max(core.temporary, callers + 2 * of.attended),
        )
    if model.builds_scores(of.device):
        return _unfused(of, inputs)
    return _flash(of, inputs, windowed=model.layer_reach(layer, of.seq_length) is not None)


def _heads(of: Sizes, prefix: str = "") -> Tensors:
    return KeptTensor(f"{prefix}query", of.query), KeptTensor(f"{prefix}key", of.kv)


def _flash(of: Sizes, inputs: Tensors, *, windowed: bool) -> Operation:
    """Returns core attention by a flash kernel.

    The kernel keeps its inputs, its output and one number per row: the log of the row's sum of
    exponentials. Its backward builds the scores again. With a window or with documents the layer
    keeps the same tensors (model/attention.py). The exception is a mask with dropout on CUDA:
    torch's own function keeps the mask.
    """
    drops = of.model.attention_dropout > 0.0
    attended = attention_output(of)
    rows = of.query // of.element_bytes // of.model.head_dim
    log_sum_exp = KeptTensor("log-sum-exp", rows * of.accumulate_bytes)
    on_cpu, is_wide = of.device == "cpu", of.element_bytes > 2
    # FlashAttention knows windows. Other kernels, and torch's own function, get a mask.
    packed = of.resets_attention
    masked = (windowed and (on_cpu or is_wide or drops)) or (packed and drops)
    alone, is_flash = of.cp_size == 1, of.model.attention_backend == "flash" and not on_cpu
    # Without dropout our own Functions run these; torch's own function has no groups in float32.
    # Heads of values that are smaller are padded, and the result is cut.
    grouped, pads = of.query != of.kv, of.value != of.kv
    result = KeptTensor("padded attention output", of.query) if pads else attended
    ours = masked or windowed or packed or is_flash or (is_wide and grouped) or pads
    operator = "aten._scaled_dot_product_flash_attention"
    if on_cpu:
        operator += "_for_cpu"
    elif masked or is_wide:
        operator = "aten._scaled_dot_product_efficient_attention"
    elif ours:
        operator = "aten._flash_attention_forward"
    elif of.model.attention_backend == "fused":
        operator = "aten._scaled_dot_product_cudnn_attention"
    scores, context = (one._replace(causal=not masked, fused=True) for one in _matmuls(of))
    forward, backward = _exchange(of)
    # No policy may keep a result that depends on random numbers: the replay would not draw them,
    # and all later draws would differ.
    call = OperatorCall(
        "" if drops else f"{operator}.default" if alone else CONTEXT_PARALLEL_ATTENTION,
        (result, log_sum_exp),
        (scores, context._replace(n=of.model.head_dim)),
        forward,
    )
    in_flash = (is_flash or of.deterministic) and not (masked or is_wide)
    # the mask, which other devices have a second time
    built = (2 - on_cpu) * of.own_seq_length * of.seq_length * of.element_bytes
    pieces, size = 0, of.micro_batch_size
    if packed and (on_cpu or is_wide):  # the gradients of a document, at most of a whole sample
        pieces = (of.query + 2 * of.kv) // size
    elif packed and size > 1:  # copies in the order of the samples
        pieces = 3 * of.query + 2 * of.kv
    state = KeptTensor("seed and offset", OF_FLASH if in_flash else SEED_AND_OFFSET)
    states = (state,) * (not on_cpu and alone and (drops or not ours))
    mask: Tensors = ()
    if masked and drops:
        samples = of.micro_batch_size if packed else 1
        name = "document mask" if packed else "window mask"
        mask = (KeptTensor(name, samples * of.seq_length**2 * of.element_bytes),)
    return Operation(
        CORE,
        "self_attention.core_attention",
        (*inputs, attended, log_sum_exp, *states, *mask),
        (CORE_ATTENTION,),
        inputs,
        calls=(call,),
        backward=backward,
        rebuilds=(scores,),
        temporary=_flash_temporary(of) + alone * (built * masked + pieces) + on_cpu * _on_cpu(of),
    )


def _on_cpu(of: Sizes) -> int:
    """Returns the bytes of a thread's blocks of scores and of their gradients, in float32 and
    rounded (torch 2.13, FlashAttentionKernel.cpp), and of a copy of the output's gradient, whose
    samples do not lie one behind the other."""
    length = of.own_seq_length
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    each = of.accumulate_bytes + of.element_bytes * of.is_rounded
    blocks, samples = 2 * rows * min(length, 512) * each, of.micro_batch_size
    if of.resets_attention:  # a document at a time, the first before the place of all gradients
        return (blocks + of.query // samples) * (samples > 1)
    return blocks + of.query * (samples > 1)


def _flash_temporary(of: Sizes) -> int:
    """Returns the bytes of the gradients of the output, query, key and value.

    Over context-parallel ranks (context_parallel/sharded_attention.py) keys, values and the sum of
    their gradients travel besides.
    """
    query, part, ranks = of.query, 2 * of.kv, of.cp_size
    # the gradient of the output, before it is padded as value and output are
    smaller = of.attended + 2 * query if of.value != of.kv else 0
    if ranks == 1:
        return 2 * query + part + smaller
    gradients, second = query + part, max(query + part // 2, query // 2 + part)
    if of.cp_comm_type == "p2p":
        # The ring holds a part, the one that arrives and, beyond two ranks, the next one. Two parts
        # of gradients travel.
        held = (min(ranks - 1, 2) + 2) * part
        return smaller + gradients + of.wide(query) + held + second + gradients
    whole = ranks * part
    copy = of.gloo_copy(whole)
    most = max(gradients + max(copy, second), second + part + copy)
    return smaller + gradients + of.wide(query) + 2 * whole + most


def _unfused(of: Sizes, inputs: Tensors) -> Operation:
    """Returns core attention that builds its scores.

    It keeps the softmax, s/c x s for each head. With dropout it also keeps the mask, one byte per
    element, and the dropped softmax.
    """
    model = of.model
    grouped = model.query_groups < model.num_attention_heads
    attended = attention_output(of)
    # The keys of all context-parallel ranks, repeated for every query head of a group.
    repeated = of.query * of.cp_size
    heads = inputs
    if grouped:
        again = (KeptTensor(f"repeated {name}", repeated) for name in ("key", "value"))
        heads = (inputs[0], *again)
    elif of.cp_size > 1:
        heads = (inputs[0], KeptTensor("gathered key and value", of.cp_size * _sent(of)))
    elements = repeated // of.element_bytes // model.head_dim * of.own_seq_length
    scores = elements * of.element_bytes
    softmax = of.wide(scores) if model.attention_softmax_in_fp32 else scores
    caps = model.attn_logit_softcapping is not None
    kept = [KeptTensor("softmax", softmax), *[KeptTensor("tanh of the scores", scores)] * caps]
    # The mask is spread over the scores. Softmax reads them and writes its result. The attended
    # values are copied to the layout [s, b, h].
    moved = Moved(
        2 * scores + softmax + 2 * attended.num_bytes, scores + 2 * softmax + 4 * attended.num_bytes
    )
    if caps:  # the tanh, and its sum with the mask
        moved += (3 * scores, 5 * scores)
    if softmax != scores:
        moved += (softmax + scores,) * 2
    if model.attention_dropout > 0.0:
        kept += [
            KeptTensor("softmax dropout mask", elements),
            KeptTensor("dropped softmax", scores),
        ]
        moved += (2 * scores + elements,) * 2
    # A float32 softmax is cast before the product with V, which saves the cast tensor.
    elif softmax != scores:
        kept.append(KeptTensor("cast softmax", scores))
    if grouped:
        moved += (4 * repeated,) * 2
    first, second = _matmuls(of)
    forward, backward = _exchange(of)
    by_head = attended._replace(name="attention output by head")
    return Operation(
        CORE,
        "self_attention.core_attention",
        (*heads, *kept),
        (CORE_ATTENTION,),
        inputs,
        calls=(
            *(one.call("gathered key and value") for one in forward),
            OperatorCall("aten.baddbmm.default", (KeptTensor("scores", scores),), (first,)),
            OperatorCall("aten.bmm.default", (by_head,), (second,), output_only=True),
        ),
        backward=backward,
        moved=moved,
        temporary=_unfused_temporary(of, inputs, heads, scores, softmax),
    )


def _unfused_temporary(
    of: Sizes, inputs: Tensors, heads: Tensors, scores: int, softmax: int
) -> int:
    """Returns the number of attention that builds its scores, from their bytes.

    heads: the query, and the keys and values that it keeps.
    """
    attended, exchange = of.attended, 0
    # Forward holds its callers' tensors, the scores and the mask, and what dropout draws. On a CPU
    # dropout has its mask in the dtype of the scores as well, unless it is compiled.
    callers = sum(one.num_bytes for one in inputs if one not in heads)
    callers += _output_of_qkv(of, inputs)
    if of.cp_size > 1 and not heads[2:]:  # the softmax is not there yet
        exchange = callers + _sent(of) + of.gloo_copy(heads[1].num_bytes) - softmax
    mask = of.own_seq_length * of.seq_length * of.element_bytes
    if of.resets_attention and of.micro_batch_size > 1:
        mask = scores
    drawn = cast = freed = 0
    if of.model.attention_dropout:
        # and the cast of a float32 softmax
        drawn = 2 * scores // of.element_bytes + scores * (softmax != scores)
        cast = scores * (of.device == "cpu" and not of.compiled)
    # The product with the values frees its factors: one besides the softmax, and the values.
    if softmax != scores or of.model.attention_dropout:
        freed = scores
    freed += sum(one.num_bytes for one in heads[2:])
    # the gradients of keys and values for every head
    keys, values = of.cp_size * of.query, of.cp_size * attended
    return max(
        exchange,
        callers + scores + mask + max(drawn + cast, 2 * attended),
        attended + scores + values,
        values + 2 * scores + cast - freed,
        values + 2 * softmax - freed,
        of.query + 2 * keys + values + scores - softmax - freed,
    )


def _output_of_qkv(of: Sizes, inputs: Tensors) -> int:
    """Returns the bytes of linear_qkv's output, which forward holds besides what is made of it."""
    is_whole = len(inputs) == 1 or of.model.multi_latent_attention
    return 0 if is_whole else of.query + 2 * of.kv


def _matmuls(of: Sizes) -> tuple[Matmul, Matmul]:
    """Returns the matmuls Q K^T and softmax times V.

    Each is over the whole sequence, without the saving of a causal mask.
    """
    queries, keys = of.own_seq_length, of.seq_length
    heads = of.micro_batch_size * of.model.num_attention_heads // of.tp_size
    heads *= of.attends
    scores = Matmul("scores", queries, keys, of.model.head_dim, heads)
    return scores, Matmul("context", queries, of.model.value_dim, keys, heads)


def _sent(of: Sizes) -> int:
    """Returns the bytes of the keys and values of a rank as they travel: to a kernel, padded."""
    return of.kv + (of.value if of.model.builds_scores(of.device) else of.kv)


def _exchange(of: Sizes) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Returns the forward and the backward collectives of attention over context-parallel ranks."""
    ranks, part = of.cp_size, _sent(of)
    gather, scatter = (Collective(kind, ranks * part) for kind in (ALL_GATHER, REDUCE_SCATTER))
    shift = Collective(SHIFT, part)
    if ranks == 1:
        return (), ()
    if of.model.builds_scores(of.device):
        return (gather,), (scatter,)
    if of.cp_comm_type == "p2p":
        return (shift,) * (ranks - 1), (shift,) * (2 * ranks - 1)
    return (gather,), (gather, scatter)
