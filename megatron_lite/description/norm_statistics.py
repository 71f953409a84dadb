"""The description of a norm: its parameters, and the tensors that it keeps.

Its input, which it keeps too, is described where the norm is used.

Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.description.operations import KeptTensor, Parameter
from megatron_lite.description.sizes import Sizes, is_widened


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
