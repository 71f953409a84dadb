"""Chooses who sums the weight gradients: NVIDIA apex's kernel, torch's addmm or autograd.

The log states the choice with the reasons. apex is not a dependency. The package apex on PyPI is an
unrelated toolkit for Pyramid. This module recognises that package by its files and never imports
it. The import of NVIDIA's apex may raise any error (another torch, another CUDA). Such an error
becomes the reason and does not end the run. docs/performance.md describes what the kernel does and
how to install apex.
"""

import importlib
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

from megatron_lite.config.training import TrainingConfig
from megatron_lite.config.units import plural
from megatron_lite.model.gpt import ModelStages
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.weight_gradient import (
    accumulate_lookup_,
    accumulate_with_,
    adds_unrounded,
    can_be_summed,
    lookup_adds,
)
from megatron_lite.parallel.weights import gathered_dtype
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

DEVICE_TYPE = "cuda"  # the only device type that apex has kernels for


def kernel_of_apex(device_type: str) -> tuple[Any, str]:
    """Returns apex's kernel for a device, or None, and the reason why it cannot be used."""
    if device_type == DEVICE_TYPE:
        return weight_gradient_kernel()
    return None, f"NVIDIA apex has kernels for {DEVICE_TYPE} and this run is on {device_type}"


def fuse_weight_gradients_(
    training: TrainingConfig,
    parallel: ParallelState,
    model: ModelStages,
    optimizer: Optimizer,
    *,
    compiled_layers: bool = False,
) -> str:
    """Makes a kernel sum the weight gradients of all matmuls that allow it.

    It is apex's kernel or torch's addmm. Returns the log's line about it.
    compiled_layers: whether each layer is one graph of the compiler, which cannot call a kernel.
    """
    kernel, why_not = kernel_of_apex(parallel.device.type)
    matmuls = _matmul_weights(model)
    tables = {
        chunk.embedding.word_embeddings.weight
        for chunk in model
        if chunk.stage.is_first and chunk.embedding is not None
    }
    compiled = set[nn.Parameter]()  # only transformer layers are
    for chunk in model if compiled_layers else ():
        compiled |= {*chunk.decoder.layers.parameters()}
    gradients = optimizer.layout.gradients
    buckets = gradients.buckets if isinstance(gradients, GradBuffer) else ()
    narrow = any(bucket.flat.dtype.itemsize == 2 for bucket in buckets)
    for_all = ""
    if not training.gradient_accumulation_fusion:
        for_all = "of --no-gradient-accumulation-fusion"
    elif not isinstance(gradients, GradBuffer):
        for_all = "--use-torch-fsdp2 has no sum of a whole weight to add to"
    sums = Counter[str]()  # the matmuls, by who sums their gradients
    for name, weight in model.named_parameters():
        reason = for_all
        if weight in compiled:
            reason = reason or "the graph of a compiled layer cannot call the kernel"
        elif not narrow and not can_be_summed(weight.dtype):
            reason = reason or (
                f"this torch gives no {weight.dtype} weight a float32 gradient (Tensor.grad_dtype)"
            )
        if not for_all and weight in tables and lookup_adds(weight) and not narrow:
            accumulate_lookup_(weight, gradients.grads[name])
        if weight in matmuls:
            if not reason:
                accumulate_with_(kernel, weight, gradients.grads[name])
            direct = narrow and not reason
            who = "torch's addmm" if direct else _who_sums(weight, reason, kernel, why_not)
            sums[who] += 1
    groups = [f"{plural(number, 'weight')} by {who}" for who, number in sums.items()]
    summed = "bfloat16" if narrow else "float32"
    line = f"weight gradients are summed in {summed}: {'; '.join(groups)}"
    return line + (" (of this rank's stages)" if parallel.pp_size > 1 else "")


def _who_sums(weight: nn.Parameter, reason: str, kernel: Any, why_not_apex: str) -> str:
    """Returns who sums the gradients of a matmul's weight over micro-batches, for the log.

    reason: why autograd does; "" if it does not.
    """
    if not reason and kernel is not None:
        return "NVIDIA apex's kernel"
    if not reason and adds_unrounded(weight.device, weight.dtype):
        return "torch's addmm"
    rounded = " after rounding them to 16 bits" if gathered_dtype(weight).itemsize == 2 else ""
    who = "autograd" if reason else "the layer's backward"
    return f"{who}{rounded}, because {reason or why_not_apex}"


def _matmul_weights(model: ModelStages) -> set[nn.Parameter]:
    """Returns the weights of the linear layers and of the output projection."""
    weights = {
        module.weight
        for module in model.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    }
    for chunk in model:
        if chunk.stage.is_last and chunk.output_layer is None and chunk.embedding is not None:
            weights.add(chunk.embedding.word_embeddings.weight)
    return weights


EXTENSION, SYMBOL = "fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"


def weight_gradient_kernel() -> tuple[Any, str]:
    """Finds `wgrad_gemm_accum_fp32(input, grad_output, main_grad)`, or the reason against it.

    The kernel adds grad_output^T input to main_grad [out, in], float32.
    """
    # Releases of apex have put their extensions at the top level or inside the package.
    names = [EXTENSION, f"apex._extensions.{EXTENSION}"] if _is_nvidias() else [EXTENSION]
    for name in names:
        try:
            found = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # built for another torch it may raise any
            if isinstance(error, ModuleNotFoundError) and name.startswith(error.name or name):
                continue
            text = " ".join(str(error).split()) or "no message"
            return None, f"importing {name} fails ({type(error).__name__}: {text[:200]})"
        missing = f"{name} has no {SYMBOL}: it is of another release of apex"
        return getattr(found, SYMBOL, None), missing
    return None, (
        "NVIDIA apex is not installed with its CUDA extensions (`pip install apex` installs "
        "another package)"
    )


def _is_nvidias() -> bool:
    """Returns whether the package with the name apex here is NVIDIA's. Imports nothing."""
    try:
        spec = importlib.util.find_spec("apex")
    except Exception:  # finders that other packages have installed
        return False
    folders = spec.submodule_search_locations if spec is not None else None
    return any(Path(folder, "optimizers").is_dir() for folder in folders or ())
