"""Chooses between the kernels of torch and of NVIDIA apex.

The choice is checked before the run starts. The log states it with the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from megatron_lite.config.run import RunConfig
from megatron_lite.config.training import TrainingConfig
from megatron_lite.model.norm import APEX_NORMS
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.optim.grad_buffer import GradBuffer
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel import apex
from megatron_lite.parallel.products import adds_unrounded
from megatron_lite.parallel.state import ParallelState
from megatron_lite.parallel.weight_gradient import (
    ADDMM,
    ADDMM_PROJECTION,
    FUSED,
    FUSED_PROJECTION,
    ROUNDED,
    accumulate_lookups_,
    accumulate_with_,
    can_be_summed,
    lookup_adds,
    summary,
)
from megatron_lite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def check_kernels(config: RunConfig, device_type: str) -> None:
    """Raises InputError if a flag asks for a kernel of NVIDIA apex that this process cannot use."""
    for flag, chosen, kernel in _choices(config):
        if chosen == "apex":
            apex.require(kernel(device_type), flag)


def kernel_notices(config: RunConfig, device_type: str) -> list[str]:
    """Returns at most one line for the log.

    The line is about an installed package called apex that is not NVIDIA's, or about kernels of
    NVIDIA apex that are available here and that no flag asks for.
    """
    if (other := apex.notice()) is not None:
        return [other]
    unused = [f"{flag} apex" for flag, chosen, _ in _choices(config) if chosen != "apex"]
    if device_type != apex.DEVICE_TYPE or not unused or apex.installed_package().kind != "nvidia":
        return []
    return [
        (
            f"NVIDIA apex is installed: {' and '.join(unused)} would use its kernels, which round "
            "differently (docs/performance.md)"
        )
    ]


def _choices(config: RunConfig) -> list[tuple[str, str, Callable[[str], apex.Kernel]]]:
    """Returns each flag with its value and the function that finds apex's kernel for it. A norm
    that apex does not have is left out; model/norm.py refuses it under `--norm-impl apex`."""
    norm = APEX_NORMS.get(config.model.normalization)
    norms = [] if norm is None else [("--norm-impl", config.model.norm_impl, norm)]
    return [*norms, ("--optimizer-impl", config.optimizer.optimizer_impl, apex.fused_adam)]


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
    kernel = apex.weight_gradient_kernel(parallel.device.type)
    compiled = {
        # only transformer layers are compiled
        parameter
        for chunk in model
        for parameter in (chunk.decoder.layers.parameters() if compiled_layers else ())
    }
    paths = weight_paths(training, model, optimizer, kernel, compiled)
    tables = {
        chunk.embedding.word_embeddings.weight
        for chunk in model
        if chunk.stage.is_first and chunk.embedding is not None
    }
    gradients = optimizer.layout.gradients
    if isinstance(gradients, GradBuffer):
        for name, parameter in model.named_parameters():
            total = [(parameter, gradients.grads[name])]
            if paths.get(name) in (FUSED, FUSED_PROJECTION):
                accumulate_with_(kernel.value, total)
            elif paths.get(name) in (ADDMM, ADDMM_PROJECTION, ROUNDED):
                accumulate_with_(None, total)
            adds = training.gradient_accumulation_fusion and lookup_adds(parameter)
            if parameter in tables and adds:
                accumulate_lookups_(total)
    dtype = next(iter(model)).context.params_dtype
    line = summary(paths, dtype, kernel.reason, device_type=parallel.device.type)
    return line + (" (of this rank's stages)" if parallel.pp_size > 1 else "")


def weight_paths(
    training: TrainingConfig,
    model: ModelStages,
    optimizer: Optimizer,
    kernel: apex.Kernel,
    compiled: Collection[nn.Parameter] = (),
) -> dict[str, str]:
    """Returns, by the name of each weight of a matmul, who sums its gradient.

    FUSED and FUSED_PROJECTION mean apex's kernel, ADDMM and ADDMM_PROJECTION torch's addmm, ROUNDED
    the layer's backward. Any other text is why autograd sums it.
    """
    reason = _reason_for_all(training, optimizer)
    paths = {}
    for name, weight, has_lookup in _matmul_weights(model):
        if reason or weight in compiled:
            paths[name] = reason or "the graph of a compiled layer cannot call the kernel"
        elif not can_be_summed(weight.dtype):
            paths[name] = (
                f"this torch gives no {weight.dtype} weight a float32 gradient (Tensor.grad_dtype)"
            )
        elif kernel.value is not None:
            paths[name] = FUSED_PROJECTION if has_lookup else FUSED
        elif adds_unrounded(weight.device, weight.dtype):
            paths[name] = ADDMM_PROJECTION if has_lookup else ADDMM
        else:
            paths[name] = ROUNDED
    return paths


def _reason_for_all(training: TrainingConfig, optimizer: Optimizer) -> str:
    if not training.gradient_accumulation_fusion:
        return "of --no-gradient-accumulation-fusion"
    if not isinstance(optimizer.layout.gradients, GradBuffer):
        return (
            "--use-torch-fsdp2 reduces the gradients of each micro-batch, and has no sum of "
            "a whole weight to add to"
        )
    return ""


def _matmul_weights(model: ModelStages) -> list[tuple[str, nn.Parameter, bool]]:
    """Returns the name and weight of each linear layer and of the output projection.

    The third entry is whether a token lookup on this rank reads the same (tied) weight.
    """
    linear = {
        module.weight
        for module in model.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    }
    tied: dict[nn.Parameter, bool] = {}
    for chunk in model:
        if chunk.stage.is_last and chunk.output_layer is None and chunk.embedding is not None:
            tied[chunk.embedding.word_embeddings.weight] = chunk.stage.is_first
    return [
        (name, parameter, tied.get(parameter, False))
        for name, parameter in model.named_parameters()
        if parameter in linear or parameter in tied
    ]
