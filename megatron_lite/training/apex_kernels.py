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

import torch
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
)
from megatron_lite.parallel.weights import gathered_dtype
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

DEVICE_TYPE = "cuda"  # the only device type that apex has kernels for


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
    on = parallel.device.type
    kernel, why_not = None, f"NVIDIA apex has kernels for {DEVICE_TYPE} and this run is on {on}"
    if on == DEVICE_TYPE:
        kernel, why_not = weight_gradient_kernel()
    matmuls = {  # the weights of the linear layers and of the output projection
        module.weight
        for module in model.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    }
    tables = set[nn.Parameter]()
    for chunk in model:
        if chunk.embedding is not None:
            table = chunk.embedding.word_embeddings.weight
            if chunk.stage.is_first:
                tables.add(table)
            if chunk.stage.is_last and chunk.output_layer is None:
                matmuls.add(table)
    gradients = optimizer.layout.gradients
    narrow = isinstance(gradients, GradBuffer) and any(
        bucket.flat.dtype.itemsize == 2 for bucket in gradients.buckets
    )
    sums = Counter[str]()  # the matmuls, by who sums their gradients
    for name, weight in model.named_parameters():
        reason = ""
        if not training.gradient_accumulation_fusion:
            reason = "of --no-gradient-accumulation-fusion"
        elif not isinstance(gradients, GradBuffer):
            reason = "--use-torch-fsdp2 has no sum of a whole weight to add to"
        elif compiled_layers and "decoder.layers." in name:  # nothing else is compiled
            reason = "the graph of a compiled layer cannot call the kernel"
        elif not narrow and not can_be_summed(weight.dtype):
            reason = (
                f"this torch gives no {weight.dtype} weight a float32 gradient (Tensor.grad_dtype)"
            )
        elif weight in tables and not narrow and (on != "cuda" or weight.dtype != torch.float32):
            accumulate_lookup_(weight, gradients.grads[name])
        if weight not in matmuls:
            continue
        rounded = " after rounding them to 16 bits" if gathered_dtype(weight).itemsize == 2 else ""
        who = f"autograd{rounded}, because {reason}"
        if not reason:
            accumulate_with_(kernel, weight, gradients.grads[name])
            who = f"the layer's backward{rounded}, because {why_not}"
            if kernel is not None and not narrow:
                who = "NVIDIA apex's kernel"
            elif narrow or adds_unrounded(weight.device, weight.dtype):
                who = "torch's addmm"
        sums[who] += 1
    groups = [f"{plural(number, 'weight')} by {who}" for who, number in sums.items()]
    summed = "bfloat16" if narrow else "float32"
    line = f"weight gradients are summed in {summed}: {'; '.join(groups)}"
    return line + (" (of this rank's stages)" if parallel.pp_size > 1 else "")


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
