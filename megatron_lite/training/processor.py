"""Chooses whether a run on a CPU takes other products than torch would take.

    float32 products of linear layers    torch for x86 sends them to Intel's MKL. On AMD processors
                                         that compute 512 bits at a time (Zen 5), oneDNN is up to
                                         twice as fast for large ones. With AVX-512 in two halves
                                         (Zen 4) it is as fast or faster on one thread, and slower
                                         on two.
    16-bit products of linear layers     without AVX-512, torch computes them in slow loops. Float32
                                         products of casts are up to a hundred times as fast
                                         (parallel/wide_products.py).
    bf16 attention                       torch's flash kernel. On processors that multiply bf16
                                         vectors (avx512_bf16) and no tiles (AMX), and on those
                                         without AVX-512, products of whole blocks are faster
                                         (model/causal_products.py).

docs/performance.md has the measurements. The choice follows from the vendor, the family and the
flags in Linux's /proc/cpuinfo, and from the number of threads. Elsewhere, and if the file cannot be
read, torch's own choice stays.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_lite.config.large_products import LEAST_MULTIPLICATIONS
from megatron_lite.config.run import RunConfig
from megatron_lite.description.core_attention_workspace import by_products
from megatron_lite.description.model_ends import head_operations
from megatron_lite.description.sizes import Processor, Sizes
from megatron_lite.description.transformer_layer import describe_layer
from megatron_lite.parallel import cpu_facts
from megatron_lite.parallel.cpu_facts import CPUINFO, facts, flags, has_avx2_alone, vendor

ZEN_4 = "25"  # the family of Zen 3, which has no AVX-512, and of Zen 4


def uses_onednn(config: RunConfig, device_type: str, cpuinfo: Path = CPUINFO) -> bool:
    """Returns whether a run replaces torch's products on this machine, in the run's precision.

    Layers that are compiled as a whole leave their products to the compiler.
    """
    gains = GAINS.get(config.training.precision)
    return (
        config.training.onednn_matmuls
        and gains is not None
        and device_type == "cpu"
        and not config.compiles_layers
        and torch.backends.mkldnn.is_available()
        and gains(cpuinfo)
    )


def processor_of(config: RunConfig, device_type: str) -> Processor:
    """Returns what a run in this process computes with."""
    return Processor(
        uses_onednn(config, device_type),
        torch.get_num_threads(),
        widens=_widens(config, device_type),
    )


def _widens(config: RunConfig, device_type: str) -> bool:
    return (
        config.training.onednn_matmuls
        and device_type == "cpu"
        and cpu_facts.lacks_16_bit_products()
    )


def multiplies_faster_by_onednn(cpuinfo: Path = CPUINFO) -> bool:
    """Returns whether oneDNN computes large float32 products faster than MKL.

    It does with the threads of this process, if the first processor in `cpuinfo` is from AMD and
    has AVX-512, and is no Zen 4 with several threads.
    """
    found = facts(cpuinfo)
    return (
        vendor(found) == "AuthenticAMD"
        and "avx512f" in flags(found)
        and (found.get("cpu family") != ZEN_4 or torch.get_num_threads() == 1)
    )


def multiplies_bf16_vectors(cpuinfo: Path = CPUINFO) -> bool:
    """Returns whether the first processor in `cpuinfo` multiplies bf16 vectors, and no tiles."""
    names = flags(facts(cpuinfo))
    return "avx512_bf16" in names and "amx_bf16" not in names


def gains_in_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Returns whether bf16 attention, or all products, gain on the first processor."""
    return multiplies_bf16_vectors(cpuinfo) or has_avx2_alone(cpuinfo)


# By the run's precision: whether a processor gains.
GAINS: Mapping[str, Callable[[Path], bool]] = {
    "fp32": multiplies_faster_by_onednn,
    "bf16": gains_in_bf16,
    "fp16": has_avx2_alone,
}


def products_notices(config: RunConfig, *, onednn: bool) -> tuple[str, ...]:
    """Returns the log's line about the products; none if torch's own choice stays.

    onednn: the choice of the run (`uses_onednn`). A model that has none of them has no line.
    """
    if onednn and config.training.precision != "fp32" and cpu_facts.lacks_16_bit_products():
        return (_IN_FLOAT32,)
    if onednn and config.training.precision == "bf16":
        return (_ATTENTION,) if _attends_by_products(config) else ()
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
            "is up to twice as fast as MKL on processors like this one and rounds differently"
            f"{exception} (--no-onednn-matmuls)"
        ),
    )


def described(device: torch.device, *, onednn: bool) -> str:
    """Returns one line about what computes, for a reader who compares it with another run's.

    Runs with different lines can differ in their low bits. Equal lines promise nothing.
    onednn: the choice of the run (`uses_onednn`).
    """
    if device.type != "cpu":
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return f"{name}, torch {torch.__version__}"
    name = vendor(facts())
    threads = torch.get_num_threads()
    own = "in float32" if cpu_facts.lacks_16_bit_products() else "by oneDNN"
    return (
        f"{name or platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}, "
        f"{threads} {'thread' if threads == 1 else 'threads'} a rank, products "
        f"{own if onednn else 'by torch'}, torch {torch.__version__}"
    )


def moved_notices(computed_on: str, computes_on: str) -> tuple[str, ...]:
    """Returns the log's line about a checkpoint that something else computed; none if it did not.

    computed_on: what computed the checkpoint (`described`); "" if that is not known.
    """
    if computed_on in ("", computes_on):
        return ()
    return (
        f"the checkpoint was computed on {computed_on}; this run computes on {computes_on}, so its "
        "results can have other low bits than those of a run that stayed there",
    )


_IN_FLOAT32 = (
    "16-bit products of linear layers and attention: in float32 and then rounded, which is up to a "
    "hundred times as fast as torch's 16-bit products on processors like this one, and rounds "
    "differently (--no-onednn-matmuls)"
)
_ATTENTION = (
    "bf16 attention: by oneDNN's matrix products, which are faster than torch's flash kernel on "
    "processors like this one and round differently (--no-onednn-matmuls)"
)


def _attends_by_products(config: RunConfig) -> bool:
    sizes = replace(Sizes.of(config, device="cpu"), onednn=True)
    return any(
        by_products(
            config.model,
            sizes,
            windowed=config.model.layer_reach(layer, sizes.seq_length) is not None,
        )
        for layer in range(config.model.num_layers)
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
