"""Chooses who computes the float32 products of linear layers: torch's BLAS library or oneDNN.

torch for x86 sends them to Intel's MKL. On AMD processors with AVX-512, oneDNN computes large ones
faster (docs/performance.md). The choice follows from the vendor and the flags in Linux's
/proc/cpuinfo. Elsewhere, and if the file cannot be read, torch's library keeps them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_lite.config.large_products import LEAST_MULTIPLICATIONS
from megatron_lite.config.run import RunConfig
from megatron_lite.description.model_ends import head_operations
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_layer

CPUINFO = Path("/proc/cpuinfo")
MOST_CHARACTERS = 2**14  # the first processor takes about 2,000; a machine has up to hundreds


def uses_onednn(config: RunConfig, device_type: str, cpuinfo: Path = CPUINFO) -> bool:
    """Returns whether oneDNN computes the large float32 products of a run on this machine.

    Layers that are compiled as a whole leave their products to the compiler.
    """
    return (
        config.training.onednn_matmuls
        and config.training.precision == "fp32"
        and device_type == "cpu"
        and not config.compiles_layers
        and torch.backends.mkldnn.is_available()
        and is_amd_with_avx512(cpuinfo)
    )


def is_amd_with_avx512(cpuinfo: Path = CPUINFO) -> bool:
    """Returns whether the first processor in `cpuinfo` is from AMD and has AVX-512."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as opened:
            text = opened.read(MOST_CHARACTERS)
    except OSError:
        return False
    facts: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    return facts.get("vendor_id") == "AuthenticAMD" and "avx512f" in facts.get("flags", "").split()


def products_notices(config: RunConfig, *, onednn: bool) -> tuple[str, ...]:
    """Returns the log's line about the products; none if all are MKL's.

    onednn: the choice of the run (`uses_onednn`). A model whose products are all small has no line.
    """
    if not onednn or _largest_product(config) < LEAST_MULTIPLICATIONS:
        return ()
    power = LEAST_MULTIPLICATIONS.bit_length() - 1
    sums = config.training.gradient_accumulation_fusion and not config.data_parallel.use_torch_fsdp2
    exception = (
        ""
        if sums or config.parallel.tensor_model_parallel_size > 1
        else "; column-parallel layers stay with MKL, because autograd sums their weight gradients"
    )
    return (
        (
            f"float32 products of linear layers: oneDNN from 2^{power} multiplications on, which "
            "is faster than MKL on this processor and rounds differently"
            f"{exception} (--no-onednn-matmuls)"
        ),
    )


def _largest_product(config: RunConfig) -> int:
    """Returns the most multiplications of a product of a rank's layers and of its head."""
    model, sizes = config.model, Sizes.of(config, device="cpu")
    operations = (*describe_layer(model, sizes).operations, *head_operations(model, sizes))
    return max(
        matmul.m * matmul.n * matmul.k
        for operation in operations
        for call in operation.calls
        for matmul in call.matmuls
        if model.hidden_size in (matmul.n, matmul.k)
    )
