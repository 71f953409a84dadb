"""The rules between the settings that change what a layer computes. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lite.config.model import ModelConfig


def check_variants(model: ModelConfig) -> None:
    """Raises ValueError if two settings of the layer contradict, or if one needs another."""
    if model.parallel_residual and model.norms_after:
        raise ValueError(
            "--parallel-residual needs --norm-position before: no known model has both"
        )
    if model.fp32_residual_connection and model.norms_after:
        raise ValueError(
            "--fp32-residual-connection needs --norm-position before: without a norm before them, "
            "linear layers would read float32"
        )
    if model.qk_layernorm_scope != "all-heads":
        return
    needed = {
        "--qk-layernorm": model.qk_layernorm,
        "--normalization RMSNorm, which needs one sum over the ranks instead of two": (
            model.normalization == "RMSNorm"
        ),
        "--norm-impl torch: apex's kernel sees the heads of one rank alone": (
            model.norm_impl == "torch"
        ),
    }
    for need, is_met in needed.items():
        if not is_met:
            raise ValueError(f"--qk-layernorm-scope all-heads needs {need}")
