"""The norms of a layer, and the dropout and addition of its branches, as operations.

They are the norms of the residual stream (model/layer.py), those of queries and keys, and those
over all heads (`all_heads` of Norm), which have collectives. The gradient of the residual
stream is held while a branch runs backward. It grows by the gradient of the branch's input when the
branch ends. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.regions import DROPOUT, LAYERNORM
from megatron_lite.description.linears import OPERATORS
from megatron_lite.description.operations import (
    ALL_REDUCE,
    QK_LAYERNORM,
    Collective,
    KeptTensor,
    Moved,
    Operation,
    OperatorCall,
    Parameter,
    RegionEntry,
    rng_state,
)
from megatron_lite.description.sizes import Heads, Sizes, is_widened, residual_bytes

ATTENTION_DROPOUT, MLP_DROPOUT = "attention dropout", "mlp dropout"


def norm_before(
    name: str,
    residual: KeptTensor,
    output: str,
    statistics: str,
    *,
    model: ModelConfig,
    sizes: Sizes,
) -> Operation:
    """Returns the norm at the beginning of a branch."""
    return Operation(
        name,
        name,
        (residual, *residual_norm_keeps(statistics, model, sizes)),
        (LAYERNORM,),
        (RegionEntry(LAYERNORM, (residual,), (output,)),),
        parameters=norm_parameters(model, model.hidden_size, partial=sizes.sequence_parallel),
        # Backward reads dy and x, writes dx, and adds dx to the gradient of the residual.
        moved=Moved(2 * residual.num_bytes, 6 * residual.num_bytes),
    )


def norm_after(
    name: str, linear: str, *, model: ModelConfig, sizes: Sizes, regions: tuple[str, ...] = ()
) -> Operation:
    """Returns the norm at the end of a branch. It keeps the output of the branch's last matmul.

    linear: the name of that row-parallel linear layer.
    """
    shape = model, sizes, sizes.local_tokens, model.hidden_size
    vectors = norm_parameters(model, model.hidden_size, partial=sizes.sequence_parallel)
    hidden = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    # Several ranks add the bias to the sum, which gives a tensor of its own.
    biased = model.add_bias_linear and sizes.tp_size > 1
    branch = KeptTensor(f"{linear} output{' with its bias' if biased else ''}", hidden)
    return Operation(
        name,
        name,
        (branch, *norm_keeps(name, *shape)),
        regions,
        parameters=vectors,
        moved=Moved(2 * hidden, 3 * hidden),
    )


def add_branch(name: str, *, model: ModelConfig, sizes: Sizes) -> Operation:
    """Returns the dropout of a branch and its addition to the residual.

    It keeps a mask of one byte per element, unless the probability is 0.
    """
    added = residual_bytes(model, sizes)
    branch = sizes.local_tokens * model.hidden_size * sizes.element_bytes
    if not model.hidden_dropout:
        # The gradient of the sum is the gradient of both terms. A 16-bit branch gets a cast of it.
        cast = added + branch if is_widened(model, sizes) else 0
        return Operation(name, "", regions=(DROPOUT,), moved=Moved(2 * added + branch, cast))
    mask = KeptTensor(f"{name} mask", sizes.local_tokens * model.hidden_size)
    state = rng_state(f"RNG state of the {mask.name}", sizes.stream_state_bytes)
    return Operation(
        name,
        "",
        (mask,),
        (DROPOUT,),
        (RegionEntry(DROPOUT, (state,)),),
        moved=Moved(5 * added + mask.num_bytes, 2 * added + mask.num_bytes),
    )


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


def norm_statistics(name: str, model: ModelConfig, sizes: Sizes, rows: int) -> KeptTensor:
    """Returns the statistics that a norm of `rows` rows keeps for backward."""
    return KeptTensor(
        f"{name} statistics",
        chosen("--normalization", model.normalization, STATISTICS)(rows, model, sizes),
    )


def norm_keeps(
    name: str, model: ModelConfig, sizes: Sizes, rows: int, width: int
) -> tuple[KeptTensor, ...]:
    """Returns the tensors that a norm of rows of `width` elements keeps besides its input."""
    statistics = norm_statistics(name, model, sizes, rows)
    return statistics, *shifted_weight(name, model, sizes, width)


def shifted_weight(
    name: str, model: ModelConfig, sizes: Sizes, width: int
) -> tuple[KeptTensor, ...]:
    """Returns 1 + weight, which a norm keeps under --apply-layernorm-1p, or nothing."""
    if not model.apply_layernorm_1p:
        return ()
    return (KeptTensor(f"{name} weight plus 1", width * sizes.element_bytes),)


def residual_norm_keeps(name: str, model: ModelConfig, sizes: Sizes) -> tuple[KeptTensor, ...]:
    """Returns the tensors that a norm of the residual stream keeps besides its input."""
    if not is_widened(model, sizes):
        return norm_keeps(name, model, sizes, sizes.local_tokens, model.hidden_size)
    wide = replace(sizes, element_bytes=sizes.accumulate_bytes)
    return (
        norm_statistics(name, model, wide, sizes.local_tokens),
        *(
            KeptTensor(f"{name} {kind} in float32", _vector(model, sizes))
            for kind in ("weight", "bias")[: _kept_vectors(model, sizes)]
        ),
    )


def _kept_vectors(model: ModelConfig, sizes: Sizes) -> int:
    """Returns how many parameters a norm keeps. Only apex's kernel keeps the bias."""
    uses_apex = model.norm_impl == "apex" and not sizes.compiled_kernels
    return model.norm_vectors if uses_apex else 1


def _vector(model: ModelConfig, sizes: Sizes) -> int:
    return model.hidden_size * sizes.accumulate_bytes


def norm_parameters(
    model: ModelConfig, width: int, prefix: str = "", *, partial: bool
) -> tuple[Parameter, ...]:
    """Returns the weight of a norm and, for LayerNorm, the bias. Each has `width` elements.

    partial: whether each TP rank normalizes other tokens or other heads.
    """
    return tuple(
        Parameter(f"{prefix}{name}", (width,), partial)
        for name in ("weight", "bias")[: model.norm_vectors]
    )


def _layer_norm_statistics(rows: int, model: ModelConfig, sizes: Sizes) -> int:
    """Returns the bytes of the mean and the reciprocal deviation of each row.

    torch's CPU kernel keeps them in the dtype of the rows. All other kernels, also compiled ones,
    keep at least float32.
    """
    in_rows_dtype = (
        sizes.device == "cpu" and model.norm_impl == "torch" and not sizes.compiled_kernels
    )
    return 2 * rows * (sizes.element_bytes if in_rows_dtype else sizes.accumulate_bytes)


def _rms_norm_statistics(rows: int, model: ModelConfig, sizes: Sizes) -> int:
    """Returns the bytes of the reciprocal root mean square of each row. RMSNorm has no mean."""
    return rows * sizes.accumulate_bytes


STATISTICS = {"LayerNorm": _layer_norm_statistics, "RMSNorm": _rms_norm_statistics}
