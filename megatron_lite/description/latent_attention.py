"""The description of multi-latent attention (model/latent_attention.py) up to linear_proj, as
operations. Standard library only."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_lite.config.regions import UP_PROJECTION

from .linears import column_linear
from .norms import norm_parameters, norm_statistics, shifted_weight
from .operations import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    Collective,
    KeptTensor,
    Moved,
    Operation,
)
from .self_attention import core_attention, rotary_tables
from .sizes import Sizes

# of the rotated part of queries: put in halves, multiplied by two tables, added and joined
TURNS = 12


def latent_operations(of: Sizes, normed: KeptTensor, layer: int) -> Iterator[Operation]:
    """Yields the operations before linear_proj of a layer. normed: its input."""
    model, rank, kv_rank = of.model, of.model.q_lora_rank, of.model.kv_lora_rank
    query, key, value = (
        KeptTensor("rotated query", of.query),
        KeptTensor("rotated key", of.kv),
        KeptTensor("value", of.value),
    )
    of_query, up = (of, normed), "linear_q_proj"
    if rank is not None:
        yield from _down(of, "q", normed, rank, rank)
        of_query, up = (replace(of, input_size=rank), _latent(of, "q", rank)), "linear_q_up_proj"
    whole = kv_rank + model.qk_pos_emb_head_dim
    yield from _down(of, "kv", normed, whole, kv_rank)
    # Without a norm the latent is a view of the whole.
    latent = _latent(of, "kv", kv_rank if model.qk_layernorm else whole)
    of_both = replace(of, input_size=kv_rank), latent
    rotated = KeptTensor(
        "rotated part of the key", of.element_bytes * of.tokens * model.qk_pos_emb_head_dim
    )
    # The part of the key that all heads share goes to the heads of every rank.
    splits = of.sequence_parallel
    gather, scatter, reduce = (
        Collective(kind, rotated.num_bytes) for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
    )
    yield Operation(
        "split_latent",
        "self_attention",
        calls=(gather.call(rotated.name),) * splits,
        backward=(scatter if splits else reduce,) * (of.tp_size > 1),
    )
    inputs = (of_query[1], of_both[1], *(rotated,) * splits)  # else it is a view
    discards = query.name, key.name, value.name
    yield _up(*of_query, up, model.head_dim)._replace(enters=inputs, discards=discards)
    second = _up(*of_both, "linear_kv_up_proj", model.qk_head_dim + model.v_head_dim)
    # The gradient of the other output is held.
    yield second._replace(temporary=second.temporary + of.query)
    moved = 2 * of.query + 2 * of.kv - _of_rotated(of) + 2 * of.value
    turned = 0 if of.compiled else TURNS * _of_rotated(of)
    yield Operation(
        "latent_heads",
        "self_attention",
        (rotary_tables(of),),
        (UP_PROJECTION,),
        moved=Moved(moved + turned, moved + turned),
        temporary=moved,
    )
    yield core_attention(of, (query, key, value), layer)


def _of_rotated(of: Sizes) -> int:
    return of.query * of.model.rotary_dim // of.model.head_dim


def _latent(of: Sizes, name: str, channels: int) -> KeptTensor:
    return KeptTensor(f"{name} latent", of.local_tokens * channels * of.element_bytes)


def _down(
    of: Sizes, name: str, normed: KeptTensor, channels: int, rank: int
) -> Iterator[Operation]:
    """Yields a down projection, which every TP rank holds whole, and the norm of its latent."""
    model, linear = of.model, f"linear_{name}_down_proj"
    down = _linear(of.shared_by(1), linear, channels, normed)
    (weight,) = down.parameters
    yield down._replace(parameters=(weight._replace(partial=of.sequence_parallel),))
    if model.qk_layernorm:
        latent = _latent(of, name, rank)
        yield Operation(
            f"{name}_layernorm",
            "self_attention",
            (
                _latent(of, f"{name} raw", channels),
                norm_statistics(of, latent.name, of.local_tokens),
                *shifted_weight(of, latent.name, rank),
            ),
            parameters=norm_parameters(of, rank, f"{name}_layernorm."),
            moved=Moved(2 * latent.num_bytes, 3 * latent.num_bytes),
        )


def _up(of: Sizes, keeps: KeptTensor, name: str, channels: int) -> Operation:
    """Returns an up projection. channels: those of a head."""
    width = of.model.num_attention_heads * channels // of.tp_size
    return _linear(of, name, width, keeps, regions=(UP_PROJECTION,))


def _linear(of: Sizes, name: str, width: int, keeps: KeptTensor, **others: Any) -> Operation:
    names = name, f"self_attention.{name}", name, f"{name} output"
    return column_linear(of, *names, width=width, bias=False, keeps=(keeps,), **others)
