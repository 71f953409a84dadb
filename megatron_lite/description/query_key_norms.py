"""The description of the norms of queries and keys as operations.

For the norms over all heads (AllHeadsNorm) it also has the collectives. Standard library only.
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.linears import OPERATORS
from megatron_lite.description.norm_statistics import (
    norm_parameters,
    norm_statistics,
    shifted_weight,
)
from megatron_lite.description.operations import (
    ALL_REDUCE,
    QK_LAYERNORM,
    Collective,
    KeptTensor,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
)
from megatron_lite.description.sizes import Heads, Sizes


def query_key_norms(model: ModelConfig, sizes: Sizes, raw: tuple[KeptTensor, ...]) -> Operation:
    """Returns the norms of query and key.

    raw: the tensors that they keep of their inputs.
    """
    heads = Heads.of(model, sizes)
    both = heads.query + heads.kv

    def shifted(weights: tuple[Parameter, ...]) -> tuple[KeptTensor, ...]:
        kept = zip(weights, ("query norm", "key norm"), strict=True)
        return tuple(
            tensor
            for weight, name in kept
            for tensor in shifted_weight(name, model, sizes, weight.num_elements)
        )

    if model.norms_all_heads:
        calls, weights = all_heads_calls(sizes), all_heads_parameters(model, sizes)
        return Operation(
            QK_LAYERNORM,
            "self_attention",
            (*raw, all_heads_statistics(sizes), *shifted(weights)),
            calls=calls,
            backward=tuple(one for call in reversed(calls) for one in call.collectives),
            parameters=weights,
            moved=Moved(3 * both, 5 * both),
        )
    rows = both // sizes.element_bytes // model.head_dim
    of_query, of_key = (
        norm_parameters(model, model.head_dim, f"{name}_layernorm.", partial=True) for name in "qk"
    )
    return Operation(
        QK_LAYERNORM,
        "self_attention",
        (*raw, norm_statistics("qk norm", model, sizes, rows), *shifted((of_query[0], of_key[0]))),
        parameters=(*of_query, *of_key),
        moved=Moved(2 * both, 3 * both),
    )


def all_heads_parameters(model: ModelConfig, sizes: Sizes) -> tuple[Parameter, ...]:
    """Returns the weights of both norms, of this rank's heads."""
    return tuple(
        Parameter(f"{name}_layernorm.weight", (heads * model.head_dim // sizes.tp_size,))
        for name, heads in (("q", model.num_attention_heads), ("k", model.query_groups))
    )


def all_heads_statistics(sizes: Sizes) -> KeptTensor:
    """Returns the scales that both norms keep, one number for each token and norm."""
    return KeptTensor("qk norm statistics", 2 * _numbers(sizes))


def all_heads_calls(sizes: Sizes) -> tuple[OperatorCall, ...]:
    """Returns the all-reduces of both norms in the forward. The backward issues as many."""
    if sizes.tp_size == 1:
        return ()
    return tuple(
        OperatorCall(
            OPERATORS[ALL_REDUCE],
            (KeptTensor(f"sum of squares of the {name}", _numbers(sizes)),),
            collectives=(Collective(ALL_REDUCE, _numbers(sizes)),),
        )
        for name in ("query", "key")
    )


def _numbers(sizes: Sizes) -> int:
    return sizes.tokens * sizes.accumulate_bytes
