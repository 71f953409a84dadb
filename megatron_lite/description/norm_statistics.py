"""The tensors that a norm keeps besides its input, and its parameters. Standard library only."""

from __future__ import annotations

from megatron_lite.config.checks import chosen
from megatron_lite.config.model import ModelConfig
from megatron_lite.description.operations import KeptTensor, Parameter
from megatron_lite.description.sizes import Sizes


def norm_statistics(name: str, model: ModelConfig, sizes: Sizes, rows: int) -> KeptTensor:
    """Returns the statistics that a norm of `rows` rows keeps for backward."""
    return KeptTensor(
        f"{name} statistics",
        chosen("--normalization", model.normalization, STATISTICS)(rows, model, sizes),
    )


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

    torch's CPU kernel keeps them in the dtype of the rows. All other kernels keep at least float32.
    """
    in_rows_dtype = sizes.device == "cpu" and model.norm_impl == "torch"
    return 2 * rows * (sizes.element_bytes if in_rows_dtype else sizes.accumulate_bytes)


def _rms_norm_statistics(rows: int, model: ModelConfig, sizes: Sizes) -> int:
    """Returns the bytes of the reciprocal root mean square of each row. RMSNorm has no mean."""
    return rows * sizes.accumulate_bytes


STATISTICS = {"LayerNorm": _layer_norm_statistics, "RMSNorm": _rms_norm_statistics}
