"""The description of self-attention between its two linear layers, as operations.

The code is in model/attention.py and core_attention.py. Attention over c
context-parallel ranks exchanges keys and values. Each rank has a part of them with 2 s/c b g/t d
elements.

                 forward         backward                      tensor of each collective
    p2p          c - 1 shifts    2 c - 1 shifts                one part
    allgather    all-gather      all-gather, reduce-scatter    all parts
    unfused      all-gather      reduce-scatter                all parts

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import CORE_ATTENTION
from megatron_lite.description import temporaries
from megatron_lite.description.linears import OPERATORS
from megatron_lite.description.norms import query_key_norms
from megatron_lite.description.operations import (
    ALL_GATHER,
    REDUCE_SCATTER,
    SHIFT,
    Collective,
    KeptTensor,
    Matmul,
    Moved,
    Operation,
    OperatorCall,
    RegionEntry,
    document_starts,
    shared_table,
)
from megatron_lite.description.sizes import Heads, Sizes

CORE = "core_attention"
SEED_AND_OFFSET = 16  # bytes
CONTEXT_PARALLEL_ATTENTION = "megatron_lite.context_parallel_attention.default"


def attention_output(model: ModelConfig, sizes: Sizes) -> KeptTensor:
    """Returns the tensor that core attention returns and linear_proj saves."""
    return KeptTensor("attention output", Heads.of(model, sizes).query)


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
    yield Operation("split_heads", "self_attention")
    windowed = model.layer_reach(layer, sizes.seq_length) is not None
    whole = KeptTensor("query, key and value", heads.query + 2 * heads.kv)
    if normed:
        raw = (KeptTensor("query", heads.query), KeptTensor("key", heads.kv)) if apart else (whole,)
        yield query_key_norms(model, sizes, raw)
    if rotary:
        tables = 2 * sizes.own_seq_length * model.rotary_dim * sizes.element_bytes
        # x cos + rotate_half(x) sin takes five kernels for the query and five for the key.
        both = heads.query + heads.kv
        yield Operation(
            "rotary",
            "self_attention",
            (shared_table("rotary tables", tables),),
            moved=Moved(10 * both, 12 * both),
        )
    # Without rotation, norm and groups, core attention saves views of linear_qkv's output.
    inputs: tuple[KeptTensor, ...] = (whole,)
    if rotary or normed or grouped:
        prefix = "normed " if normed else ""
        if rotary:
            prefix = "rotated "
        value = whole if normed and not apart else KeptTensor("value", heads.kv)
        inputs = (
            KeptTensor(f"{prefix}query", heads.query),
            KeptTensor(f"{prefix}key", heads.kv),
            value,
        )
    starts = (document_starts(sizes),) if sizes.resets_attention else ()
    if model.builds_scores(sizes.device):
        yield _unfused(model, sizes, inputs, starts)
    else:
        yield _flash(model, sizes, inputs, starts, windowed=windowed)


def _flash(
    model: ModelConfig,
    sizes: Sizes,
    inputs: tuple[KeptTensor, ...],
    starts: tuple[KeptTensor, ...],
    *,
    windowed: bool,
) -> Operation:
    """Returns core attention by a flash kernel.

    The kernel keeps its inputs, its output and one number per row: the log of the row's sum of
    exponentials. Its backward builds the scores again. With a window the layer keeps the same
    tensors, since its mask is built again too (model/core_attention.py). With documents it also
    keeps their starts. The exception is a mask with dropout on CUDA: torch's own function keeps
    the mask.

    starts: the starts of the documents, if attention needs them.
    """
    attended = attention_output(model, sizes)
    rows = (
        sizes.micro_batch_size * model.num_attention_heads // sizes.tp_size * sizes.own_seq_length
    )
    log_sum_exp = KeptTensor("log-sum-exp", rows * sizes.accumulate_bytes)
    masked = windowed or bool(starts)
    kernel = "efficient_attention" if masked else "flash_attention"
    if sizes.device == "cpu":
        kernel = "flash_attention_for_cpu"
    operator = (
        f"aten._scaled_dot_product_{kernel}.default"
        if sizes.cp_size == 1
        else CONTEXT_PARALLEL_ATTENTION
    )
    scores, context = (
        one._replace(causal=not masked, fused=True) for one in _matmuls(model, sizes)
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
    # CUDA's kernels keep the place of their random numbers, also without dropout. The one for masks
    # does not.
    state = KeptTensor("seed and offset", SEED_AND_OFFSET)
    states = (state,) if sizes.device != "cpu" and sizes.cp_size == 1 and not masked else ()
    mask = starts
    if masked and model.attention_dropout:
        samples = sizes.micro_batch_size if starts else 1
        name = "document mask" if starts else "window mask"
        mask = (KeptTensor(name, samples * sizes.seq_length**2 * sizes.element_bytes),)
    return Operation(
        CORE,
        "self_attention.core_attention",
        (*inputs, attended, log_sum_exp, *states, *mask),
        (CORE_ATTENTION,),
        (RegionEntry(CORE_ATTENTION, (*inputs, *starts)),),
        (call,),
        backward,
        rebuilds=(scores,),
        temporary=temporaries.flash_attention(model, sizes, windowed=windowed),
    )


def _unfused(
    model: ModelConfig, sizes: Sizes, inputs: tuple[KeptTensor, ...], starts: tuple[KeptTensor, ...]
) -> Operation:
    """Returns core attention that builds its scores.

    It keeps the softmax, s/c x s for each head. With dropout it also keeps the mask, one byte per
    element, and the dropped softmax.

    starts: the starts of the documents, if attention needs them. Only a replay keeps them.
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
    kept = [KeptTensor("softmax", elements * softmax)]
    if model.attention_dropout > 0.0:
        kept += [
            KeptTensor("softmax dropout mask", elements),
            KeptTensor("dropped softmax", elements * sizes.element_bytes),
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
        (RegionEntry(CORE_ATTENTION, (*inputs, *starts)),),
        calls,
        backward,
        moved=moved,
        temporary=temporaries.unfused_attention(model, sizes, elements, softmax),
    )


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
