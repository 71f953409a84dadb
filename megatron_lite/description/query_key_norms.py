"""The description of the norms of queries and keys as operations.

For the norms over all heads (model/all_heads_norm.py) it also has the collectives and the courses
of their memory.

Standard library only.
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
    Course,
    KeptTensor,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
    course,
)
from megatron_lite.description.sizes import Heads, Sizes


def query_key_norms(model: ModelConfig, sizes: Sizes, raw: tuple[KeptTensor, ...]) -> Operation:
    """Returns the norms of query and key, without their workspace.

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


def all_heads_forward(sizes: Sizes, heads: int, shifted: int) -> Course:
    """Returns the course of one norm's forward. It ends with the output and all that it keeps.

    heads: the bytes of the input. shifted: the bytes of 1 + weight, if that is kept.
    """
    numbers, wide, cast = _numbers(sizes), *_wide(sizes, heads)
    changes = [+shifted, +cast, +wide, -cast, +numbers, -wide]  # the squares and their sums
    changes += [+numbers, -numbers] if sizes.tp_size > 1 else []
    changes += [+numbers, -numbers]
    changes += [+_inside(sizes, cast), +wide, -_inside(sizes, cast)]
    return course(*changes, *((+heads, -wide) if cast else ()))


def all_heads_backward(sizes: Sizes, heads: int, weight: Parameter, shifted: int) -> Course:
    """Returns the course of one norm's backward. It ends with the gradients of input and weight.

    The gradient of the output is freed, and all that the norm keeps, except the input. The input is
    left to the caller. heads, shifted: as in the forward.
    """
    numbers, wide, cast = _numbers(sizes), *_wide(sizes, heads)
    inside, vector = _inside(sizes, cast), weight.num_elements * sizes.accumulate_bytes
    changes = [+vector if cast else 0, +inside, +wide, -inside]
    # the product of output's gradient and normed input, its sums for the weight and over the heads
    changes += [+inside, -inside, +vector, +numbers]
    changes += [+numbers, -numbers] if sizes.tp_size > 1 else []
    changes += [-wide, +inside, +wide, -inside, +inside, +wide, -inside, +numbers, -wide - numbers]
    if cast:
        changes += [+heads, -wide, +weight.num_elements * sizes.element_bytes, -2 * vector]
    return course(*changes, -numbers, -heads - numbers - shifted)


def _numbers(sizes: Sizes) -> int:
    return sizes.tokens * sizes.accumulate_bytes


def _wide(sizes: Sizes, heads: int) -> tuple[int, int]:
    """Returns the bytes of the heads in float32, and of the cast to it, which is 0 in float32."""
    wide = heads // sizes.element_bytes * sizes.accumulate_bytes
    return wide, wide if sizes.is_rounded else 0


def _inside(sizes: Sizes, cast: int) -> int:
    """Returns the bytes that a product of two dtypes casts inside its operator on a CPU."""
    return cast if sizes.inside_operators and sizes.device == "cpu" else 0
